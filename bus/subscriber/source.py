"""Where a subscriber finds a run: in its directory on this machine, or in NATS."""

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from offloop.bus.errors import RunDirectoryError
from offloop.bus.files import open_file
from offloop.bus.protocol.host_windows import HostWindow
from offloop.bus.protocol.order import StreamOrder
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.recording.host_windows import GrowingWindows, windows_path
from offloop.bus.recording.reader import RecordingReader
from offloop.bus.runs.directory import LOCK_FILE, RunInfo, read_run
from offloop.bus.runs.lock import is_held
from offloop.bus.subscriber.following import RunStatus
from offloop.bus.types.timeouts import Timeouts

_MOST_WINDOWS = 64


class Endpoints(NamedTuple):
    """Where a live run is served."""

    control_endpoint: str
    event_feed: str | None
    """``None`` where the recording alone is read, as it grows."""


class RunSource(Protocol):
    """One attempt of a run, wherever it is."""

    run_name: str
    """The run's name in its events."""
    run_id: str | None
    attempt: int
    run_dir: Path | None
    """``None`` where the directory cannot be seen."""
    recording: Path | None
    reader: RecordingReader
    endpoints: Endpoints | None
    """Where it is served, when last looked at."""

    @property
    def refusal(self) -> str:
        """Why nothing more of it is given, where that was said."""

    def look(self) -> RunStatus:
        """The attempt's status. Does not wait: it may be up to half a second old."""

    @property
    def pending(self) -> bool:
        """Whether a part of the recording that was asked for is on its way."""

    def newest_positions(self) -> dict[int, tuple[int, int]]:
        """Of each rank the number of its newest recorded event, ``(seq, base_seq)``, where no event feed says so."""

    def refresh(self) -> None:
        """Says that the recording has grown, or may have."""

    def wait(self, seconds: float) -> None:
        """Waits so long, or until something of the recording has come."""

    async def wait_async(self, seconds: float) -> None:
        """As :meth:`wait`, while the event loop runs."""

    def host_windows(self) -> list[HostWindow]:
        """What hosts have said of their ranks since the last call."""

    def close(self) -> None:
        """Ends it."""


class LocalRun:
    """An attempt whose directory is on this machine."""

    pending = False
    refusal = ""

    def __init__(self, info: RunInfo, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self.run_name = info.recorded_as
        self.run_id = info.id
        self.attempt = info.last.number
        self.run_dir: Path | None = info.path
        self._path = info.path
        self.recording: Path | None = info.recording
        self.reader = RecordingReader(info.recording)
        self.endpoints: Endpoints | None = None
        self._lost_since: float | None = None
        self._status = self._found(info)
        self._windows = GrowingWindows(windows_path(info.recording, self.attempt))
        self._lock = -1
        with contextlib.suppress(OSError):
            self._lock = open_file(info.path / LOCK_FILE)
        self._look_at = time.monotonic() + self._timeouts.look

    def look(self) -> RunStatus:
        """The attempt's status, by its directory."""
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + self._timeouts.look
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
            self.endpoints = Endpoints(run.control_endpoint, run.event_feed)
            self._lost_since = None
            return RunStatus.LIVE
        if run.away or run.last.status == "running":
            return RunStatus.AWAY
        if run.last.status == "lost" and run.last.is_published_elsewhere:
            # Whether its trainer is still there cannot be seen from here; it has a moment to find a broker again.
            now = time.monotonic()
            self._lost_since = self._lost_since or now
            return RunStatus.AWAY if now - self._lost_since < self._timeouts.trainer_return else RunStatus.FINISHED
        return RunStatus.FINISHED

    def newest_positions(self) -> dict[int, tuple[int, int]]:
        """None: the event feed says how far the run is."""
        return {}

    def refresh(self) -> None:
        """Nothing to do: the file shows what it has."""

    def wait(self, seconds: float) -> None:
        """Waits so long."""
        time.sleep(seconds)

    async def wait_async(self, seconds: float) -> None:
        """Waits so long."""
        await asyncio.sleep(seconds)

    def host_windows(self) -> list[HostWindow]:
        """The last ones of this host."""
        return list(deque(self._windows.windows(), maxlen=_MOST_WINDOWS))

    def close(self) -> None:
        """Closes the recording."""
        self.reader.close()
        self._windows.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def status_of(listed: Mapping[str, Any]) -> RunStatus:
    """How an attempt stands by what is said of it elsewhere."""
    if listed.get("live"):
        return RunStatus.LIVE
    return RunStatus.AWAY if listed.get("status") in ("live", "paused", "running") else RunStatus.FINISHED


def recorded(source: RunSource, timeouts: Timeouts | None = None) -> Iterator[Snapshot]:
    """The events of an attempt that are recorded at the moment.

    Raises:
        BrokerError: the NATS servers refuse this user.
    """
    order = StreamOrder(source.run_name, source.attempt, None)
    while True:
        for records in source.reader.read():
            for record in records:
                snapshot = order.from_record(record.topic, record.body)
                if isinstance(snapshot, Snapshot):
                    yield snapshot
        if not source.pending:
            return
        source.look()
        source.wait((timeouts or Timeouts.default).fetch_poll)
