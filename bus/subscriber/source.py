"""Where a subscriber finds a run: in its directory on this machine, or in NATS."""

import asyncio
import contextlib
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from pathlib import Path

from offloop.bus.errors import ConfigurationError, RunDirectoryError
from offloop.bus.files import open_file
from offloop.bus.net.channels import Channel, SocketChannel
from offloop.bus.protocol.host_windows import HostWindow
from offloop.bus.recording.host_windows import GrowingWindows, windows_path
from offloop.bus.recording.reader import RecordingReader
from offloop.bus.runs.directory import LOCK_FILE, RunInfo, read_run
from offloop.bus.runs.lock import is_held
from offloop.bus.subscriber.following import LOOK_SECONDS, RunStatus

_MOST_WINDOWS = 64
_TRAINER_RETURN_SECONDS = 10.0


class RunSource(ABC):
    """One attempt of a run, wherever it is. What a kind of source does not know is as it is here."""

    run_name: str
    """The run's name in its events."""
    run_id: str | None
    attempt: int
    reader: RecordingReader
    run_dir: Path | None = None
    """``None`` where the directory cannot be seen."""
    recording: Path | None = None
    event_feed: str | None = None
    """Address of the event feed, when last looked at; ``None`` where the recording alone is read, as it grows."""

    @property
    def refusal(self) -> str:
        """Why nothing more of it is given, where that was said."""
        return ""

    @property
    def pending(self) -> bool:
        """A requested part of the recording is on its way."""
        return False

    @abstractmethod
    def look(self) -> RunStatus:
        """The attempt's status. Does not wait: it may be up to half a second old."""

    @abstractmethod
    def open_channel(self) -> Channel:
        """A channel to the broker of a live run, as it was when last looked at. Raises ConfigurationError: the run is
        not live."""

    def newest_positions(self) -> dict[int, tuple[int, int]]:
        """Of each rank the number of its newest recorded event, ``(seq, base_seq)``, where no event feed says so."""
        return {}

    def refresh(self) -> None:  # noqa: B027  a file needs no such word
        """Says that the recording has grown, or may have."""

    def wait(self, seconds: float) -> None:
        """Waits so long, or until something of the recording has come."""
        time.sleep(seconds)

    async def wait_async(self, seconds: float) -> None:
        """As :meth:`wait`, while the event loop runs."""
        await asyncio.sleep(seconds)

    @abstractmethod
    def host_windows(self) -> list[HostWindow]:
        """The hosts' windows since the last call."""

    def close(self) -> None:
        """Ends it."""
        self.reader.close()


class LocalRun(RunSource):
    """An attempt whose directory is on this machine."""

    def __init__(self, info: RunInfo) -> None:
        self.run_name = info.recorded_as
        self.run_id = info.id
        self.attempt = info.last.number
        self.run_dir = self._path = info.path
        self.recording = info.recording
        self.reader = RecordingReader(info.recording)
        self._control_endpoint: str | None = None
        self._lost_since: float | None = None
        self._status = self._found(info)
        self._windows = GrowingWindows(windows_path(info.recording, self.attempt))
        self._lock = -1
        with contextlib.suppress(OSError):
            self._lock = open_file(info.path / LOCK_FILE)
        self._look_at = time.monotonic() + LOOK_SECONDS

    def look(self) -> RunStatus:
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            try:
                self._status = self._found(read_run(self._path))
            except RunDirectoryError:
                # Deleted under the broker, which continues the event feed: only its lock still shows that.
                alive = self._status is RunStatus.LIVE and is_held(self._lock)
                self._status = RunStatus.LIVE if alive else RunStatus.FINISHED
        return self._status

    def _found(self, run: RunInfo) -> RunStatus:
        if run.last.number != self.attempt:
            return RunStatus.FINISHED
        if run.live and run.control_endpoint is not None and run.event_feed is not None:
            self._control_endpoint, self.event_feed = run.control_endpoint, run.event_feed
            self._lost_since = None
            return RunStatus.LIVE
        if run.away or run.last.status == "running":
            return RunStatus.AWAY
        if run.last.status == "lost" and run.last.is_published_elsewhere:
            # A trainer in another container is not seen from here; it has a moment to start another broker.
            now = time.monotonic()
            self._lost_since = self._lost_since or now
            return RunStatus.AWAY if now - self._lost_since < _TRAINER_RETURN_SECONDS else RunStatus.FINISHED
        return RunStatus.FINISHED

    def open_channel(self) -> Channel:
        if self._control_endpoint is None:
            raise ConfigurationError(f"run {self.run_name!r} is not live: 'offloop runs' lists the runs")
        return SocketChannel(self._control_endpoint)

    def host_windows(self) -> list[HostWindow]:
        return list(deque(self._windows.windows(), maxlen=_MOST_WINDOWS))

    def close(self) -> None:
        super().close()
        self._windows.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
