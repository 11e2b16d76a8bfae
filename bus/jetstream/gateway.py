"""The gateway: what a broker says to readers on other machines, from a stream. So whatever reads runs through a broker
reads them from JetStream too.

It lists runs by what their bridges say, gives ranges of recordings out of the stream, says by heartbeats how far they
go, and passes leases and commands on to the run's host.
"""

import asyncio
import functools
import json
import tempfile
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

import zmq
import zmq.asyncio

from bus.errors import BrokerError, OffloopError, ProtocolError, RecordingError
from bus.jetstream import names
from bus.jetstream.connection import CONNECT_SECONDS, NatsServers, connected, in_words, passing_errors
from bus.jetstream.copied import CopiedRecording
from bus.jetstream.relay import KINDS
from bus.net.sockets import stand_in
from bus.protocol.frames import Control, decode_control, encode_control, encode_heartbeat, split_frame
from bus.recording import records
from bus.recording.records import DamageError, Mark

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.js.client import JetStreamContext

MAX_RANGE = 256 * 1024
_BEAT_SECONDS = 0.5
_FRESH_SECONDS = 5.0


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

    def __init__(self, client: "Client", jetstream: "JetStreamContext", control: str, stream: str) -> None:
        self._client = client
        self._jetstream = jetstream
        self._stream_address = stream
        self._context = zmq.asyncio.Context()
        self._control = self._context.socket(zmq.ROUTER)
        self._control.bind(control)
        self._feed = self._context.socket(zmq.PUB)
        self._feed.bind(stream)
        self._recordings: dict[tuple[str, int], CopiedRecording] = {}
        self._followed: dict[str, _Followed] = {}
        self._inboxes: dict[bytes, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Answers until it is cancelled."""
        beats = asyncio.create_task(self._beat())
        self._tasks.add(beats)
        while True:
            identity, *frames = await self._control.recv_multipart()
            if len(frames) == 1:
                task = asyncio.create_task(self._take(identity, frames[0]))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Ends what is under way, and what the servers keep for it."""
        for task in list(self._tasks):
            task.cancel()
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
            if control.kind == "runs":
                await self._answer_runs(identity, control, asked)
            elif control.kind == "fetch":
                await self._answer_fetch(identity, control, frame, asked)
            elif control.kind in KINDS:
                await self._pass_on(identity, control, frame, asked)
            else:
                raise ProtocolError(f"{control.kind!r} is nothing that a stream answers")
        except OffloopError as error:
            await self._send(identity, "refused", {"reason": str(error), "error": type(error).__name__, **asked})
        except passing_errors() as error:
            # Asked again by the reader that waits for it.
            await self._send(
                identity, "refused", {"reason": f"NATS: {in_words(error)}", "error": "BrokerError", **asked}
            )

    async def _send(self, identity: bytes, kind: str, content: dict[str, Any]) -> None:
        await self._control.send_multipart([identity, encode_control(kind, content)])

    # -- runs ---------------------------------------------------------------------------------------------------------

    async def _answer_runs(self, identity: bytes, control: Control, asked: dict[str, Any]) -> None:
        wanted = control.content.get("run")
        runs = await self._runs(wanted if isinstance(wanted, str) else None)
        await self._send(identity, "runs", {"runs": runs, **asked})

    async def _runs(self, name: str | None) -> list[dict[str, Any]]:
        """The newest attempt of each run, the newest first."""
        from nats.js.errors import BucketNotFoundError

        found: dict[str, dict[str, Any]] = {}
        try:
            bucket = await self._jetstream.key_value(names.RUNS_BUCKET)
        except BucketNotFoundError:
            return []
        watcher: Any = await bucket.watch(">" if name is None else f"{names.token(name)}.>", ignore_deletes=True)
        async for entry in watcher:
            if entry is None:
                break
            try:
                said = json.loads(entry.value or b"")
                known = found.get(said["run"])
                if known is None or known["attempt"] < said["attempt"]:
                    found[said["run"]] = self._listing(said)
            except (ValueError, KeyError, TypeError, AttributeError):
                continue
        await watcher.stop()
        return sorted(found.values(), key=lambda run: run.get("started") or 0.0, reverse=True)

    def _listing(self, said: dict[str, Any]) -> dict[str, Any]:
        bridge = said.pop("bridge", {})
        is_fresh = time.time() - float(bridge.get("time", 0.0)) < _FRESH_SECONDS
        # Where the bridge is silent the run may continue unseen: more may come.
        said["live"] = bool(said.get("live")) and is_fresh
        said["stream"] = self._stream_address if said["live"] else None
        return said

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
        recording = await self._recording(run, attempt)
        try:
            data = await recording.read(offset, MAX_RANGE)
        except RecordingError:
            await self._pass_on(identity, control, frame, asked)
            return
        await self._send(identity, "data", {"run": run, "attempt": attempt, "offset": offset, "data": data, **asked})

    # -- what goes to the host ----------------------------------------------------------------------------------------

    async def _pass_on(self, identity: bytes, control: Control, frame: bytes, asked: dict[str, Any]) -> None:
        run = control.content.get("run")
        if not isinstance(run, str):
            raise ProtocolError("it names no run")
        if control.kind == "want":
            await self._follow(run)
        inbox = self._inboxes.get(identity)
        if inbox is None:
            inbox = self._inboxes[identity] = self._client.new_inbox()
            await self._client.subscribe(inbox, cb=functools.partial(self._answered, identity))
        headers = {"Ol-Id": asked["id"]} if asked else None
        await self._client.publish(names.request_subject(run, control.kind), frame, reply=inbox, headers=headers)

    async def _answered(self, identity: bytes, message: "Msg") -> None:
        if message.headers and message.headers.get("Status") == "503":
            # No bridge has subscribed: which request that was is not said.
            reason = "this run has no bridge that answers: it has ended, or cannot reach these servers"
            await self._send(identity, "refused", {"reason": reason, "error": "BrokerError"})
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
