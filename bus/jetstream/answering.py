"""Answers readers of this process as a broker does, out of a stream: it lists runs by what their bridges say, gives
ranges of recordings, says by heartbeats how far they go, and passes leases and commands on to the run's host."""

import asyncio
import time
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any

import zmq
import zmq.asyncio

from offloop.bus.errors import OffloopError, ProtocolError, RecordingError
from offloop.bus.jetstream import names
from offloop.bus.jetstream.connection import in_words, passing_errors
from offloop.bus.jetstream.copied import CopiedRun, HoleError
from offloop.bus.jetstream.forwarding import Forwarding
from offloop.bus.jetstream.heartbeats import Heartbeats
from offloop.bus.jetstream.known import KnownRuns
from offloop.bus.jetstream.relay import KINDS
from offloop.bus.protocol.frames import MAX_RANGE, Control, decode_control, encode_control, split_frame

if TYPE_CHECKING:
    from nats.js.client import JetStreamContext

    from offloop.bus.jetstream.client import NatsClient

_RUNS_SECONDS = 15.0
_AGAIN_SECONDS = 0.25
_IDLE_SECONDS = 60.0
"""What was not read for so long is forgotten: a range that is asked for after that is fetched again."""


class Answering:
    """Serves the readers at the address ``control``, and publishes heartbeats at ``stream``."""

    def __init__(self, client: "NatsClient", jetstream: "JetStreamContext", control: str, stream: str) -> None:
        self._client = client
        self._jetstream = jetstream
        self._known = KnownRuns(client, jetstream)
        self._context = zmq.asyncio.Context()
        self._control = self._context.socket(zmq.ROUTER)
        self._control.bind(control)
        self._heartbeats = Heartbeats(client, self._context, stream, self._tell)
        self._forwarding = Forwarding(client, self._send_frame, self._known.is_going_on)
        self._copies: dict[str, CopiedRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Answers until it is cancelled. Where the servers refuse this user, also later, it says so to all readers."""
        self._begin(self._heartbeats.beat())
        self._begin(self._forget())
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
                self._begin(self._answer(identity, frames[0]))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Ends what is under way, and what the servers keep for it."""
        for task in list(self._tasks):
            task.cancel()
        self._heartbeats.close()
        await self._known.close()
        for copy in self._copies.values():
            await copy.close()
        self._context.destroy(linger=0)

    async def _answer(self, identity: bytes, frame: bytes) -> None:
        asked: dict[str, Any] = {}
        try:
            topic, body = split_frame(frame)
            if topic is not None:
                return
            control = decode_control(body)
            asked = {"id": control.content["id"]} if isinstance(control.content.get("id"), str) else {}
            if await self._refuse(identity, asked):
                return
            run, host = control.content.get("run"), _host_of(control)
            if control.kind == "runs":
                await self._answer_runs(identity, run if isinstance(run, str) else None, host, asked)
            elif control.kind == "fetch" and host is None:
                await self._answer_fetch(identity, control, frame, asked)
            elif control.kind == "windows":
                await self._answer_windows(identity, control, asked)
            elif control.kind in KINDS or control.kind == "cut":
                if control.kind == "lease" and isinstance(run, str):
                    await self._heartbeats.follow(run, host)
                await self._forwarding.send(identity, control, frame)
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
        await self._send_frame(identity, encode_control(kind, content))

    async def _send_frame(self, identity: bytes, frame: bytes) -> None:
        await self._control.send_multipart([identity, frame])

    # -- runs ---------------------------------------------------------------------------------------------------------

    async def _answer_runs(self, identity: bytes, run: str | None, host: str | None, asked: dict[str, Any]) -> None:
        until = time.monotonic() + _RUNS_SECONDS
        while True:
            try:
                found = await self._known.runs(run, host)
                break
            except passing_errors():
                # Servers of which one died choose a leader for some seconds.
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(_AGAIN_SECONDS)
        runs = [self._listing(said, host) for said in found]
        runs.sort(key=lambda listed: listed.get("started") or 0.0, reverse=True)
        await self._send(identity, "runs", {"runs": runs, **asked})

    def _listing(self, said: dict[str, Any], host: str | None) -> dict[str, Any]:
        of_first = host in (None, "*")
        address = self._heartbeats.address if of_first else self._heartbeats.host_address(said["run"], str(host))
        said["event_feed"] = address if said["live"] else None
        return said

    # -- what is in the servers ---------------------------------------------------------------------------------------

    def _copy(self, run: str) -> CopiedRun:
        copy = self._copies.get(run)
        if copy is None:
            copy = self._copies[run] = CopiedRun(self._jetstream, run)
        copy.used = time.monotonic()
        return copy

    def _tell(self, run: str, ends: Mapping[int, int]) -> None:
        if run in self._copies:
            self._copies[run].tell(ends)

    async def _forget(self) -> None:
        while True:
            await asyncio.sleep(_IDLE_SECONDS / 4)
            oldest = time.monotonic() - _IDLE_SECONDS
            for run in [run for run, copy in self._copies.items() if copy.used < oldest]:
                await self._copies.pop(run).close()

    async def _answer_fetch(self, identity: bytes, control: Control, frame: bytes, asked: dict[str, Any]) -> None:
        content = control.content
        run, attempt, offset = content.get("run"), content.get("attempt"), content.get("offset")
        if not (isinstance(run, str) and type(attempt) is int and type(offset) is int and offset >= 0):
            raise ProtocolError("a range has run, attempt and offset")
        answer: dict[str, Any] = {"run": run, "attempt": attempt, "offset": offset, "data": b"", **asked}
        try:
            answer["data"] = await self._range(run, attempt, offset)
        except HoleError as hole:
            if self._known.may_answer(run, once=bool(asked)):
                await self._forwarding.send(identity, control, frame)
                return
            again = (
                f"'nats stream rm {hole.stream}', then 'offloop server bridge {run}' on its host, "
                "copies all of it again"
            )
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
            recording = await self._copy(run).recording(attempt)
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
        found, reached = self._copy(run).windows.since(after, attempt, MAX_RANGE)
        await self._send(identity, "windows", {"windows": found, "after": reached, **asked})


def _host_of(control: Control) -> str | None:
    """The host that a request names."""
    host = control.content.get("host")
    return host if isinstance(host, str) else None
