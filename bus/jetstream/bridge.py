"""The bridge: copies the recordings of a run into JetStream, as they are on disk, and what its host says of its ranks.

A message is a range of a recording that ends at a check record, or a piece of one; or a window of the host. Of each
file one is in flight at a time, and says which number the subject's last message must have: so a bridge that is late,
doubled or was killed never writes twice or out of order. Whatever goes wrong, the bridge reads the subject's last
message and continues behind it: what servers have forgotten is sent again, and what another bridge has sent ends this
one.
"""

import asyncio
import json
import os
import secrets
import time
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bus.errors import BrokerError, OffloopError, RecordingError
from bus.jetstream import names
from bus.jetstream.connection import (
    WRONG_LAST_SEQUENCE,
    NatsServers,
    answer_of,
    connected,
    in_words,
    passing_errors,
)
from bus.jetstream.relay import Relay
from bus.jetstream.run_stream import FULL, STREAM_FULL, Copied, RunStream
from bus.printing import one_line
from bus.recording.growing import GrowingRecording
from bus.recording.host_windows import GrowingWindows, windows_path
from bus.runs.bridged import BridgeStatus
from bus.runs.directory import Attempt, host_name, read_run
from bus.runs.listing import describe_run

_LOOK_SECONDS = 0.1
_TELL_SECONDS = 1.0
_READ_SECONDS = 5.0
_RETRY_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0)
_AWAY_SECONDS = 0.2
"""How often it is looked whether there is a connection again: no server is asked for that."""
_STILL_SECONDS = 3.0
"""A bridge that was paused for so long asks whether another one took its place."""
_LOCKED_TRIES = 10
"""How often a bridge tries to write windows that another one writes, when the attempt has ended."""


class BridgeReplacedError(BrokerError):
    """Another bridge copies this recording now."""


class ShorterError(RecordingError):
    """A file is the beginning of its copy in the stream: its newest part was not on the disk in a power failure."""


def has_other_hosts(attempt: Attempt) -> bool:
    """Whether some ranks of an attempt are on other hosts."""
    return attempt.local_world_size < attempt.world_size


async def _watch_nothing(attempt: Attempt, host: str) -> None:
    """Writes no windows."""


class Bridge:
    """Copies the run in a directory, with all its attempts.

    Args:
        path: the run's directory.
        servers: where JetStream is.
        replicas: how many servers keep each message; for a stream that does not exist yet.
        max_bytes: how large the stream may grow, where that is to be limited; for one that does not exist yet.
        host: by default what this host is called (:func:`bus.runs.directory.host_name`).
        say: shows a line to the user.
        watch: writes the windows of an attempt of this host until all are written, see
            :func:`bus.hosts.watch.watch_host`; called where the run has other hosts too, and again while it raises
            ``BlockingIOError``, because another process writes them.
    """

    def __init__(
        self,
        path: Path,
        servers: NatsServers,
        replicas: int = 1,
        max_bytes: int | None = None,
        host: str | None = None,
        say: Callable[[str], None] = print,
        watch: Callable[[Attempt, str], Coroutine[Any, Any, None]] = _watch_nothing,
    ) -> None:
        self._path = path
        self._servers = servers
        self._replicas = replicas
        self._max_bytes = max_bytes
        self._host = host or host_name()
        self._say = say
        self._watch = watch
        self._identity = f"{self._host}/{os.getpid()}/{secrets.token_hex(4)}"
        self._run = read_run(path)
        self.status = BridgeStatus.of_this_process(str(servers), self._host)
        self._shown: _Copy | None = None
        self._full: dict[str, str] = {}
        """Of which subjects the stream takes no more, and why."""
        self._retries = 0
        self._told_at = 0.0
        self._telling: asyncio.Task[None] | None = None
        self._said: set[str] = set()

    async def copy(self) -> None:
        """Copies until the run has ended and all of it is there.

        Raises:
            BridgeReplacedError: another bridge has taken over.
            BrokerError: the servers do not take it, for good, or their stream is another run's.
            RecordingError: what is in the stream is not of this recording; all other attempts are there.
            RunDirectoryError: the run's directory cannot be read any more.
        """
        try:
            async with connected(self._servers, f"bridge {self._run.name}", self._say) as (client, stream):
                self._client, self._jetstream = client, stream
                self._stream = RunStream(
                    client, stream, self._run.name, self._run.id, self._identity, self._replicas, self._max_bytes
                )
                await self._until_answered(self._stream.make)
                async with Relay(client, self._path, self._run.name, self._host) as relay:
                    self._relay = relay
                    await self._copy_all()
        except BridgeReplacedError:
            raise  # the run's folder has the other one's status
        except OffloopError as error:
            self.status.state, self.status.why = "failed", str(error)
            self._write_status()
            raise
        except BaseException:
            self._write_status()
            raise
        self._write_status()

    async def _copy_all(self) -> None:
        done: set[int] = set()
        failure: RecordingError | None = None
        while (attempt := self._next(done)) is not None:
            done.add(attempt.number)
            if attempt.recording.exists():
                try:
                    await self._copy_attempt(attempt)
                except RecordingError as error:
                    failure = error
                    if self._next(done) is None:
                        break
                    self._say(f"attempt {attempt.number} of run {self._run.name} is not copied any further: {error}")
            else:
                self._say(f"attempt {attempt.number} of run {self._run.name} has no recording any more: not copied")
            if self._next(done) is None:
                await self._until_answered(self._say_done)
                await self._serve_readers(done)
        if failure is not None:
            raise failure

    def _next(self, done: Collection[int]) -> Attempt | None:
        """The first attempt that is yet to be copied; more may have begun meanwhile."""
        self._run = read_run(self._path)
        return next((attempt for attempt in self._run.attempts if attempt.number not in done), None)

    async def _serve_readers(self, done: Collection[int]) -> None:
        """Gives readers the rest of what is not in the stream, until none asks or another attempt begins."""
        while has_other_hosts(self._run.last) and time.monotonic() - self._relay.raw.used < _READ_SECONDS:
            if self._next(done) is not None:
                return
            await asyncio.sleep(_LOOK_SECONDS)

    async def _copy_attempt(self, attempt: Attempt) -> None:
        """Copies an attempt until it has ended: the recording of the first rank's host, the windows of every host."""
        run, number = self._run.name, attempt.number
        self.status.attempt = number
        copies: list[_Copy] = []
        tasks: list[asyncio.Task[None]] = []
        try:
            if not has_other_hosts(attempt) or await self._has_first_rank(number):
                await self._relay.serve_run()
                subject = names.recording_subject(run, number, self._host)
                copies.append(_Copy(self, subject, GrowingRecording(attempt.recording)))
                tasks.append(asyncio.create_task(self._follow_recording(copies[-1], number)))
            if has_other_hosts(attempt):
                watching: asyncio.Task[None] = asyncio.create_task(self._write_windows(attempt))
                tasks.append(watching)
                subject = names.windows_subject(run, number, self._host)
                copies.append(_Copy(self, subject, GrowingWindows(windows_path(attempt.recording, number))))
                tasks.append(asyncio.create_task(self._follow_windows(copies[-1], watching.done)))
            self._shown = copies[0]
            for task in asyncio.as_completed(tasks):
                await task
            self._note()
            await self._tell(force=True)
        finally:
            self._shown = None
            for one in tasks:
                one.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for copy in copies:
                copy.close()

    async def _follow_recording(self, copy: "_Copy", attempt: int) -> None:
        try:
            await copy.follow(lambda: self._is_closed(attempt))
        except ShorterError as error:
            if not self._is_closed(attempt):
                raise
            self._say(f"{error}: the copy is kept as it is")

    async def _follow_windows(self, copy: "_Copy", has_ended: Callable[[], bool]) -> None:
        try:
            await copy.follow(has_ended)
        except RecordingError as error:
            # The recording is worth more than they are.
            self._say(f"no more windows of this host are copied: {error}")

    async def _write_windows(self, attempt: Attempt) -> None:
        """Has the windows written until all are, by this process as soon as no other one does so."""
        tries = _LOCKED_TRIES
        while tries > 0:
            with suppress(BlockingIOError):
                await self._watch(attempt, self._host)
                return
            tries -= self._is_closed(attempt.number)
            await asyncio.sleep(_TELL_SECONDS)
        self._say("another process has yet to write the last windows of this host: those that are there are copied")

    async def _has_first_rank(self, attempt: int) -> bool:
        """Whether the first rank publishes here: known when all ranks of this host have begun."""
        while True:
            is_closed = self._is_closed(attempt)
            known = next(one for one in self._run.attempts if one.number == attempt)
            ranks = {publisher.get("rank") for publisher in known.publishers}
            if 0 in ranks or is_closed or len(ranks) >= known.local_world_size:
                return 0 in ranks
            await self._tell()
            await asyncio.sleep(_LOOK_SECONDS)

    def _is_closed(self, attempt: int) -> bool:
        """Whether nothing more will be written, unless the attempt is resumed."""
        self._run = run = read_run(self._path)
        return run.last.number != attempt or not (run.live or run.away or run.last.status == "running")

    async def _until_answered(self, ask: Callable[[], Any]) -> Any:
        while True:
            try:
                answer = await answer_of(self._client, ask())
            except passing_errors() as error:
                self._wait_for(error)
                await self._rest()
            else:
                if self.status.state == "waiting":
                    self._note_answer()
                return answer

    def _note_answer(self) -> None:
        """The servers answer: it copies, or has yet to find room for one of its files."""
        why = next(iter(self._full.values()), "")
        self.status.state, self.status.why = "paused" if why else "copying", why

    def _wait_for(self, error: Exception) -> None:
        self._note()
        self.status.state, self.status.why = "waiting", in_words(error)
        if getattr(error, "err_code", None) in FULL:
            self._say_full(error)

    async def _pause(self, subject: str, error: Exception) -> None:
        self._full[subject] = in_words(error)
        self._note_answer()
        self._say_full(error)
        await self._tell()
        await self._rest()

    def _say_full(self, error: Exception) -> None:
        """Says once what has no room, and what makes some."""
        why = in_words(error)
        if why in self._said:
            return
        self._said.add(why)
        room = (
            f"'nats stream edit {self._stream.name} --max-bytes=-1' lets it grow"
            if getattr(error, "err_code", None) == STREAM_FULL
            else "let the servers' operator remove older runs ('nats stream rm ol_RUN') or raise the limit"
        )
        self._say(f"the stream of run {self._run.name} takes no more ({why}): waiting for room; {room}")

    async def _rest(self) -> None:
        self._note()
        self._write_status()
        if not self._client.is_connected:
            await asyncio.sleep(_AWAY_SECONDS)
            return
        await asyncio.sleep(_RETRY_SECONDS[min(self._retries, len(_RETRY_SECONDS) - 1)])
        self._retries += 1

    # -- what is said of it -------------------------------------------------------------------------------------------

    def _note(self) -> None:
        if self._shown is None:
            return
        status, recording, at = self.status, self._shown.file, self._shown.at
        recording.look()
        status.size, status.copied = recording.end, min(at.offset, recording.end)
        status.lag_events = recording.backlog.drop(at.offset)
        status.lag_seconds = recording.backlog.seconds

    async def _tell(self, force: bool = False) -> None:
        """Writes down how it is doing, and what the run is at, for readers elsewhere."""
        now = time.monotonic()
        if not force and now - self._told_at < _TELL_SECONDS:
            return
        if self._shown is not None and self._told_at and now - self._told_at > _STILL_SECONDS:
            await self._shown.check()
        self._told_at = now
        self._write_status()
        said = self._description()
        # Beside the copying, which needs no answer of these replicas.
        if self._telling is None or self._telling.done():
            self._telling = asyncio.create_task(self._put(said))
        elif force:
            await self._telling
            self._telling = asyncio.create_task(self._put(said))
        if force:
            await self._telling

    async def _say_done(self) -> None:
        """Says that all is there: readers end then."""
        if self._telling is not None:
            await self._telling
        self.status.state, self.status.why = "done", ""
        await self._put_now(self._description())
        self._write_status()

    def _description(self) -> dict[str, Any]:
        served = {"attempt": self._run.last.number} if self._run.live else {}
        said = {**describe_run(self._run, served), "host": self._host, "bridge": asdict(self.status)}
        if self.status.state != "done" and not (self._run.live or self._run.paused):
            # A reader of what is there would take it for all.
            said |= {"status": "live", "ended": None}
        return said

    async def _put(self, said: dict[str, Any]) -> None:
        with suppress(*passing_errors(), OffloopError):
            await answer_of(self._client, self._put_now(said))

    async def _put_now(self, said: dict[str, Any]) -> None:
        bucket = await self._bucket()
        key = names.run_key(said["run"], said["attempt"], self._host)
        await bucket.put(key, json.dumps(said).encode())

    async def _bucket(self) -> Any:
        from nats.js.api import KeyValueConfig
        from nats.js.errors import BucketNotFoundError

        try:
            return await self._jetstream.key_value(names.RUNS_BUCKET)
        except BucketNotFoundError:
            config = KeyValueConfig(names.RUNS_BUCKET, replicas=self._replicas)
            return await self._jetstream.create_key_value(config)

    def _write_status(self) -> None:
        self.status.time = time.time()
        self.status.write(self._path)


class _Copy:
    """A growing file of a bridge and its copy in the stream."""

    def __init__(self, bridge: Bridge, subject: str, file: GrowingRecording | GrowingWindows) -> None:
        self._bridge = bridge
        self._subject = subject
        self.file = file
        self.at = Copied()

    def close(self) -> None:
        """Closes the file."""
        self._bridge._full.pop(self._subject, None)
        self.file.close()

    async def follow(self, has_ended: Callable[[], bool]) -> None:
        """Copies until nothing more is written and all of it is there."""
        file = self.file
        at = await self._find(Copied())
        while True:
            # Looked at first: what was written before the run ended is in the file then.
            is_closed = has_ended()
            end = file.look()
            if at.offset < end:
                at = await self._send(at, end, final=None)
            elif is_closed and at.end != file.size:
                at = await self._send(at, file.size, final=end)
            elif is_closed:
                return
            else:
                self._bridge._note()
                await self._bridge._tell()
                await asyncio.sleep(_LOOK_SECONDS)

    async def _send(self, at: Copied, end: int, final: int | None) -> Copied:
        """Sends the next message of what is missing up to ``end``; ``final`` is where the end of a closed file begins,
        if that is what is sent. Returns how far the copy goes then."""
        bridge = self._bridge
        # What followed the last check record before is no more.
        begin = at.offset if final is None else max(at.end, final)
        if final is not None and at.end > end:
            begin = final
        data = self.file.piece(begin, end, bridge._stream.most)
        from nats.js.errors import APIError

        try:
            sequence = await bridge._stream.publish(self._subject, begin, data, at.sequence, final)
        except APIError as error:
            if error.err_code in FULL:
                await bridge._pause(self._subject, error)
            elif error.err_code not in WRONG_LAST_SEQUENCE:
                if (error.code or 0) < 500:
                    raise BrokerError(f"NATS does not take the recording: {in_words(error)}") from None
                bridge._wait_for(error)
                await bridge._rest()
        except passing_errors() as error:
            # It may have arrived: that is looked up.
            bridge._wait_for(error)
        else:
            bridge._retries = 0
            bridge._full.pop(self._subject, None)
            bridge._note_answer()
            end = begin + len(data)
            self.at = at = Copied(end if final is None else final, end, sequence, bridge._identity)
            bridge._note()
            await bridge._tell()
            return at
        return await self._find(at)

    async def check(self) -> None:
        """Looks whether another bridge took the place of this one.

        Raises:
            BridgeReplacedError: it did."""
        await self._look(self.at)

    async def _look(self, before: Copied) -> tuple[Copied, bytes]:
        bridge = self._bridge
        at: Copied
        at, data = await bridge._until_answered(lambda: bridge._stream.last(self._subject))
        if at.bridge not in ("", bridge._identity) and before.bridge == bridge._identity and at.end > before.end:
            raise BridgeReplacedError(f"another bridge, {one_line(at.bridge)}, copies run {bridge._run.name!r} now")
        return at, data

    async def _find(self, before: Copied) -> Copied:
        """Looks up how far the copy goes, as often as it takes."""
        bridge = self._bridge
        at, data = await self._look(before)
        # Who was here before is what a later one is compared with.
        self.at = at = at._replace(bridge=bridge._identity)
        await self._compare(at, data)
        if at.end < before.end:
            bridge.status.refilled += before.end - at.end
            forgotten = f"{before.end - at.end:,} bytes of run {bridge._run.name}"
            bridge._say(f"the servers have forgotten {forgotten}: sent again")
        return at

    async def _compare(self, at: Copied, last: bytes) -> None:
        """Compares the file with the last message, and with the first one where the file ends before the last.

        Raises:
            ShorterError: the file ends before its copy.
            RecordingError: they differ.
        """
        stream, path, end = self._bridge._stream.name, self.file.path, self.file.look()
        begin = at.end - len(last)
        if at.offset > end and begin >= end:
            begin, last = await self._bridge._until_answered(lambda: self._bridge._stream.first(self._subject))
        # What is behind the last check record may be written anew, or is what a power failure left.
        copied = last[: max(0, min(at.offset, end) - begin)]
        if self.file.read(begin, len(copied)) != copied:
            raise RecordingError(
                f"the stream {stream} and {path} differ from byte {begin:,} on: where the file is the right one, "
                "remove the stream, or give this run another name",
                path=path,
            )
        if at.offset > end:
            raise ShorterError(
                f"{path} ends {at.offset - end:,} bytes before its copy in the stream {stream}", path=path
            )
