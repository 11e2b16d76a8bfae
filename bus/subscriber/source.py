"""Where a subscriber finds a run: in its directory on this machine, or through a broker on another one."""

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from offloop.bus.errors import BrokerError, RunDirectoryError, RunNotFoundError
from offloop.bus.files import open_file
from offloop.bus.net.channels import Channel, open_channel
from offloop.bus.net.curve import ClientSecurity
from offloop.bus.net.nats_addresses import how_to_list, what_is_at
from offloop.bus.net.requests import _keys_hint, request
from offloop.bus.protocol.frames import check_run_name
from offloop.bus.protocol.host_windows import HostWindow
from offloop.bus.protocol.order import StreamOrder
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.recording.host_windows import GrowingWindows, windows_path
from offloop.bus.recording.reader import Hole, RecordingReader
from offloop.bus.runs.directory import LOCK_FILE, RunInfo, read_run
from offloop.bus.runs.lock import is_held
from offloop.bus.subscriber.following import RunStatus
from offloop.bus.types.timeouts import Timeouts

MAX_BEHIND = 32 << 20
_MOST_REASON = 500
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


class RemoteRun:
    """An attempt that is reached through its broker alone, at ``address``: the recording comes in ranges.

    Raises:
        RunNotFoundError: the broker knows no such run.
        BrokerError: no broker answers.
    """

    def __init__(
        self,
        address: str,
        run: str | None,
        security: ClientSecurity | None = None,
        timeouts: Timeouts | None = None,
    ) -> None:
        self._timeouts = timeouts or Timeouts.default
        self.run_dir: Path | None = None
        self.recording: Path | None = None
        self.endpoints: Endpoints | None = None
        self._control_address = address
        self._channel = open_channel(address, security, self._timeouts)
        try:
            listed = self._first_answer(address, run, security)
        except BaseException:
            self._channel.close()
            raise
        self._run = check_run_name(listed["run"])
        self.run_name = check_run_name(listed.get("recorded_as") or self._run)
        self.run_id: str | None = listed["id"] if isinstance(listed.get("id"), str) else None
        self.attempt: int = listed["attempt"]
        self._file = _RemoteFile(self._channel, self._run, self.attempt, self._timeouts.fetch)
        self.reader = RecordingReader(self._file, f"the recording of run {self._run}")
        self._heard = self._connected = time.monotonic()
        self._security = security
        self.refusal = ""
        self._ask_at = 0.0
        self._lost_since: float | None = None
        self._status = RunStatus.AWAY
        self._note(listed)

    def _first_answer(self, address: str, run: str | None, security: ClientSecurity | None) -> dict[str, Any]:
        answer = request(self._channel, "runs", {"run": run}, self._timeouts.answer)
        if answer is None:
            raise BrokerError(f"no broker answers at {address}: it is not there, {_keys_hint(security)}")
        runs = _listed_runs(answer)
        if not runs:
            what = "has no runs yet" if run is None else f"has no run {run!r}"
            raise RunNotFoundError(f"{what_is_at(address)} {what}: {how_to_list(address)}", run=run)
        live = [listed for listed in runs if listed.get("live")]
        chosen: dict[str, Any] = (live or runs)[0]
        return chosen

    def look(self) -> RunStatus:
        """How the attempt stands, by what the broker last said of it."""
        now = time.monotonic()
        if now >= self._ask_at:
            self._ask_at = now + self._timeouts.look
            self._channel.send("runs", {"run": self._run})
        self._take_answers()
        if now - self._heard > self._timeouts.broker_return:
            return RunStatus.UNREACHABLE
        if now - max(self._heard, self._connected) > self._timeouts.silence:
            self._connect_anew(now)
        return self._status

    def _connect_anew(self, now: float) -> None:
        """The connection may be dead without being closed."""
        self._connected = now
        self._channel.close()
        self._channel = open_channel(self._control_address, self._security, self._timeouts)
        self._file.use(self._channel)

    def _take_answers(self) -> None:
        while (answer := self._channel.receive()) is not None:
            self._heard = time.monotonic()
            if answer.kind == "data":
                self._file.take(answer.content)
            elif answer.kind == "refused":
                # Nothing more can be read.
                self.refusal = str(answer.content.get("reason", ""))[:_MOST_REASON]
                self._file.at_end = True
                self._status = RunStatus.FINISHED
            elif answer.kind == "runs":
                for listed in _listed_runs(answer.content):
                    if listed["run"] == self._run:
                        self._note(listed)

    def _note(self, listed: dict[str, Any]) -> None:
        now = time.monotonic()
        if listed.get("attempt") != self.attempt:
            self._status = RunStatus.FINISHED
        elif listed.get("live"):
            self._lost_since = None
            self.endpoints = Endpoints(
                self._control_address, _seen_from_here(str(listed.get("event_feed")), self._control_address)
            )
            self._status = RunStatus.LIVE
        elif listed.get("status") in ("live", "paused"):
            self._lost_since = None
            self._status = RunStatus.AWAY
        elif listed.get("status") == "lost":
            # Its trainer may be on yet another machine, and about to find the broker again.
            self._lost_since = self._lost_since or now
            self._status = (
                RunStatus.AWAY if now - self._lost_since < self._timeouts.trainer_return else RunStatus.FINISHED
            )
        else:
            self._status = RunStatus.FINISHED

    @property
    def pending(self) -> bool:
        """Whether a range is on its way."""
        self._take_answers()
        # Behind a footer nothing is asked for, until :meth:`refresh`.
        return not (self._file.at_end or self.reader.finished)

    def newest_positions(self) -> dict[int, tuple[int, int]]:
        """None: the event feed says how far the run is."""
        return {}

    def refresh(self) -> None:
        """Asks for what came after the reader's position, where another broker may have cut a footer off."""
        self._file.forget(self.reader.position)

    def wait(self, seconds: float) -> None:
        """Waits so long, or until an answer has come, or there is one already."""
        if not self._file.take_note():
            self._channel.wait(seconds)

    async def wait_async(self, seconds: float) -> None:
        """As :meth:`wait`, while the event loop runs."""
        await asyncio.sleep(0)
        if not self._file.take_note():
            await self._channel.wait_async(seconds)

    def host_windows(self) -> list[HostWindow]:
        """None: a broker has none."""
        return []

    def close(self) -> None:
        """Ends the connection."""
        self._channel.close()


def status_of(listed: Mapping[str, Any]) -> RunStatus:
    """How an attempt stands by what is said of it elsewhere."""
    if listed.get("live"):
        return RunStatus.LIVE
    return RunStatus.AWAY if listed.get("status") in ("live", "paused", "running") else RunStatus.FINISHED


def recorded(source: RunSource, timeouts: Timeouts | None = None) -> Iterator[Snapshot]:
    """The events of an attempt that are recorded at the moment.

    Raises:
        BrokerError: what gives the recording does not answer any more.
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
        if source.look() is RunStatus.UNREACHABLE:
            raise BrokerError(f"the broker of run {source.run_name!r} does not answer any more")
        source.wait((timeouts or Timeouts.default).fetch_poll)


def _listed_runs(content: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs in an answer, those that have the form that the protocol gives them."""
    runs = content.get("runs")
    return [
        listed
        for listed in (runs if isinstance(runs, list) else ())
        if isinstance(listed, dict) and isinstance(listed.get("run"), str) and type(listed.get("attempt")) is int
    ]


class _RemoteFile:
    """A recording as :class:`~offloop.bus.recording.reader.RecordingReader` reads it, from ranges that are asked for
    when they are read."""

    def __init__(self, channel: Channel, run: str, attempt: int, patience: float) -> None:
        self._patience = patience
        self._channel = channel
        self._which = {"run": run, "attempt": attempt}
        self._start = 0
        self._data = bytearray()
        self._asked = 0.0
        self.at_end = False
        """Whether everything that the broker has is here."""
        self._has_come = False
        self.hole: Hole | None = None
        """What follows what is here and is lost for good."""

    @property
    def is_coming(self) -> bool:
        """Whether an answer is waited for."""
        return not self.at_end and self.hole is None

    def read_at(self, offset: int, size: int) -> bytes:
        """What is here of a range; the rest is asked for."""
        self._has_come = False
        behind = offset - self._start
        if not 0 <= behind <= len(self._data):
            self._start, self._data, behind = offset, bytearray(), 0
            self._asked, self.at_end, self.hole = 0.0, False, None
        elif behind > MAX_BEHIND:
            del self._data[:behind]
            self._start, behind = offset, 0
        if behind + size > len(self._data):
            self._ask()
        return bytes(self._data[behind : behind + size])

    def skip_zeros(self, offset: int) -> int:
        """The same offset: what comes may be anything."""
        return offset

    def _ask(self) -> None:
        now = time.monotonic()
        if self.is_coming and now - self._asked > self._patience:
            self._asked = now
            self._channel.send("fetch", {**self._which, "offset": self._start + len(self._data)})

    def take(self, content: dict[str, Any]) -> None:
        """Takes an answer, if it is the one that is waited for."""
        data = content.get("data")
        if content.get("offset") != self._start + len(self._data) or not isinstance(data, bytes):
            return
        self._asked = 0.0
        self._has_come = True
        self._data += data
        lost = content.get("lost")
        if type(lost) is int and lost > content["offset"]:
            self.hole = Hole(lost, str(content.get("reason")))
        self.at_end = not data and self.hole is None

    def take_note(self) -> bool:
        """Whether something has come since it was read, or this was asked, last."""
        has_come, self._has_come = self._has_come, False
        return has_come

    def forget(self, offset: int) -> None:
        """Forgets what lies behind an offset; it is asked for again."""
        del self._data[max(0, offset - self._start) :]
        self._asked, self.at_end, self.hole = 0.0, False, None

    def use(self, channel: Channel) -> None:
        """Asks by another connection from here on."""
        self._channel = channel
        self._asked = 0.0

    def close(self) -> None:
        """Nothing to do: the connection is the run's."""


def _seen_from_here(stream: str, control: str) -> str:
    """The address of a stream: its port at the host of the control endpoint, since a broker that listens on all
    interfaces names no host."""
    host, _, _ = control.removeprefix("tcp://").rpartition(":")
    _, _, port = stream.rpartition(":")
    return f"tcp://{host}:{port}" if stream.startswith("tcp://") else stream
