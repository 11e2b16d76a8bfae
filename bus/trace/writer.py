"""A run as a timeline: Chrome trace JSON, which Perfetto opens."""

import gzip
import io
import math
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, TextIO

from offloop.bus.errors import ClosedError, ConfigurationError
from offloop.bus.protocol.order import Ending
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.trace.format import TraceEvents
from offloop.bus.trace.phases import PHASES, BatchPhases, read_phases
from offloop.bus.types.commands import Outcome
from offloop.bus.types.event import Event

_EVENTS, _EPOCHS, _BATCHES, _EVALUATION, _PREDICTION = "events", "epochs", "batches", "evaluation", "prediction"
_TRACKS = (_EVENTS, _EPOCHS, _BATCHES, *PHASES, _EVALUATION, _PREDICTION)


class WritesText(Protocol):
    """The target of a trace, such as an open text file."""

    def write(self, text: str, /) -> object:
        """Appends a text."""


@dataclass
class _Rank:
    """The progress of a rank; times are nanoseconds from the beginning of the trace."""

    now: int
    """Of the last event."""
    resumed: int
    """When the batch at hand began."""


@dataclass
class _Counted:
    """The last values of the counters, all of the first rank."""

    batch: int | None = None
    sample: int = 0
    token: int = 0
    busy_ns: int = 0
    """Duration of the batches since then."""
    rates: dict[str, Any] = field(default_factory=dict)
    loss_is_finite: bool = True


class TraceWriter:
    """Writes the events of a run, as they come, as a trace: see :mod:`offloop.bus.trace.format`.

    Each rank is a process, whose number is the rank, and each phase is a track of it. Epochs, batches, phases and
    evaluations are spans; loss, learning rates and throughput are counters of the first rank; commands, checkpoints,
    ends of epochs and the run's own beginning and end are instants on its track ``events``. Times are microseconds from
    the first event, by each host's own clock; when that was, the instant of the run's beginning shows.

    Whatever was written when a process was killed can be opened. What is held in memory does not grow with the run.

    Args:
        target: the path of a file, which is created or replaced, compressed if its name ends in ``.gz``; or something
            with ``write(text)``, which is given whole events and stays open.

    Raises:
        ConfigurationError: the file cannot be created.
    """

    def __init__(self, target: "str | os.PathLike[str] | WritesText") -> None:
        self._own_file: TextIO | None = None
        if isinstance(target, str | os.PathLike):
            target = self._own_file = _create(Path(target))
        self._target: WritesText = target
        self._closed = False
        self._trace = TraceEvents(_TRACKS)
        self._base: int | None = None
        self._ranks: dict[int, _Rank] = {}
        self._counted = _Counted()
        # Those that the first rank has not come to yet.
        self._commands: list[Outcome] = []

    def see(self, state: Snapshot) -> None:
        """Draws the next event, of any rank.

        Raises:
            ClosedError: after :meth:`close`.
        """
        self._check_open()
        now = self._at(state.time_ns)
        rank = self._ranks.get(state.rank)
        if rank is None:
            rank = self._ranks[state.rank] = _Rank(now, now)
            self._name_rank(state)
        rank.now = max(rank.now, now)
        if self._commands and state.rank == 0:
            self._draw_commands(state, rank.now)
        draw = _DRAWN.get(state.event)
        if draw is not None:
            draw(self, state, rank)
        self._flush()

    def command(self, outcome: Outcome) -> None:
        """Draws the outcome of a command, before or after the events around it: it is drawn when the first rank has
        come to the time at which it was answered, or, where that is not known, to the end of its batch.

        Raises:
            ClosedError: after :meth:`close`.
        """
        self._check_open()
        self._commands.append(outcome)

    def close(self, ending: Ending | None = None) -> None:
        """Ends the file, once; ``ending`` is how the run ended, ``None`` while it is live."""
        if self._closed:
            return
        for outcome in self._commands if 0 in self._ranks else ():
            now = self._ranks[0].now
            self._draw_command(outcome, now if outcome.time_ns is None else self._at(outcome.time_ns))
        if ending is not None and self._ranks:
            last = max(rank.now for rank in self._ranks.values())
            self._trace.end_all(last)
            why = {name: text for name in ("error", "reason") if (text := getattr(ending, name))}
            self._trace.instant(min(self._ranks), _EVENTS, f"run {ending.status}", last, why or None)
        self._closed = True
        try:
            self._target.write(self._trace.take_end())
        finally:
            if self._own_file is not None:
                self._own_file.close()

    def _fit_start(self, state: Snapshot, rank: _Rank) -> None:
        rank.resumed = rank.now
        values = state.timestamp.values
        if values.batch_in_epoch:
            # An epoch that is continued: its beginning is in another attempt.
            args = {"resumed at batch": values.batch}
            self._trace.begin(state.rank, _EPOCHS, f"epoch {values.epoch + 1}", rank.now, args)

    def _epoch_start(self, state: Snapshot, rank: _Rank) -> None:
        self._trace.begin(state.rank, _EPOCHS, f"epoch {state.timestamp.values.epoch + 1}", rank.now)

    def _epoch_end(self, state: Snapshot, rank: _Rank) -> None:
        self._trace.end(state.rank, _EPOCHS, rank.now)
        if state.rank == 0:
            self._trace.instant(0, _EVENTS, f"epoch {state.timestamp.values.epoch} ends", rank.now, _place(state))

    def _checkpoint(self, state: Snapshot, rank: _Rank) -> None:
        # BATCH_CHECKPOINT may come with every batch; where a consumer requested the weights it is a checkpoint.
        if state.rank == 0 and (state.event is not Event.BATCH_CHECKPOINT or state.on_demand):
            self._trace.instant(0, _EVENTS, state.event.value, rank.now, _place(state))

    def _batch_end(self, state: Snapshot, rank: _Rank) -> None:
        batch, began = state.timestamp.values.batch, rank.resumed
        rank.resumed = rank.now
        if state.rank == 0:
            self._counted.busy_ns += rank.now - began
            self._draw_loss(state, rank.now)
        self._trace.span(state.rank, _BATCHES, f"batch {batch}", began, rank.now)
        phases = read_phases(state.fields.get("phases"))
        if phases is not None:
            self._draw_phases(state.rank, batch, phases)
        if state.rank == 0:
            self._draw_counters(state, rank.now)

    def _fit_end(self, state: Snapshot, rank: _Rank) -> None:
        # Left in its middle by a training that stops there.
        self._trace.end(state.rank, _EPOCHS, rank.now)

    def _evaluation_start(self, state: Snapshot, rank: _Rank) -> None:
        self._trace.begin(state.rank, _EVALUATION, "evaluation", rank.now, _place(state))

    def _evaluator_start(self, state: Snapshot, rank: _Rank) -> None:
        self._trace.begin(state.rank, _EVALUATION, str(state.dataloader_label), rank.now)

    def _evaluator_end(self, state: Snapshot, rank: _Rank) -> None:
        metrics = state.fields.get("eval_metrics")
        own = metrics.get(state.dataloader_label) if isinstance(metrics, dict) else None
        self._trace.end(state.rank, _EVALUATION, rank.now, own if isinstance(own, dict) else None)

    def _evaluation_end(self, state: Snapshot, rank: _Rank) -> None:
        self._trace.end(state.rank, _EVALUATION, rank.now)
        rank.resumed = rank.now

    def _prediction_start(self, state: Snapshot, rank: _Rank) -> None:
        self._trace.begin(state.rank, _PREDICTION, "prediction", rank.now)

    def _prediction_end(self, state: Snapshot, rank: _Rank) -> None:
        self._trace.end(state.rank, _PREDICTION, rank.now)

    def _draw_phases(self, number: int, batch: int, phases: BatchPhases) -> None:
        began = self._at(phases.began_ns)
        microbatches = Counter(span.phase for span in phases.spans)
        drawn: Counter[str] = Counter()
        for phase, start, duration in phases.spans:
            drawn[phase] += 1
            args: dict[str, Any] = {"batch": batch}
            if microbatches[phase] > 1:
                args["microbatch"] = drawn[phase]
            if phases.on_device and phase != "publishing":
                args["measured"] = "on the GPU"
            self._trace.span(number, phase, phase, began + start, began + start + duration, args)

    def _draw_counters(self, state: Snapshot, now: int) -> None:
        counted, values = self._counted, state.timestamp.values
        self._trace.counter(0, "training", {"loss": state.loss}, now)
        # A loop of your own may send anything under that name.
        lr = state.fields.get("lr")
        rates = {
            f"{name}/group{group}": rate
            for name, groups in (lr.items() if isinstance(lr, dict) else ())
            if isinstance(groups, list)
            for group, rate in enumerate(groups)
        }
        if rates != counted.rates:
            counted.rates = rates
            self._trace.counter(0, "learning rate", rates, now)
        if counted.batch is not None and counted.busy_ns > 0:
            before = {"batches": counted.batch, "samples": counted.sample, "tokens": counted.token}
            for (name, count), value in zip(before.items(), values[2:5], strict=True):
                if value:
                    self._trace.counter(0, name, {"per second": (value - count) / (counted.busy_ns / 1e9)}, now)
        counted.batch, counted.sample, counted.token = values[2:5]
        counted.busy_ns = 0

    def _draw_loss(self, state: Snapshot, now: int) -> None:
        loss = state.loss
        if not isinstance(loss, float | int):
            return
        is_finite = math.isfinite(loss)
        if is_finite != self._counted.loss_is_finite:
            self._counted.loss_is_finite = is_finite
            self._trace.instant(0, _EVENTS, f"the loss is {'finite again' if is_finite else loss}", now, _place(state))

    def _draw_commands(self, state: Snapshot, now: int) -> None:
        waiting, self._commands = self._commands, []
        for outcome in waiting:
            if outcome.time_ns is not None:
                has_come, at = outcome.time_ns <= state.time_ns, self._at(outcome.time_ns)
            else:
                has_come, at = state.timestamp.values.batch >= (outcome.batch or 0), now
            if has_come:
                self._draw_command(outcome, at)
            else:
                self._commands.append(outcome)

    def _draw_command(self, outcome: Outcome, at: int) -> None:
        args = {"batch": outcome.batch, "event": outcome.event}
        if outcome.error is None:
            self._trace.instant(0, _EVENTS, f"command {outcome.command}", at, args)
        else:
            refused = {**args, "error": outcome.error}
            self._trace.instant(0, _EVENTS, f"command {outcome.command} refused", at, refused)

    def _name_rank(self, state: Snapshot) -> None:
        number, system = state.rank, state.fields.get("system")
        host = system.get("host") if isinstance(system, dict) else None
        name = f"rank {number} ({host})" if host else f"rank {number}"
        if number:
            self._trace.process(number, name)
            return
        base = self._base or 0
        began = datetime.fromtimestamp(base // 10**9, UTC).isoformat()
        self._trace.process(number, name, f"began {began}")
        args = {"run": state.run_name, "attempt": state.attempt, "began": began, "began_ns": str(base)}
        self._trace.instant(number, _EVENTS, f"run {state.run_name}, attempt {state.attempt}", 0, args)

    def _at(self, time_ns: int) -> int:
        if self._base is None:
            self._base = time_ns
        return max(0, time_ns - self._base)

    def _flush(self) -> None:
        text = self._trace.take()
        if text:
            self._target.write(text)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the trace is closed: make another TraceWriter")


_DRAWN: dict[Event, Callable[[TraceWriter, Snapshot, _Rank], None]] = {
    Event.FIT_START: TraceWriter._fit_start,
    Event.EPOCH_START: TraceWriter._epoch_start,
    Event.BATCH_END: TraceWriter._batch_end,
    Event.BATCH_CHECKPOINT: TraceWriter._checkpoint,
    Event.EPOCH_END: TraceWriter._epoch_end,
    Event.EPOCH_CHECKPOINT: TraceWriter._checkpoint,
    Event.ITERATION_CHECKPOINT: TraceWriter._checkpoint,
    Event.FIT_END: TraceWriter._fit_end,
    Event.EVAL_BEFORE_ALL: TraceWriter._evaluation_start,
    Event.EVAL_STANDALONE_START: TraceWriter._evaluation_start,
    Event.EVAL_START: TraceWriter._evaluator_start,
    Event.EVAL_END: TraceWriter._evaluator_end,
    Event.EVAL_AFTER_ALL: TraceWriter._evaluation_end,
    Event.EVAL_STANDALONE_END: TraceWriter._evaluation_end,
    Event.PREDICT_START: TraceWriter._prediction_start,
    Event.PREDICT_END: TraceWriter._prediction_end,
}


def _create(path: Path) -> TextIO:
    try:
        if path.suffix != ".gz":
            return path.open("w", encoding="ascii")
        # Without a time in it, so that equal traces are equal files.
        return io.TextIOWrapper(gzip.GzipFile(path, "wb", mtime=0), encoding="ascii")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}; choose another file") from None


def _place(state: Snapshot) -> dict[str, Any]:
    values = state.timestamp.values
    return {"epoch": values.epoch, "batch": values.batch}
