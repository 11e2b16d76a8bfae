"""The run itself as a place for results."""

import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from offloop.bus.errors import BrokerError, ConfigurationError, OffloopError
from offloop.bus.printing import say
from offloop.bus.protocol.frames import pack_map
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.publisher.actor import check_actor_name
from offloop.bus.publisher.publisher import Publisher
from offloop.bus.publisher.table_rows import TableRows
from offloop.bus.recording.derived import DerivedWriter, count_derived
from offloop.bus.recording.recording import Recording
from offloop.bus.runs.directory import RunInfo, is_over, read_run
from offloop.bus.types.actor import DERIVED, ActorName
from offloop.bus.types.event import TABLE, Event
from offloop.bus.types.timeouts import Timeouts
from offloop.bus.types.timestamp import TrainingTime
from offloop.consumers.api.logger import LoggerDestination, Row, RunContext, Table

_JOIN_SECONDS = 10.0
_SAVE_SECONDS = 5.0
_CONTEXT = pack_map({})
_Result: TypeAlias = tuple[Event, int, TrainingTime, dict[str, Any]]


class RunLogger(LoggerDestination):
    """Adds results to the run, at the steps that they belong to: metrics as ``NAME/METRIC``, and tables.

    Charts, the table of runs, stoppers, alerts and data frames show them beside the training's own. In a live run it is
    an actor of the role ``derived``, so its values are in the recording, in the order in which they came. After the end
    of the run, and in a replay, they are in a file beside the recording, ``derived-ATTEMPT-NAME.mcap``.

    A consumer with a name that is killed and restarted adds each result once.

    Args:
        name: The name before the metrics. A run has results of one name once."""

    def __init__(self, name: str = DERIVED) -> None:
        check_actor_name(name)
        self._name = name
        self._tables = TableRows(has_rate=False)
        self._publisher: Publisher | None = None
        self._writer: DerivedWriter | None = None
        self._context: RunContext | None = None
        self._committed: int | None = None
        self._count = self._skip = 0
        self._unrecorded: deque[_Result] = deque()

    def open(self, context: RunContext) -> None:
        if context.run_dir is None:
            raise ConfigurationError("logger run adds to a run in a folder of this machine: it excludes --stream")
        self._context = context
        self._publisher = None if context.command is None else self._join(context.run_dir, context.attempt)
        before = self._write_file() if self._publisher is None else self._publisher.published_before
        self._count = before if self._committed is None else self._committed
        self._skip = before - self._count
        if self._committed is None and before:
            self.close()
            raise ConfigurationError(
                f"run {context.run_name!r} has results of {self._name!r} already: choose another name, "
                "'-o run.name=NAME'"
            )

    def _join(self, run_dir: Path, attempt: int) -> Publisher | None:
        """Return an actor in the run; ``None`` if the attempt has ended."""
        deadline = time.monotonic() + _JOIN_SECONDS
        while run := _live_run(run_dir, attempt):
            try:
                publisher = Publisher(
                    run.name,
                    broker=run.control_endpoint,
                    events={Event.INIT, Event.ITERATION_CHECKPOINT},
                    actor=ActorName(self._name, DERIVED, is_exclusive=True),
                    timeouts=Timeouts(welcome=2.0),
                )
            except BrokerError:
                # The run ends now, or the broker has not noticed yet that this consumer's last process was killed.
                if time.monotonic() > deadline and not is_over(run_dir):
                    raise
                time.sleep(0.1)
            else:
                self.where: str = f"run {run.name}, as {self._name}/..."
                return publisher
        return None

    def _write_file(self) -> int:
        """Continue in a file; return the number of results that the run has."""
        context = self._context
        assert context is not None  # it is open
        assert context.run_dir is not None
        recording = Recording(context.run_dir, context.attempt)
        about = recording.run_name, context.attempt, context.run_id, self._name
        self._writer = DerivedWriter(context.run_dir, *about)
        self.where = str(self._writer.path)
        return count_derived(recording, self._name) + self._writer.count

    def log_rows(self, rows: Sequence[Row], state: Snapshot) -> None:
        for row in rows:
            values = {f"{self._name}/{name}": value for name, value in row.metrics.items() if _is_number(value)}
            if values:
                self._put(Event.ITERATION_CHECKPOINT, {"logged": [[row.step, values]]}, state)

    def log_table(self, entry: Table, state: Snapshot) -> None:
        event = Event(f"{TABLE}{_as_name(entry.name)}")
        for fields in self._tables.pack(entry.name, entry.rows, entry.columns, entry.step, 0):
            self._put(event, fields, state)

    def _put(self, event: Event, fields: dict[str, Any], state: Snapshot) -> None:
        self._count += 1
        if self._skip:
            self._skip -= 1
            return
        result = event, state.time_ns, state.timestamp.values, fields
        if self._publisher is None:
            self._put_beside(result)
            return
        self._unrecorded.append(result)
        while not self._publisher.closed and self._publisher.room_for_rows() <= 0:
            self._publisher.wait()
        self._publisher.send(event, state.timestamp.values, None, fields, _CONTEXT)
        self._publisher.poll()
        self._note_recorded(self._publisher)

    def _note_recorded(self, publisher: Publisher) -> None:
        """Forget what is recorded. If the run has ended, add the rest beside it."""
        if not publisher.closed:
            for _ in range(len(self._unrecorded) - publisher.statistics().lag):
                self._unrecorded.popleft()
            return
        self._publisher, deadline = None, time.monotonic() + _SAVE_SECONDS
        while _live_run(publisher.run_dir, publisher.attempt) and time.monotonic() < deadline:
            time.sleep(0.05)  # the broker completes the recording
        missing = self._count - self._write_file()
        rest = list(self._unrecorded)[-missing:] if missing else []
        self._unrecorded.clear()
        for result in rest:
            self._put_beside(result)
        if rest:
            say(f"the run has ended: {len(rest)} results of {self._name} are in {self.where}", err=True)

    def _put_beside(self, result: _Result) -> None:
        assert self._writer is not None  # it is open
        self._writer.put(*result)

    def state_dict(self) -> dict[str, Any]:
        self._save()
        return {"count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._committed = state["count"]

    def flush(self) -> None:
        if self._publisher is not None:
            self._publisher.poll()

    def _save(self) -> None:
        publisher, deadline = self._publisher, time.monotonic() + _SAVE_SECONDS
        while publisher is not None and not publisher.closed and publisher.statistics().lag:
            if time.monotonic() > deadline:
                raise OffloopError(
                    f"the broker of run {publisher.run_name} does not record the results of {self._name}"
                )
            publisher.wait()
        if publisher is not None:
            self._note_recorded(publisher)
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        if (publisher := self._publisher) is not None:
            publisher.close()
            # The broker of a run that continues may record the rest later.
            if publisher.statistics().lag and (publisher.training_ended or is_over(publisher.run_dir)):
                self._note_recorded(publisher)
        self._publisher = None
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


def _live_run(run_dir: Path, attempt: int) -> RunInfo | None:
    run = read_run(run_dir)
    return run if run.live and run.last.number == attempt else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _as_name(text: str) -> str:
    name = "".join(one if one.isascii() and (one.isalnum() or one in "_.-") else "_" for one in text)[:100]
    return name if name[:1].isalpha() or name[:1] == "_" else f"_{name}"[:100]
