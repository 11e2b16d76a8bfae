"""Where a subscriber finds a run: in its directory on this machine, or through a broker on another one."""

import contextlib
import enum
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import zmq

from bus.errors import BrokerError, RunDirectoryError, RunNotFoundError
from bus.files import open_file
from bus.net.curve import ClientSecurity
from bus.net.requests import CONNECT_SECONDS, _keys_hint, _send, exchange, next_answer
from bus.net.sockets import connected
from bus.protocol.frames import check_run_name
from bus.protocol.order import StreamOrder
from bus.protocol.snapshot import Snapshot
from bus.recording.reader import JournalReader
from bus.runs.directory import LOCK_FILE, RunInfo, read_run
from bus.runs.lock import is_held

__all__ = ["LocalRun", "Place", "RemoteRun", "RunSource", "Standing"]

LOOK_SECONDS = 0.5
RETURN_SECONDS = 10.0
ANSWER_SECONDS = 2.0
PATIENCE_SECONDS = 60.0
SILENCE_SECONDS = 5.0
FETCH_SECONDS = 0.05


class Standing(enum.Enum):
    """How an attempt stands."""

    LIVE = "live"
    AWAY = "away"
    """No broker serves it, and another one may."""
    OVER = "over"
    UNREACHABLE = "unreachable"
    """Its broker has not answered for a long time."""


class Place(NamedTuple):
    """Where a live run is served."""

    door: str
    stream: str


class RunSource(Protocol):
    """One attempt of a run, wherever it is."""

    run_name: str
    run_id: str | None
    attempt: int
    run_dir: Path | None
    """``None`` where the directory cannot be seen."""
    recording: Path | None
    reader: JournalReader
    place: Place | None
    """Where it is served, when last looked at."""

    def look(self) -> Standing:
        """How the attempt stands. Does not wait: it may be what was so half a second ago."""

    @property
    def pending(self) -> bool:
        """Whether a part of the recording that was asked for is on its way."""

    def refresh(self) -> None:
        """Says that the recording has grown, or may have."""

    def wait(self, seconds: float) -> None:
        """Waits so long, or until something of the recording has come."""

    def close(self) -> None:
        """Ends it."""


class LocalRun:
    """An attempt whose directory is on this machine."""

    pending = False

    def __init__(self, info: RunInfo) -> None:
        self.run_name = info.name
        self.run_id = info.id
        self.attempt = info.last.number
        self.run_dir: Path | None = info.path
        self._path = info.path
        self.recording: Path | None = info.recording
        self.reader = JournalReader(info.recording)
        self.place: Place | None = None
        self._lost_since: float | None = None
        self._standing = self._found(info)
        self._lock = -1
        with contextlib.suppress(OSError):
            self._lock = open_file(info.path / LOCK_FILE)
        self._look_at = time.monotonic() + LOOK_SECONDS

    def look(self) -> Standing:
        """How the attempt stands, by its directory."""
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            try:
                self._standing = self._found(read_run(self._path))
            except RunDirectoryError:
                # Deleted under the broker, which goes on with the live stream: its lock is all that still tells of it.
                alive = self._standing is Standing.LIVE and is_held(self._lock)
                self._standing = Standing.LIVE if alive else Standing.OVER
        return self._standing

    def _found(self, run: RunInfo) -> Standing:
        if run.last.number != self.attempt:
            return Standing.OVER
        if run.live and run.door is not None and run.stream is not None:
            self.place = Place(run.door, run.stream)
            self._lost_since = None
            return Standing.LIVE
        if run.away or run.last.status == "running":
            return Standing.AWAY
        if run.last.status == "lost" and run.last.is_published_elsewhere:
            # Whether its trainer is still there cannot be seen from here; it has a moment to find a broker again.
            now = time.monotonic()
            self._lost_since = self._lost_since or now
            return Standing.AWAY if now - self._lost_since < RETURN_SECONDS else Standing.OVER
        return Standing.OVER

    def refresh(self) -> None:
        """Nothing to do: the file shows what it has."""

    def wait(self, seconds: float) -> None:
        """Waits so long."""
        time.sleep(seconds)

    def close(self) -> None:
        """Closes the recording."""
        self.reader.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


class RemoteRun:
    """An attempt that is reached through its broker alone, at ``address``: the recording comes in ranges.

    Raises:
        RunNotFoundError: the broker knows no such run.
        BrokerError: nobody answers.
    """

    def __init__(self, address: str, run: str | None, security: ClientSecurity | None = None) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.run_dir: Path | None = None
        self.recording: Path | None = None
        self.place: Place | None = None
        self._door_address = address
        try:
            self._door = connected(self._context, zmq.DEALER, address, security)
            told = self._first_answer(address, run, security)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self.run_name = check_run_name(told["run"])
        self.run_id: str | None = told["id"] if isinstance(told.get("id"), str) else None
        self.attempt: int = told["attempt"]
        self._file = _RemoteFile(self._door, self.run_name, self.attempt)
        self.reader = JournalReader(self._file, f"the recording of run {self.run_name}")
        self._heard = self._connected = time.monotonic()
        self._security = security
        self._ask_at = 0.0
        self._lost_since: float | None = None
        self._standing = Standing.AWAY
        self._note(told)

    def _first_answer(self, address: str, run: str | None, security: ClientSecurity | None) -> dict[str, Any]:
        answer = exchange(self._door, "runs", {"run": run}, CONNECT_SECONDS)
        if answer is None:
            raise BrokerError(f"no broker answers at {address}: it is not there, {_keys_hint(security)}")
        runs = _runs_told(answer)
        if not runs:
            what = "has no runs yet" if run is None else f"has no run {run!r}"
            raise RunNotFoundError(f"the broker at {address} {what}: 'bus runs --broker {address}' lists them")
        live = [told for told in runs if told.get("live")]
        chosen: dict[str, Any] = (live or runs)[0]
        return chosen

    def look(self) -> Standing:
        """How the attempt stands, by what the broker last said of it."""
        now = time.monotonic()
        if now >= self._ask_at:
            self._ask_at = now + LOOK_SECONDS
            _send(self._door, "runs", {"run": self.run_name})
        self._take_answers()
        if now - self._heard > PATIENCE_SECONDS:
            return Standing.UNREACHABLE
        if now - max(self._heard, self._connected) > SILENCE_SECONDS:
            self._connect_anew(now)
        return self._standing

    def _connect_anew(self, now: float) -> None:
        """The connection may be dead, and nobody closed it."""
        self._connected = now
        self._door.close(linger=0)
        self._door = connected(self._context, zmq.DEALER, self._door_address, self._security)
        self._file.use(self._door)

    def _take_answers(self) -> None:
        while (answer := next_answer(self._door)) is not None:
            self._heard = time.monotonic()
            if answer.kind == "data":
                self._file.take(answer.content)
            elif answer.kind == "refused":
                # Nothing more is to be had; what there is has been read.
                self._file.at_end = True
                self._standing = Standing.OVER
            elif answer.kind == "runs":
                for told in _runs_told(answer.content):
                    if told["run"] == self.run_name:
                        self._note(told)

    def _note(self, told: dict[str, Any]) -> None:
        now = time.monotonic()
        if told.get("attempt") != self.attempt:
            self._standing = Standing.OVER
        elif told.get("live"):
            self._lost_since = None
            self.place = Place(self._door_address, _seen_from_here(str(told.get("stream")), self._door_address))
            self._standing = Standing.LIVE
        elif told.get("status") in ("live", "paused"):
            self._lost_since = None
            self._standing = Standing.AWAY
        elif told.get("status") == "lost":
            # Its trainer may be on yet another machine, and about to find the broker again.
            self._lost_since = self._lost_since or now
            self._standing = Standing.AWAY if now - self._lost_since < RETURN_SECONDS else Standing.OVER
        else:
            self._standing = Standing.OVER

    def recorded(self) -> Iterator[Snapshot]:
        """The events that are recorded at the moment.

        Raises:
            BrokerError: the broker does not answer any more.
        """
        order = StreamOrder(self.run_name, self.attempt, None)
        while True:
            for records in self.reader.read():
                for record in records:
                    snapshot = order.from_record(record.topic, record.body)
                    if isinstance(snapshot, Snapshot):
                        yield snapshot
            if not self.pending:
                return
            if self.look() is Standing.UNREACHABLE:
                raise BrokerError(f"the broker at {self._door_address} does not answer any more")
            self.wait(FETCH_SECONDS)

    @property
    def pending(self) -> bool:
        """Whether a range is on its way."""
        self._take_answers()
        # Behind a footer nothing is asked for, until :meth:`refresh`.
        return not (self._file.at_end or self.reader.finished)

    def refresh(self) -> None:
        """Asks for what came after the reader's position, where another broker may have cut a footer off."""
        self._file.forget(self.reader.position)

    def wait(self, seconds: float) -> None:
        """Waits so long, or until an answer has come."""
        self._door.poll(int(seconds * 1000))

    def close(self) -> None:
        """Ends the connection."""
        self._context.destroy(linger=0)


def _runs_told(content: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs in an answer, those that are told as the protocol has it."""
    runs = content.get("runs")
    return [
        told
        for told in (runs if isinstance(runs, list) else ())
        if isinstance(told, dict) and isinstance(told.get("run"), str) and type(told.get("attempt")) is int
    ]


class _RemoteFile:
    """A recording as :class:`~bus.recording.reader.JournalReader` wants it, from ranges that are asked for as it goes
    on."""

    def __init__(self, door: "zmq.Socket[bytes]", run: str, attempt: int) -> None:
        self._door = door
        self._which = {"run": run, "attempt": attempt}
        self._start = 0
        self._data = bytearray()
        self._asked = 0.0
        self.at_end = False
        """Whether everything that the broker has is here."""

    def read_at(self, offset: int, size: int) -> bytes:
        """What is here of a range; the rest is asked for."""
        behind = offset - self._start
        if not 0 <= behind <= len(self._data):
            self._start, self._data, behind = offset, bytearray(), 0
            self._asked, self.at_end = 0.0, False
        elif behind > MAX_BEHIND:
            del self._data[:behind]
            self._start, behind = offset, 0
        if behind + size > len(self._data):
            self._ask()
        return bytes(self._data[behind : behind + size])

    def _ask(self) -> None:
        now = time.monotonic()
        if not self.at_end and now - self._asked > ANSWER_SECONDS:
            self._asked = now
            _send(self._door, "fetch", {**self._which, "offset": self._start + len(self._data)})

    def take(self, content: dict[str, Any]) -> None:
        """Takes an answer, if it is the one that is waited for."""
        data = content.get("data")
        if content.get("offset") != self._start + len(self._data) or not isinstance(data, bytes):
            return
        self._asked = 0.0
        self._data += data
        self.at_end = not data

    def forget(self, offset: int) -> None:
        """Forgets what lies behind an offset; it is asked for again."""
        del self._data[max(0, offset - self._start) :]
        self._asked, self.at_end = 0.0, False

    def use(self, door: "zmq.Socket[bytes]") -> None:
        """Asks by another connection from here on."""
        self._door = door
        self._asked = 0.0

    def close(self) -> None:
        """Nothing to do: the connection is the run's."""


MAX_BEHIND = 32 << 20


def _seen_from_here(stream: str, door: str) -> str:
    """A broker that listens everywhere names no machine: it is where its door is, with a port of its own."""
    host, _, _ = door.removeprefix("tcp://").rpartition(":")
    _, _, port = stream.rpartition(":")
    return f"tcp://{host}:{port}" if stream.startswith("tcp://") else stream
