"""Bridge: copies the recordings of a run, and the windows of its hosts, into JetStream."""

import asyncio
import math
import os
import secrets
import time
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from offloop.bus.errors import BrokerError, OffloopError, RecordingError, RunDirectoryError
from offloop.bus.jetstream import names
from offloop.bus.jetstream.asking import Asking
from offloop.bus.jetstream.connection import PASSING, NatsServers, answer_of, connected
from offloop.bus.jetstream.file_copy import BridgeReplacedError, FileCopy, ShorterError
from offloop.bus.jetstream.relay import Relay
from offloop.bus.jetstream.run_stream import RunFileStream, open_runs
from offloop.bus.protocol.frames import decode_whole_event
from offloop.bus.protocol.run_state import Reached
from offloop.bus.recording.growing import GrowingRecording
from offloop.bus.recording.host_windows import GrowingWindows, windows_path
from offloop.bus.recording.reader import RecordingReader
from offloop.bus.runs.bridged import BridgeStatus
from offloop.bus.runs.directory import Attempt, RunInfo, host_name, read_run
from offloop.bus.runs.listing import list_run

_LOOK_SECONDS = 0.1
_TELL_SECONDS = 1.0
_STILL_SECONDS = 3.0
"""After a pause of this length, such as a suspended process, a bridge checks whether another one took its place."""
_CLUSTER_REPLICAS = 3
_GIVE_UP_SECONDS = 600.0  # a bridge gives up when the servers have stored nothing for this long after its run has ended
_LOCKED_TRIES = 10  # attempts to write windows that another process writes, after the run's attempt has ended


class _RunGoneError(RunDirectoryError):
    """The run's directory is gone, or another run's: nothing may be written there."""


def has_other_hosts(attempt: Attempt) -> bool:
    return attempt.local_world_size < attempt.world_size


def _is_going_on(run: RunInfo) -> bool:
    return run.live or run.away or run.last.status == "running"


async def _watch_nothing(attempt: Attempt, host: str) -> None:
    """Write no windows."""


class Bridge:
    """Copies all attempts of the run in a directory.

    A new stream has ``replicas`` (by default 3 in a cluster and otherwise 1) and at most ``max_bytes``. ``say`` shows a
    line to the user. ``watch`` writes the windows of an attempt of this host, see
    :func:`offloop.bus.hosts.watch.watch_host`. It is called for runs on several hosts, and repeated while it raises
    ``BlockingIOError`` because another process writes them."""

    def __init__(
        self,
        path: Path,
        servers: NatsServers,
        replicas: int | None = None,
        max_bytes: int | None = None,
        host: str | None = None,
        say: Callable[[str], None] = print,
        watch: Callable[[Attempt, str], Coroutine[Any, Any, None]] = _watch_nothing,
    ) -> None:
        self._path = path
        self._servers = servers
        self._wanted_replicas = replicas
        self._max_bytes = max_bytes
        self._host = host or host_name()
        self._say = say
        self._watch = watch
        self._identity = f"{self._host}/{os.getpid()}/{secrets.token_hex(4)}"
        self._run = read_run(path)
        self.status: BridgeStatus = BridgeStatus.of_this_process(str(servers), self._host)
        self._shown: FileCopy | None = None
        self._progress: _Progress | None = None
        self._reported_at = 0.0
        self._asking: Asking | None = None
        self._ended_at = math.inf

    async def copy(self) -> None:
        """Copy until the run has ended and is complete in the servers.

        Raises BridgeReplacedError: another bridge has taken over; BrokerError: the servers refuse, or store nothing for
        :data:`_GIVE_UP_SECONDS` after the run's end; RecordingError: the stream differs from a recording;
        RunDirectoryError: the run's directory cannot be read, or is another run's by now."""
        # A task, because it may wait for servers without a limit.
        copying = asyncio.create_task(self._copy_connected())
        self._write_status()
        is_own = True
        try:
            while not (await asyncio.wait((copying,), timeout=_TELL_SECONDS))[0]:
                self._check_use()
            await copying
        except (BridgeReplacedError, _RunGoneError):
            is_own = False  # the folder, if it exists, has the status of its present owner
            raise
        except OffloopError as error:
            self.status.state, self.status.reason = "failed", str(error)
            raise
        finally:
            if is_own:
                self._write_status()
            copying.cancel()
            await asyncio.gather(copying, return_exceptions=True)

    def _check_use(self) -> None:
        """Raise an error if copying is useless: the run is gone, or the servers take no more of it after its end."""
        run, now = self._read_run(), time.monotonic()
        if self.status.state == "done" or _is_going_on(run):
            self._ended_at = math.inf
            return
        self._ended_at = min(self._ended_at, now)
        sent_at = -math.inf if self._asking is None else self._asking.sent_at
        if now - max(self._ended_at, sent_at) > _GIVE_UP_SECONDS:
            why = f" ({self.status.reason})" if self.status.reason else ""
            raise BrokerError(
                f"NATS at {self._servers} stored nothing of run {run.name} for {_GIVE_UP_SECONDS / 60:g} minutes after "
                f"it had ended{why}: start 'offloop server bridge' again when it does",
                address=str(self._servers),
            )

    def _read_run(self) -> RunInfo:
        run = read_run(self._path) if self._path.exists() else None
        if run is None or run.id != self._run.id:
            what = "was removed" if run is None else "holds another run by now"
            raise _RunGoneError(f"{self._path} {what}: nothing more of run {self._run.name} is copied", path=self._path)
        self._run = run
        return run

    def _note_away(self, line: str) -> None:
        if self._asking is None:
            self.status.reason = "no server answers"
            self._write_status()
        self._say(line)

    async def _copy_connected(self) -> None:
        async with connected(self._servers, f"bridge {self._run.name}", self._note_away) as client:
            self._client = client
            self._asking = Asking(client, self._run.name, self.status, self._write_status, self._say)
            copied = client, self._run.name, self._run.id, self._identity, self._replicas
            self._stream = RunFileStream(*copied, self._max_bytes)
            self._windows_stream = RunFileStream(*copied, has_windows=True)
            await self._asking.until_answered(self._stream.make)
            async with Relay(client, self._path, self._run.name) as relay:
                self._relay = relay
                await self._copy_all(self._asking)

    @property
    def _replicas(self) -> int:
        return self._wanted_replicas or (_CLUSTER_REPLICAS if self._client.is_in_cluster else 1)

    async def _copy_all(self, asking: Asking) -> None:
        done: set[int] = set()
        failure: RecordingError | None = None
        while (attempt := self._next(done)) is not None:
            done.add(attempt.number)
            self.status.attempt = attempt.number
            if attempt.recording.exists():
                try:
                    await self._copy_attempt(attempt, asking)
                except RecordingError as error:
                    failure = error
                    if self._next(done) is None:
                        break
                    self._say(f"attempt {attempt.number} of run {self._run.name} is not copied any further: {error}")
            else:
                self._say(f"attempt {attempt.number} of run {self._run.name} has no recording any more: not copied")
            if self._next(done) is None:
                await asking.until_answered(self._put_done)
                self._write_status()
        if failure is not None:
            raise failure

    def _next(self, done: Collection[int]) -> Attempt | None:
        self._read_run()
        return next((attempt for attempt in self._run.attempts if attempt.number not in done), None)

    async def _copy_attempt(self, attempt: Attempt, asking: Asking) -> None:
        """Copy an attempt until it has ended: the recording if this host has the first rank, and the host's windows."""
        run, number = self._run.name, attempt.number
        copies: list[FileCopy] = []
        reporting = asyncio.create_task(self._keep_reporting())
        tasks = [reporting]
        try:
            if not has_other_hosts(attempt) or await self._has_first_rank(number):
                await self._relay.serve_run()
                subject = names.recording_subject(run, number, self._host)
                copies.append(await self._copy_of(self._stream, subject, GrowingRecording(attempt.recording), asking))
                tasks.append(asyncio.create_task(self._follow_recording(copies[-1], number)))
            if has_other_hosts(attempt):
                watching: asyncio.Task[None] = asyncio.create_task(self._write_windows(attempt))
                tasks.append(watching)
                subject = names.windows_subject(run, number, self._host)
                windows = GrowingWindows(windows_path(attempt.recording, number))
                await asking.until_answered(self._windows_stream.make)
                copies.append(await self._copy_of(self._windows_stream, subject, windows, asking))
                tasks.append(asyncio.create_task(self._follow_windows(copies[-1], watching.done)))
            self._shown = copies[0]
            if isinstance(file := copies[0].file, GrowingRecording):
                self._progress = _Progress(file)
            left = set(tasks)
            while left != {reporting}:
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            self._note()
        finally:
            self._shown = self._progress = None
            for one in tasks:
                one.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for copy in copies:
                copy.close()

    async def _copy_of(
        self, stream: RunFileStream, subject: str, file: GrowingRecording | GrowingWindows, asking: Asking
    ) -> FileCopy:
        # In a thread, because it takes seconds for a run of some days.
        try:
            await asyncio.to_thread(file.look)
        except BaseException:
            file.close()
            raise
        return FileCopy(stream, asking, subject, file)

    async def _follow_recording(self, copy: FileCopy, attempt: int) -> None:
        try:
            await copy.follow(lambda: self._is_closed(attempt))
        except ShorterError as error:
            if not self._is_closed(attempt):
                raise
            self._say(f"{error}: the copy is kept as it is")

    async def _follow_windows(self, copy: FileCopy, has_ended: Callable[[], bool]) -> None:
        try:
            await copy.follow(has_ended)
        except RecordingError as error:
            # Copying of the recording continues: it is more important.
            self._say(f"no more windows of this host are copied: {error}")

    async def _write_windows(self, attempt: Attempt) -> None:
        """Have the windows written completely, by this process as soon as no other one does."""
        tries = _LOCKED_TRIES
        while tries > 0:
            with suppress(BlockingIOError):
                try:
                    await self._watch(attempt, self._host)
                except (OffloopError, BlockingIOError):
                    raise
                # Copying of the recording continues: it is more important.
                except Exception as error:  # noqa: BLE001
                    self._say(f"no more windows of this host are written: {error!r}")
                return
            tries -= self._is_closed(attempt.number)
            await asyncio.sleep(_TELL_SECONDS)
        self._say("another process has not written the last windows of this host yet: the existing ones are copied")

    async def _has_first_rank(self, attempt: int) -> bool:
        """Return whether the first rank publishes here, once all ranks of this host have begun."""
        while True:
            is_closed = self._is_closed(attempt)
            known = next(one for one in self._run.attempts if one.number == attempt)
            ranks = {publisher.get("rank") for publisher in known.publishers if "role" not in publisher}
            if 0 in ranks or is_closed or len(ranks) >= known.local_world_size:
                return 0 in ranks
            await asyncio.sleep(_LOOK_SECONDS)

    def _is_closed(self, attempt: int) -> bool:
        """Return whether the attempt is complete, unless it is resumed."""
        run = self._read_run()
        return run.last.number != attempt or not _is_going_on(run)

    async def _keep_reporting(self) -> None:
        while True:
            if self._shown is not None and self._reported_at and time.monotonic() - self._reported_at > _STILL_SECONDS:
                await self._shown.check()
            self._reported_at = time.monotonic()
            # Raises if the folder is another run's, before anything is written there.
            self._read_run()
            self._write_status()
            with suppress(*PASSING, OffloopError):
                await answer_of(self._client, self._put_description())
            await asyncio.sleep(_TELL_SECONDS)

    def _note(self) -> None:
        if self._shown is None:
            return
        status, recording, at = self.status, self._shown.file, self._shown.at
        recording.look()
        status.size, status.copied = recording.end, min(at.offset, recording.end)

    async def _put_done(self) -> None:
        # Readers stop waiting when they see that all is copied.
        self.status.state, self.status.reason = "done", ""
        await self._put_description()

    async def _put_description(self) -> None:
        reached = None if self._progress is None else self._progress.reached()
        listed = list_run(self._run, self._host, self.status, reached)
        bucket = await open_runs(self._client, self._replicas)
        await bucket.put(names.key(listed.run, listed.attempt, self._host), msgspec.json.encode(listed))

    def _write_status(self) -> None:
        self._note()
        self.status.time = time.time()
        self.status.write(self._path)


class _Progress:
    """Progress of a live training, by its growing recording; each part is read once."""

    def __init__(self, recording: GrowingRecording) -> None:
        self._recording = recording
        self._read_to = 0
        self._reached: Reached | None = None

    def reached(self) -> Reached | None:
        check = self._recording.check
        if check is not None and self._recording.end > self._read_to:
            self._read_to = self._recording.end
            with suppress(OffloopError), RecordingReader(self._recording.path) as reader:
                reader.position = check.start
                last = {
                    int(rank): body
                    for records in reader.read()
                    for name, body in records
                    if not (topic := name.rsplit("/", 2))[1].startswith("$") and (rank := topic[2]).isdecimal()
                }
                if last:
                    self._reached = Reached.of(decode_whole_event(last[min(last)]))
        return self._reached
