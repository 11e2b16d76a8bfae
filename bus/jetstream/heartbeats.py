"""How far runs are, said to the readers of this process as brokers say it, by heartbeats."""

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import zmq
import zmq.asyncio

from offloop.bus.jetstream import names
from offloop.bus.jetstream.connection import passing_errors
from offloop.bus.protocol.frames import encode_control, encode_heartbeat
from offloop.bus.recording import records
from offloop.bus.recording.records import CheckRecord, DamageError

if TYPE_CHECKING:
    from nats.aio.msg import Msg

    from offloop.bus.jetstream.client import NatsClient

_BEAT_SECONDS = 0.5
_GATHER_SECONDS = 0.02
_POSITION_SECONDS = 0.25
_LEASE_SECONDS = 5.0
_IDLE_SECONDS = 60.0


class Heartbeats:
    """Follows runs for as long as readers ask for it: copies in the servers by their messages as they pass, other hosts
    by asking them.

    ``address`` is where the heartbeats of copies are published; ``tell`` takes how far the copies of a run's attempts
    go."""

    def __init__(
        self,
        client: "NatsClient",
        context: "zmq.asyncio.Context",
        address: str,
        tell: Callable[[str, Mapping[int, int]], None],
    ) -> None:
        self.address = address
        self._client = client
        self._context = context
        self._tell = tell
        self._feed = context.socket(zmq.PUB)
        self._feed.bind(address)
        self._copies: dict[str, _FollowedCopy] = {}
        self._hosts: dict[tuple[str, str], _FollowedHost] = {}
        self._has_passed = asyncio.Event()

    def host_address(self, run: str, host: str) -> str:
        """Where the heartbeats of a host are published."""
        return self._host(run, host).address

    async def follow(self, run: str, host: str | None) -> None:
        """A reader follows the copy of a run, or one of its hosts: to be called once a second."""
        if host is not None:
            self._host(run, host).renew()
        elif run in self._copies:
            self._copies[run].used = time.monotonic()
        else:
            subjects = names.all_recordings(run)
            copy = self._copies[run] = _FollowedCopy(subjects, self._has_passed)
            copy.subscription = await self._client.subscribe(subjects, cb=copy.take)

    def _host(self, run: str, host: str) -> "_FollowedHost":
        if (run, host) not in self._hosts:
            feed = self._context.socket(zmq.PUB)
            address = f"{self.address}-{len(self._hosts)}"
            feed.bind(address)
            self._hosts[run, host] = _FollowedHost(self._client, feed, address, run, host)
        return self._hosts[run, host]

    async def beat(self) -> None:
        """Publishes heartbeats of copies until it is cancelled."""
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._has_passed.wait(), _BEAT_SECONDS)
            self._has_passed.clear()
            for run, copy in list(self._copies.items()):
                now = time.monotonic()
                if copy.subscription is not None and now - copy.used > _IDLE_SECONDS:
                    del self._copies[run]
                    with suppress(*passing_errors()):
                        await copy.subscription.unsubscribe()
                elif copy.is_new or now - copy.beaten > _BEAT_SECONDS:
                    copy.is_new, copy.beaten = False, now
                    self._tell(run, copy.ends)
                    await self._feed.send(copy.heartbeat(run))
            await asyncio.sleep(_GATHER_SECONDS)

    def close(self) -> None:
        """Ends what is under way."""
        for host in self._hosts.values():
            host.close()


class _FollowedCopy:
    """How far the copy of a run goes, by its messages as they pass."""

    def __init__(self, subjects: str, has_passed: asyncio.Event) -> None:
        self._prefix = subjects.rstrip("*.")
        self.used = self.beaten = time.monotonic()
        self.subscription: Any = None
        self.is_new = False
        self.ends: dict[int, int] = {}
        """Of each attempt the bytes that are there."""
        self._has_passed = has_passed
        self._check: CheckRecord | None = None
        self._attempt = 1

    async def take(self, message: "Msg") -> None:
        """Takes a message of the run's stream."""
        if not message.subject.startswith(self._prefix):
            return  # as in names.is_request
        headers = message.headers or {}
        try:
            attempt = int(message.subject.split(".")[-2])
            end = int(headers[names.OFFSET]) + len(message.data)
        except (KeyError, ValueError, IndexError):
            return
        self.ends[attempt] = max(end, self.ends.get(attempt, 0))
        check = last_check(message.data)
        if check is not None and attempt >= self._attempt:
            self._attempt, self._check, self.is_new = attempt, check, True
            self._has_passed.set()

    def heartbeat(self, run: str) -> bytes:
        """What a broker would say of how far the run is."""
        places = {} if self._check is None else self._check.positions
        positions = {rank: (place.seq, place.base_seq) for rank, place in places.items()}
        end = self.ends.get(self._attempt, 0)
        return encode_heartbeat(run, self._attempt, time.time_ns(), positions, end, positions)


class _FollowedHost:
    """Heartbeats of a host's broker, of which nothing passes through the stream: it is asked for them, as long as a
    reader follows it."""

    def __init__(self, client: "NatsClient", feed: Any, address: str, run: str, host: str) -> None:
        self.address = address
        self._client = client
        self._feed = feed
        self._run, self._host = run, host
        self._frame = encode_control("position", {"run": run, "host": host})
        self._until = 0.0
        self._task: asyncio.Task[None] | None = None

    def renew(self) -> None:
        """A reader follows the host."""
        self._until = time.monotonic() + _LEASE_SECONDS
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        while time.monotonic() < self._until:
            with suppress(*passing_errors()):
                may_command = await self._client.may_command()
                subject = names.request_subject(self._run, "position", self._host, may_command=may_command)
                answer = await self._client.request(subject, self._frame, timeout=1.0)
                await self._feed.send(answer.data)
            await asyncio.sleep(_POSITION_SECONDS)

    def close(self) -> None:
        """Ends it."""
        if self._task is not None:
            self._task.cancel()


def last_check(data: bytes) -> CheckRecord | None:
    """The last check record in a range of a recording that ends with one."""
    at = data.rfind(records.CHECK_SIGN)
    while at >= 0:
        with suppress(DamageError):
            return CheckRecord.decode(data[at - records.HEAD.size :])
        at = data.rfind(records.CHECK_SIGN, 0, at)
    return None
