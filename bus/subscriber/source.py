"""Sources of a run for a subscriber: its directory on this machine, or NATS."""

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
    """One attempt of a run. Defaults are for sources that do not know a value."""

    run_name: str  # name of the run in its events
    run_id: str | None
    attempt: int
    reader: RecordingReader
    run_dir: Path | None = None
    recording: Path | None = None
    event_feed: str | None = None  # last known address of the event feed; ``None`` if only the recording is read

    @property
    def refusal(self) -> str:
        """Why it gives no further data, if it was refused."""
        return ""

    @property
    def pending(self) -> bool:
        """A requested part of the recording has not arrived."""
        return False

    @abstractmethod
    def look(self) -> RunStatus:
        """Return the attempt's status, without waiting; it may be half a second old."""

    @abstractmethod
    def open_channel(self) -> Channel:
        """Open a channel to the last known broker. Raise ConfigurationError if the run is not live."""

    def newest_positions(self) -> dict[int, tuple[int, int]]:
        """Return each rank's newest recorded event, ``(seq, base_seq)``, if there is no event feed to report it."""
        return {}

    def refresh(self) -> None:  # noqa: B027  files need none
        """Note that the recording may have grown."""

    @abstractmethod
    def host_windows(self) -> list[HostWindow]:
        """Return the hosts' windows since the last call."""

    def close(self) -> None:
        self.reader.close()


class LocalRun(RunSource):
    def __init__(self, info: RunInfo) -> None:
        self.run_name: str = info.recorded_as
        self.run_id: str | None = info.id
        self.attempt: int = info.last.number
        self.run_dir: Path = info.path
        self._path = info.path
        self.recording: Path = info.recording
        self.reader: RecordingReader = RecordingReader(info.recording)
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
            found = None
            with contextlib.suppress(RunDirectoryError):
                found = read_run(self._path)
            if found is not None and found.id == self.run_id:
                self._status = self._found(found)
            else:
                # The directory was deleted under a live broker, and may be another run's: only its lock shows that the
                # broker lives.
                alive = self._status is RunStatus.LIVE and is_held(self._lock)
                self._status = RunStatus.LIVE if alive else RunStatus.FINISHED
        return self._status

    def _found(self, run: RunInfo) -> RunStatus:
        if run.last.number != self.attempt:
            return RunStatus.FINISHED
        if run.live and run.control_endpoint is not None and run.event_feed is not None:
            self._control_endpoint = run.control_endpoint
            self.event_feed: str | None = run.event_feed
            self._lost_since = None
            return RunStatus.LIVE
        if run.away or run.last.status == "running":
            return RunStatus.AWAY
        if run.last.status == "lost" and run.last.is_published_elsewhere:
            # A trainer in another container is invisible here: give it time to start another broker.
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
