"""A spool between a consumer and a slow or unreachable destination: nothing waits for it, and nothing is lost."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from offloop.bus.errors import ConfigurationError
from offloop.bus.printing import say
from offloop.bus.protocol.snapshot import Snapshot
from offloop.consumers.api.logger import (
    Entry,
    Histogram,
    Images,
    LoggerDestination,
    Row,
    RunContext,
    Table,
    Text,
    Upload,
)
from offloop.consumers.delivery.commit import pack_snapshot, unpack_snapshot
from offloop.consumers.delivery.fanout import RAISED
from offloop.consumers.delivery.spool_file import Offset, SpoolDirectory

PAUSES = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)  # seconds between two attempts to send; the last one is repeated

_PATIENCE_SECONDS = 1.0
_DIRECTORY = "consumers"
_ROWS = "rows"
_HYPERPARAMETERS = "hyperparameters"
_KINDS: dict[str, type[Entry]] = {kind.__name__: kind for kind in (Images, Table, Histogram, Text, Upload)}
_LARGE = ("Images", "Upload")
_MOST_AT_ONCE = 200


def wrap_in_spool(destination: LoggerDestination) -> LoggerDestination:
    return Spool(destination) if destination.background and not isinstance(destination, Spool) else destination


class Spool(LoggerDestination):
    """Writes entries to a file in the run's directory, from which a thread sends them to ``destination``.

    After an error the thread closes the destination, pauses, opens it again and continues after the last entry that
    it took; pauses grow from half a second to a minute. The position is kept beside the records, so that a resuming
    process sends nothing twice. Only a :class:`~offloop.bus.errors.ConfigurationError` is final: from ``open`` it
    ends the sending, from a later method it leaves out one entry, with a message.

    For a consumer that keeps its progress, entries are sent after :meth:`on_commit`, because uncommitted events may
    come again. Otherwise everything is sent at once.

    :meth:`close` waits until everything is sent, and gives up when nothing could be sent for
    ``destination.drain_seconds``, or for ``destination.finish_seconds`` while an image or a file is on its way.
    Then :attr:`problem` says what the destination lacks. ``pause`` waits for a number of seconds, in tests."""

    background = True

    def __init__(self, destination: LoggerDestination, pause: Callable[[float], object] | None = None) -> None:
        self._destination = destination
        self._pause = pause or self._wait
        self._patient_at: Offset | None = None
        self._patient_until = 0.0
        self._closing = threading.Event()
        self._abandoned = threading.Event()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._directory: SpoolDirectory | None = None
        self._committed: tuple[Path, Offset] | None = None
        self._context: RunContext | None = None
        self._final = Offset()
        self._delivered = Offset()
        self._holds = False
        self._is_new_position = False
        self._is_over = False
        self._trouble: str | None = None
        self._left_out = 0
        self._fatal: ConfigurationError | None = None
        self._frame: tuple[Snapshot, bytes] | None = None

    def check(self) -> None:
        self._destination.check()

    def open(self, context: RunContext) -> None:
        self._context = context
        if self._committed is not None:
            self._directory = SpoolDirectory.go_on(*self._committed)
        else:
            parent = None if context.run_dir is None else context.run_dir / _DIRECTORY
            self._directory = SpoolDirectory.create(parent, f"{self.shown_as}-{context.attempt}")
        self._final = self._directory.end
        self._delivered = self._directory.position.offset
        self._thread = threading.Thread(target=self._send, name=f"send to {self.shown_as}", daemon=True)
        self._thread.start()

    def log_rows(self, rows: Sequence[Row], state: Snapshot) -> None:
        self._append(_ROWS, rows, state)

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any], state: Snapshot) -> None:
        self._append(_HYPERPARAMETERS, hyperparameters, state)

    def log_entry(self, entry: Entry, state: Snapshot) -> None:
        with self._changed:
            if isinstance(entry, Upload):
                entry = entry._replace(file_path=self._opened.keep_file(entry.file_path))
            self._append(type(entry).__name__, entry, state)

    def state_dict(self) -> dict[str, Any]:
        """Place and end of the records. From the first call on, uncommitted entries are held back."""
        directory = self._opened
        with self._changed:
            directory.sync()
            self._holds = self._is_new_position = True
            return {"path": str(directory.path), "bytes": directory.end.bytes, "records": directory.end.records}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._committed = (Path(state["path"]), Offset(int(state["bytes"]), int(state["records"])))

    def on_commit(self) -> None:
        with self._changed:
            self._is_over = not self._is_new_position
            self._is_new_position = False
            self._release()

    def on_abandon(self) -> None:
        with self._changed:
            self._release()

    def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        with self._changed:
            self._patient_at = None
            self._closing.set()
            self._changed.notify_all()
        try:
            self._wait_for(thread)
        finally:
            self._end()

    @property
    def where(self) -> str | None:  # type: ignore[override]
        return self._destination.where

    @property
    def shown_as(self) -> str:
        return getattr(self._destination, "name", "") or type(self._destination).__name__

    @property
    def _opened(self) -> SpoolDirectory:
        if self._directory is None:
            raise ConfigurationError(f"{self.shown_as} received values before it was opened: call open() first")
        return self._directory

    def _append(self, kind: str, content: Any, state: Snapshot) -> None:
        if self._fatal is not None:
            self.close()
            raise self._fatal
        with self._changed:
            self._opened.append([kind, content, self._packed_state(state)])
            if not self._holds:
                self._release()

    def _release(self) -> None:
        self._final = self._opened.end
        self._changed.notify_all()

    def _packed_state(self, state: Snapshot) -> bytes:
        # Several entries of one event follow each other.
        if self._frame is None or self._frame[0] is not state:
            self._frame = (state, pack_snapshot(state.without(state.on_demand)))
        return self._frame[1]

    def _send(self) -> None:
        """Attempt to send until everything is sent, or until a final error."""
        failures = 0
        while not self._abandoned.is_set():
            before = self._delivered
            try:
                self._open_and_deliver()
                return
            except ConfigurationError as error:
                self._fatal = error
                return
            except RAISED as error:  # a destination may raise anything, and is tried again
                with contextlib.suppress(*RAISED):
                    self._destination.close()
                self._patient_until = 0.0
                failures = failures + 1 if self._delivered == before else 1
                self._say_trouble(error)
            if self._closing.is_set() and not self._missing:
                return
            self._pause(PAUSES[min(failures, len(PAUSES)) - 1])

    def _wait(self, seconds: float) -> None:
        if self._closing.is_set():
            self._abandoned.wait(PAUSES[0])
        else:
            self._closing.wait(seconds)

    def _wait_for(self, thread: threading.Thread) -> None:
        longest = min(self._destination.drain_seconds, threading.TIMEOUT_MAX)
        if longest > _PATIENCE_SECONDS:
            thread.join(_PATIENCE_SECONDS)
            with self._changed:
                missing = self._missing
            if thread.is_alive() and missing:
                leave = "" if signal.getsignal(signal.SIGINT) is signal.SIG_IGN else "; Ctrl-C leaves them"
                self._say(f"sending {missing} more entries{leave}")
        while thread.is_alive():
            before = self._delivered
            thread.join(longest)
            # Patience ends after a delivery is noted, so check it first.
            if time.monotonic() >= self._patient_until and self._delivered == before:
                break

    def _open_and_deliver(self) -> None:
        directory, destination = self._opened, self._destination
        assert self._context is not None  # set by open()
        offset = directory.position.offset
        if directory.position.destination:
            destination.load_state_dict(directory.position.destination)
        destination.open(self._context)
        self._note_sent(offset, ())
        while (found := self._next(offset)) is not None:
            entries, after = found
            if any(kind in _LARGE for kind, *_ in entries):
                self._be_patient(offset)
            offset = after
            self._deliver(entries)
            if destination.acknowledges:
                self._note_sent(offset, entries)
            self._delivered = offset
            self._patient_until = 0.0
            self._say_recovery()
        self._be_patient(offset)
        destination.close()
        self._note_sent(offset, ())

    def _be_patient(self, offset: Offset) -> None:
        """Give the destination time for a slow entry, once: after a failure it gets no further time."""
        if self._patient_at is None or offset > self._patient_at:
            self._patient_at = offset
            self._patient_until = time.monotonic() + self._destination.finish_seconds

    def _next(self, offset: Offset) -> tuple[list[Any], Offset] | None:
        """Return the next entries to send together, and the offset after them; ``None`` when it is time to close."""
        directory = self._opened
        with self._changed:
            while offset.records >= self._final.records:
                if self._closing.is_set():
                    return None
                self._changed.wait()
            final = self._final
        entries: list[Any] = []
        while offset.records < final.records and len(entries) < _MOST_AT_ONCE:
            entry, after = directory.read(offset)
            if entries and not entry[0] == entries[0][0] == _ROWS:
                break
            if offset.records >= directory.position.sent:
                entries.append(entry)
            offset = after
        return entries, offset

    def _deliver(self, entries: Sequence[Any]) -> None:
        if len(entries) > 1:
            # Servers accept the rows of many events in one request.
            rows = [Row(*row) for _, content, _ in entries for row in content]
            with contextlib.suppress(ConfigurationError):
                self._destination.log_rows(rows, unpack_snapshot(entries[-1][2]))
                return
        for kind, content, frame in entries:
            try:
                self._deliver_one(kind, content, unpack_snapshot(frame))
            except ConfigurationError as error:
                self._left_out += 1
                if self._left_out == 1:
                    self._say(f"refused an entry, which is left out, as further refused ones are: {error}")

    def _deliver_one(self, kind: str, content: Any, state: Snapshot) -> None:
        destination = self._destination
        if kind == _ROWS:
            destination.log_rows([Row(*row) for row in content], state)
        elif kind == _HYPERPARAMETERS:
            destination.log_hyperparameters(content, state)
        else:
            entry = _KINDS[kind](*content)
            if isinstance(entry, Upload):
                entry = entry._replace(file_path=Path(entry.file_path))
            destination.log_entry(entry, state)

    def _note_sent(self, offset: Offset, entries: Sequence[Any]) -> None:
        directory = self._opened
        with self._changed:
            directory.set_sent(offset, self._destination.state_dict())
            for kind, content, _ in entries:
                if kind == "Upload":
                    Path(content[1]).unlink(missing_ok=True)

    @property
    def _missing(self) -> int:
        position = self._opened.position
        return max(0, self._final.records - max(position.offset.records, position.sent))

    def _end(self) -> None:
        """Report what was not sent, and keep or delete the files."""
        directory = self._opened
        with self._changed:
            self._abandoned.set()
            missing, given = self._missing, self._final.records
            if missing or self._fatal:
                self._say(f"{missing} of {given} entries did not arrive{self._reason}; {self._next_step}")
            if missing:
                self.problem: str = f"lacks {missing} of {given} entries"
            elif self._fatal or self._left_out:
                self.problem = "failed" if self._fatal else "lacks entries that it refused"
            if not self._holds or (self._is_over and missing):
                directory.remove()
                return
            if not missing and self._final == directory.end:
                directory.forget_sent()
            directory.close()

    @property
    def _reason(self) -> str:
        trouble = self._fatal or self._trouble
        return "" if trouble is None else f", {trouble}"

    @property
    def _next_step(self) -> str:
        assert self._context is not None  # set by open()
        if self._holds and not self._is_over:
            return "the same command sends them when it resumes"
        if self._context.run_dir is None:
            return "they are lost"
        return f"'consumer --replay {self._context.run_dir} --log {self.shown_as}' sends it later"

    def _say_trouble(self, error: BaseException) -> None:
        is_new, self._trouble = self._trouble is None, f"{type(error).__name__}: {error}".splitlines()[0]
        if is_new and not self._abandoned.is_set():
            self._say(f"accepts nothing, {self._trouble}; trying again, and keeping everything until then")

    def _say_recovery(self) -> None:
        if self._trouble is not None:
            self._trouble = None
            self._say("accepts entries again")

    def _say(self, message: str) -> None:
        # A closed terminal must not end the sending.
        with contextlib.suppress(OSError, ValueError):
            say(f"logger {self.shown_as}: {message}", err=True)
