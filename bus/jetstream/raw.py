"""The host's end of requests for what is in its recordings and not in the stream: ranges of one, and parts of it by
training time."""

import asyncio
import os
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from offloop.bus.errors import BrokerError, ProtocolError
from offloop.bus.processes import python_path
from offloop.bus.protocol.frames import MAX_RANGE, Control, encode_control
from offloop.bus.recording.growing import GrowingRecording
from offloop.bus.recording.window import parse_bound
from offloop.bus.runs.directory import RunInfo, read_run

KINDS = ("fetch", "cut")
"""Requests that a host answers out of its recordings."""
_KEPT_SECONDS = 30.0
_MOST_CUTS = 4
_FOLDER = ".cut-"
_LEFT_SECONDS = 3600.0
"""What a killed bridge has left behind is removed after that."""


class RawRecordings:
    """What a host gives of the recordings of a run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        for left in path.glob(f"{_FOLDER}*"):
            with suppress(OSError):
                if time.time() - left.stat().st_mtime > _LEFT_SECONDS:
                    shutil.rmtree(left)
        self._recordings: dict[int, GrowingRecording] = {}
        self._cuts: dict[tuple[object, ...], _Cut] = {}
        self._opening = asyncio.Lock()
        self._cutting = asyncio.Semaphore(1)
        self.used = float("-inf")
        """When something was last asked for, by ``time.monotonic``."""

    async def answer(self, control: Control) -> bytes:
        """The answer to a request.

        Raises:
            OffloopError: there is none: no such attempt, no such time.
        """
        self.used = time.monotonic()
        content, run = control.content, read_run(self._path)
        number = content.get("attempt", run.last.number)
        recording = await self._recording(run, number)
        end = recording.look()
        recording.backlog.drop(end)
        offset = content.get("offset")
        if type(offset) is not int or offset < 0:
            raise ProtocolError("a range has an offset")
        said: dict[str, Any] = {"run": content.get("run"), "attempt": number, "offset": offset}
        if "id" in content:
            said["id"] = content["id"]
        if control.kind == "cut":
            said["data"] = self._cut(recording.path, content, offset)
        else:
            # What follows the last check record of a file that is written may be cut off.
            end = end if run.live and number == run.last.number else recording.size
            said["data"] = recording.read_at(offset, max(0, min(end - offset, MAX_RANGE)))
        return encode_control("data", said)

    async def _recording(self, run: RunInfo, number: object) -> GrowingRecording:
        attempt = next((one for one in run.attempts if one.number == number), None)
        if attempt is None:
            raise BrokerError(f"run {run.name!r} has no such attempt on this host: attempts are 1 to {run.last.number}")
        async with self._opening:
            if attempt.number not in self._recordings:
                recording = GrowingRecording(attempt.recording)
                try:
                    await asyncio.to_thread(recording.look)
                except BaseException:
                    recording.close()
                    raise
                self._recordings[attempt.number] = recording
        return self._recordings[attempt.number]

    def _cut(self, path: Path, content: dict[str, Any], offset: int) -> bytes | None:
        requested = path.name, content.get("reader"), content.get("start"), content.get("until")
        for moment in requested[2:]:
            if moment is not None:
                parse_bound(moment if isinstance(moment, str) else "")
        if not isinstance(requested[1], str):
            raise ProtocolError("who asks for a part says who it is by 'reader'")
        for key, known in list(self._cuts.items()):
            if time.monotonic() - known.used > _KEPT_SECONDS:
                self._cuts.pop(key).close()
        if requested not in self._cuts:
            if offset:
                raise BrokerError("the host dropped this part, which was not asked for any more: fetch it again")
            if len(self._cuts) >= _MOST_CUTS:
                raise BrokerError(f"this host cuts {_MOST_CUTS} parts for others already: try again in a minute")
            self._cuts[requested] = _Cut(path, *requested[2:], self._cutting)
        data = None
        try:
            data = self._cuts[requested].read(offset)
        finally:
            if data == b"" or self._cuts[requested].has_failed:
                self._cuts.pop(requested).close()
        return data

    def close(self) -> None:
        """Ends what is under way."""
        for cut in self._cuts.values():
            cut.close()
        for recording in self._recordings.values():
            recording.close()


class _Cut:
    """A part of a recording, which a process of its own cuts out: at most one at a time, as the last of what the
    machine has to do."""

    def __init__(self, path: Path, start: object, until: object, turn: asyncio.Semaphore) -> None:
        self.used = time.monotonic()
        # Beside the recording there is room for large files, unlike where temporary files go.
        try:
            if shutil.disk_usage(path.parent).free < path.stat().st_size:
                raise BrokerError(f"the host has no room to cut a part of {path.name} out: free some in {path.parent}")
            self._folder = tempfile.TemporaryDirectory(prefix=_FOLDER, dir=path.parent)
        except OSError as error:
            raise BrokerError(f"on its host: {error.strerror}") from None
        self._made = Path(self._folder.name) / "cut.mcap"
        bounds = [f"--{name}={moment}" for name, moment in (("start", start), ("until", until)) if moment is not None]
        self._command = [
            sys.executable,
            "-P",
            "-m",
            "offloop.bus",
            "convert",
            "cut",
            str(path),
            "-o",
            str(self._made),
            *bounds,
        ]
        self._task = asyncio.create_task(self._make(turn))

    async def _make(self, turn: asyncio.Semaphore) -> None:
        async with turn:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": python_path()},
            )
            try:
                with suppress(ProcessLookupError):  # it has ended already
                    os.setpriority(os.PRIO_PROCESS, process.pid, 19)
                _, said = await process.communicate()
            finally:
                with suppress(ProcessLookupError):
                    process.kill()
        if not self._made.exists():
            line = said.decode(errors="replace").strip().rpartition("\n")[2]
            raise BrokerError(f"on its host: {line.removeprefix('error: ')}")

    @property
    def has_failed(self) -> bool:
        """Whether it could not be made."""
        return self._task.done() and (self._task.cancelled() or self._task.exception() is not None)

    def read(self, offset: int) -> bytes | None:
        """A range of it: nothing at its end, and ``None`` as long as it is made.

        Raises:
            BrokerError: it could not be made.
        """
        self.used = time.monotonic()
        if not self._task.done():
            return None
        self._task.result()
        try:
            with open(self._made, "rb") as file:
                return os.pread(file.fileno(), MAX_RANGE, offset)
        except OSError as error:
            raise BrokerError(f"on its host: {error.strerror}") from None

    def close(self) -> None:
        """Ends it."""
        self._task.cancel()
        self._folder.cleanup()
