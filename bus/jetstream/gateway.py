"""The gateway: what a broker says to readers on other machines, from a stream. So whatever reads runs through a broker
reads them from JetStream too.

It lists runs by what their bridges say, gives ranges of recordings out of the stream, says by heartbeats how far they
go, and passes leases and commands on to the run's host.
"""

import asyncio
import concurrent.futures
import functools
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import zmq
import zmq.asyncio

from bus.errors import BrokerError, OffloopError, ProtocolError, RecordingError
from bus.jetstream import names
from bus.jetstream.connection import CONNECT_SECONDS, NatsServers, connected, in_words, passing_errors
from bus.jetstream.copied import CopiedRecording, CopiedWindows, HoleError
from bus.jetstream.known import KnownRuns
from bus.jetstream.relay import KINDS
from bus.net.sockets import stand_in
from bus.protocol.frames import Control, decode_control, encode_control, encode_heartbeat, split_frame
from bus.recording import records
from bus.recording.records import DamageError, Mark

if TYPE_CHECKING:
    from nats.aio.msg import Msg
    from nats.js.client import JetStreamContext

    from bus.jetstream.client import NatsClient

    Ask: TypeAlias = Callable[[JetStreamContext], Coroutine[Any, Any, "Answer"]]

Answer = TypeVar("Answer")

MAX_RANGE = 256 * 1024
_BEAT_SECONDS = 0.5
_POSITION_SECONDS = 0.25
_RUNS_SECONDS = 15.0
_LEASE_SECONDS = 5.0


class Gateway:
    """A broker's place for the readers of this process, behind which are NATS servers: at :attr:`address`, which is a
    Unix socket in a folder of this user alone. It works in a thread until it is closed.

    Raises:
        BrokerError: no server answers, or it refuses.
        ConfigurationError: the key or certificate cannot be read.
    """

    def __init__(self, servers: NatsServers) -> None:
        self._servers = servers
        self._users = 1
        self._folder = tempfile.TemporaryDirectory(prefix="offloop-")
        self.address = f"ipc://{self._folder.name}/broker.sock"
        """Where it is reached, as a broker is."""
        self.stands_for = str(servers)
        """By this address everything in this process finds it."""
        self._stream = f"ipc://{self._folder.name}/stream.sock"
        self._failure: Exception | None = None
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._client: NatsClient | None = None
        self._jetstream: JetStreamContext | None = None
        self._thread = threading.Thread(target=self._run, name="offloop-gateway", daemon=True)
        self._thread.start()
        self._ready.wait(CONNECT_SECONDS + 5)
        if self._failure is not None or not self._ready.is_set():
            self.close()
            raise self._failure or BrokerError(f"no NATS server answers at {servers}", address=str(servers))
        stand_in(self.stands_for, self.address)

    @classmethod
    def shared(cls, servers: NatsServers) -> "Gateway":
        """The one of this process for these servers; each who asks for it closes it.

        Raises as the constructor does."""
        with _sharing:
            gateway = _shared.get(servers)
            if gateway is None or not gateway._thread.is_alive():
                gateway = _shared[servers] = cls(servers)
                gateway._users = 0
            gateway._users += 1
        return gateway

    @classmethod
    def at(cls, address: str) -> "Gateway | None":
        """The one of this process that stands for servers, if there is one."""
        with _sharing:
            return next((gateway for gateway in _shared.values() if gateway.stands_for == address), None)

    @property
    def is_connected(self) -> bool:
        """Whether a server is there at this moment."""
        return self._client is not None and self._client.is_connected

    @property
    def connection(self) -> int:
        """Which connection to the servers this is, counted from 0."""
        return 0 if self._client is None else int(self._client.stats["reconnects"])

    @property
    def max_payload(self) -> int:
        """How large a message the servers take, in bytes."""
        return 0 if self._client is None else self._client.max_payload

    def call(self, ask: "Ask[Answer]", seconds: float) -> "Answer":
        """Asks the servers, and waits in this thread for what they answer.

        Raises:
            BrokerError: they do not answer within so many seconds, or refuse; whether they have done it is not known.
        """
        if not self.is_connected:
            raise BrokerError(f"no NATS server answers at {self._servers}", address=self.stands_for)
        asked = self.begin(ask)
        try:
            return asked.result(seconds)
        except concurrent.futures.CancelledError:
            why = "the connection has been closed"
        except passing_errors() as error:
            asked.cancel()
            why = in_words(error) if str(error) else "no answer"
        if self._client is not None and self._client.failure is not None:
            raise self._client.failure
        raise BrokerError(f"NATS at {self._servers}: {why}", address=self.stands_for)

    def begin(self, ask: "Ask[Answer]") -> "concurrent.futures.Future[Answer]":
        """Has the gateway's thread ask the servers.

        Raises:
            BrokerError: it has ended.
        """
        assert self._loop is not None
        assert self._jetstream is not None
        asking = ask(self._jetstream)
        try:
            return asyncio.run_coroutine_threadsafe(asking, self._loop)
        except RuntimeError:  # its loop is closed
            asking.close()
            raise BrokerError(f"the connection to {self._servers} has been closed", address=self.stands_for) from None

    def __enter__(self) -> "Gateway":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends it, unless another part of this process shares it."""
        with _sharing:
            self._users -= 1
            if self._users > 0:
                return
            if _shared.get(self._servers) is self:
                del _shared[self._servers]
        loop, task = self._loop, self._task
        if loop is not None and task is not None:
            with suppress(RuntimeError):  # it has ended
                loop.call_soon_threadsafe(task.cancel)
        self._thread.join()
        self._folder.cleanup()

    def _run(self) -> None:
        try:
            with suppress(asyncio.CancelledError):
                asyncio.run(self._serve())
        except OffloopError as error:
            self._failure = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        async with connected(self._servers, "reader") as (client, jetstream):
            self._client, self._jetstream = client, jetstream
            desk = _Desk(client, jetstream, self.address, self._stream)
            try:
                self._ready.set()
                await desk.serve()
            finally:
                await desk.close()


_shared: dict[NatsServers, Gateway] = {}
_sharing = threading.RLock()


class _Desk:
    """Serves the readers."""

    def __init__(self, client: "NatsClient", jetstream: "JetStreamContext", control: str, stream: str) -> None:
        self._client = client
        self._jetstream = jetstream
        self._stream_address = stream
        self._known = KnownRuns(client, jetstream)
        self._context = zmq.asyncio.Context()
        self._control = self._context.socket(zmq.ROUTER)
        self._control.bind(control)
        self._feed = self._context.socket(zmq.PUB)
        self._feed.bind(stream)
        self._recordings: dict[tuple[str, int], CopiedRecording] = {}
        self._windows: dict[str, CopiedWindows] = {}
        self._followed: dict[str, _Followed] = {}
        self._host_feeds: dict[tuple[str, str], _HostFeed] = {}
        self._inboxes: dict[bytes, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Answers until it is cancelled. Where the servers refuse this user, also later, it says so to all readers."""
        self._begin(self._beat())
        try:
            await self._answer_all()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._client.failure is None or task is None:
                raise
            task.uncancel()
            for pending in list(self._tasks):
                pending.cancel()
            await self._answer_all()

    async def _answer_all(self) -> None:
        while True:
            identity, *frames = await self._control.recv_multipart()
            if len(frames) == 1:
                self._begin(self._take(identity, frames[0]))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Ends what is under way, and what the servers keep for it."""
        for task in list(self._tasks):
            task.cancel()
        for feed in self._host_feeds.values():
            feed.close()
        await self._known.close()
        for recording in self._recordings.values():
            await recording.close()
        self._context.destroy(linger=0)

    async def _take(self, identity: bytes, frame: bytes) -> None:
        asked: dict[str, Any] = {}
        try:
            topic, body = split_frame(frame)
            if topic is not None:
                return
            control = decode_control(body)
            asked = {"id": control.content["id"]} if isinstance(control.content.get("id"), str) else {}
            if await self._refuse(identity, asked):
                return
            if control.kind == "runs":
                await self._answer_runs(identity, control, asked)
            elif control.kind == "fetch" and _host_of(control) is None:
                await self._answer_fetch(identity, control, frame, asked)
            elif control.kind == "windows":
                await self._answer_windows(identity, control, asked)
            elif control.kind in KINDS or control.kind == "cut":
                await self._pass_on(identity, control, frame, asked)
            else:
                raise ProtocolError(f"{control.kind!r} is nothing that a stream answers")
        except asyncio.CancelledError:
            if not await self._refuse(identity, asked):
                raise
        except OffloopError as error:
            await self._send(identity, "refused", {"reason": str(error), "error": type(error).__name__, **asked})
        except passing_errors() as error:
            # Who reads a recording asks again, and would take a refusal for its end.
            if asked:
                reason = f"NATS: {in_words(error)}"
                await self._send(identity, "refused", {"reason": reason, "error": "BrokerError", **asked})

    async def _refuse(self, identity: bytes, asked: dict[str, Any]) -> bool:
        """Refuses a request where the servers refuse this user; returns whether they do."""
        failure = self._client.failure
        if failure is not None:
            content = {"reason": str(failure), "error": "BrokerError", "for_good": True, **asked}
            await self._send(identity, "refused", content)
        return failure is not None

    async def _send(self, identity: bytes, kind: str, content: dict[str, Any]) -> None:
        await self._control.send_multipart([identity, encode_control(kind, content)])

    # -- runs ---------------------------------------------------------------------------------------------------------

    async def _answer_runs(self, identity: bytes, control: Control, asked: dict[str, Any]) -> None:
        wanted = control.content.get("run")
        until = time.monotonic() + _RUNS_SECONDS
        while True:
            try:
                runs = await self._runs(wanted if isinstance(wanted, str) else None, _host_of(control))
                break
            except passing_errors():
                # Servers of which one died choose a leader for some seconds.
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(_POSITION_SECONDS)
        await self._send(identity, "runs", {"runs": runs, **asked})

    async def _runs(self, name: str | None, host: str | None) -> list[dict[str, Any]]:
        """The newest attempt of each run, the newest first."""
        found = [self._listing(said, host) for said in await self._known.runs(name, host)]
        return sorted(found, key=lambda run: run.get("started") or 0.0, reverse=True)

    def _listing(self, said: dict[str, Any], host: str | None) -> dict[str, Any]:
        said.pop("bridge", None)
        address = self._stream_address
        if host not in (None, "*"):
            address = self._host_feed(said["run"], str(host)).address
        said["stream"] = address if said["live"] else None
        return said

    def _host_feed(self, run: str, host: str) -> "_HostFeed":
        if (run, host) not in self._host_feeds:
            feed = self._context.socket(zmq.PUB)
            address = f"{self._stream_address}-{len(self._host_feeds)}"
            feed.bind(address)
            self._host_feeds[run, host] = _HostFeed(self._client, feed, address, run, host)
        return self._host_feeds[run, host]

    async def _recording(self, run: str, attempt: int) -> CopiedRecording:
        recording = self._recordings.get((run, attempt))
        if recording is None:
            stream = names.stream_of(run)
            subject = await self._subject(stream, names.recording_subject(run, attempt, "*"))
            recording = self._recordings[run, attempt] = CopiedRecording(self._jetstream, stream, subject)
            await recording.look()
        return recording

    async def _subject(self, stream: str, pattern: str) -> str:
        """The subject of a recording in a stream; the servers alone know which host it is of."""
        from nats.js.errors import NotFoundError

        try:
            found = (await self._jetstream.stream_info(stream, subjects_filter=pattern)).state.subjects
        except NotFoundError:
            found = None
        if not found:
            raise RecordingError(f"the stream {stream} has no recording of that attempt")
        return min(found)

    async def _answer_fetch(self, identity: bytes, control: Control, frame: bytes, asked: dict[str, Any]) -> None:
        content = control.content
        run, attempt, offset = content.get("run"), content.get("attempt"), content.get("offset")
        if not (isinstance(run, str) and type(attempt) is int and type(offset) is int and offset >= 0):
            raise ProtocolError("a range has run, attempt and offset")
        answer: dict[str, Any] = {"run": run, "attempt": attempt, "offset": offset, "data": b"", **asked}
        try:
            answer["data"] = await self._range(run, attempt, offset)
        except HoleError as hole:
            if self._known.is_going_on(run):
                await self._pass_on(identity, control, frame, asked)
                return
            # Its host does not answer any more.
            again = f"'nats stream rm {hole.stream}', then 'bus bridge {run}' on its host, copies all of it again"
            answer |= {"lost": hole.end, "reason": f"the stream {hole.stream} has lost them; {again}"}
        except RecordingError:
            # Where it continues, its bridge has only begun.
            if asked or not self._known.is_going_on(run):
                raise
        await self._send(identity, "data", answer)

    async def _range(self, run: str, attempt: int, offset: int) -> bytes:
        """A range of a recording; nothing at its end.

        Raises:
            HoleError: the stream lacks it, and has what follows, or has had it.
            RecordingError: the stream has nothing of the recording, and never had.
        """
        copied = self._known.copied(run, attempt)
        try:
            recording = await self._recording(run, attempt)
        except RecordingError:
            if not copied:
                raise
            recording = None
        data = b"" if recording is None else await recording.read(offset, MAX_RANGE)
        if recording is not None and not data and not self._known.is_going_on(run):
            # Its last messages may have passed while the servers were away from here.
            await recording.look()
            data = await recording.read(offset, MAX_RANGE)
        if not data and offset < copied:
            raise HoleError(names.stream_of(run), offset, copied)
        return data

    async def _answer_windows(self, identity: bytes, control: Control, asked: dict[str, Any]) -> None:
        content = control.content
        run, attempt, after = content.get("run"), content.get("attempt"), content.get("after")
        if not (isinstance(run, str) and type(attempt) is int and type(after) is int and after >= 0):
            raise ProtocolError("windows are of run and attempt, after a number")
        windows = self._windows.get(run)
        if windows is None:
            windows = self._windows[run] = CopiedWindows(self._jetstream, run)
            self._tasks.add(asyncio.create_task(windows.follow()))
        found, reached = windows.since(after, attempt, MAX_RANGE)
        await self._send(identity, "windows", {"windows": found, "after": reached, **asked})

    # -- what goes to the host ----------------------------------------------------------------------------------------

    async def _pass_on(self, identity: bytes, control: Control, frame: bytes, asked: dict[str, Any]) -> None:
        run = control.content.get("run")
        if not isinstance(run, str):
            raise ProtocolError("it names no run")
        may_command = await self._client.may_command()
        if control.kind == "command" and not may_command:
            raise BrokerError(
                f"{self._client.who} may view runs there, not command them: the servers' operator gives it the role "
                "command with 'bus nats-config'"
            )
        # What the training is to do is decided by the first rank.
        host = None if control.kind == "command" else _host_of(control)
        if control.kind == "want":
            await (self._follow(run) if host is None else self._host_feed(run, host).renew())
        inbox = self._inboxes.get(identity)
        if inbox is None:
            inbox = self._inboxes[identity] = self._client.new_inbox()
            await self._client.subscribe(f"{inbox}.>", cb=functools.partial(self._answered, identity))
        headers = {"Ol-Id": asked["id"]} if asked else None
        subject = names.request_subject(run, control.kind, host, may_command=may_command)
        reply = names.reply_subject(inbox, control.kind, asked.get("id"))
        await self._client.publish(subject, frame, reply=reply, headers=headers)

    async def _answered(self, identity: bytes, message: "Msg") -> None:
        kind, asked = names.replied_to(message.subject)
        if kind == "fetch" and asked is None:
            # A refusal, of the servers or the bridge. Bridge and broker may come again; until then they are asked.
            return
        if message.headers and message.headers.get("Status") == "503":
            reason = (
                "this run has no bridge that answers: see with 'bus runs' whether it is live, and start 'bus bridge' "
                "on its host"
            )
            if kind == "cut":
                reason = (
                    "that host has no bridge that answers: the run has ended there, or it cannot reach these servers; "
                    "'bus cut' on that host gives the same"
                )
            content = {"reason": reason, "error": "BrokerError"}
            await self._send(identity, "refused", content if asked is None else {**content, "id": asked})
            return
        await self._control.send_multipart([identity, message.data])

    # -- heartbeats ---------------------------------------------------------------------------------------------------

    async def _follow(self, run: str) -> None:
        if run not in self._followed:
            followed = self._followed[run] = _Followed(time.monotonic())
            await self._client.subscribe(names.all_recordings(run), cb=followed.take)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.02)
            now = time.monotonic()
            for run, followed in list(self._followed.items()):
                if followed.is_new or now - followed.beaten > _BEAT_SECONDS:
                    followed.is_new, followed.beaten = False, now
                    for (name, attempt), recording in self._recordings.items():
                        if name == run:
                            recording.tell(followed.ends.get(attempt, 0))
                    await self._feed.send(followed.heartbeat(run))


def _host_of(control: Control) -> str | None:
    """The host that a request names."""
    host = control.content.get("host")
    return host if isinstance(host, str) else None


class _HostFeed:
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

    async def renew(self) -> None:
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


class _Followed:
    """A run that a reader follows: how far its copy goes, by the messages as they pass."""

    def __init__(self, now: float) -> None:
        self.beaten = now
        self.mark: Mark | None = None
        self.attempt = 1
        self.is_new = False
        self.ends: dict[int, int] = {}

    async def take(self, message: "Msg") -> None:
        """Takes a message of the run's stream."""
        headers = message.headers or {}
        try:
            attempt = int(message.subject.split(".")[-2])
            end = int(headers[names.OFFSET]) + len(message.data)
        except (KeyError, ValueError, IndexError):
            return
        self.ends[attempt] = max(end, self.ends.get(attempt, 0))
        mark = last_mark(message.data)
        if mark is not None and attempt >= self.attempt:
            self.attempt, self.mark, self.is_new = attempt, mark, True

    def heartbeat(self, run: str) -> bytes:
        """What a broker would say of how far the run is."""
        places = {} if self.mark is None else self.mark.positions
        positions = {rank: (place.seq, place.base_seq) for rank, place in places.items()}
        return encode_heartbeat(run, self.attempt, time.time_ns(), positions, self.ends.get(self.attempt, 0), positions)


def last_mark(data: bytes) -> Mark | None:
    """The last check record in a range of a recording that ends with one."""
    at = data.rfind(records.MARK_SIGN)
    while at >= 0:
        with suppress(DamageError):
            return Mark.decode(data[at - records.HEAD.size :])
        at = data.rfind(records.MARK_SIGN, 0, at)
    return None
