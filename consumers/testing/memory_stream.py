"""A made-up training, event by event: for unit tests of callbacks, without processes and files."""

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from offloop.bus.errors import ClosedError, ConfigurationError
from offloop.bus.protocol.frames import PROTOCOL_VERSION, EventBody, check_run_name
from offloop.bus.protocol.order import SEVERITY, Ending
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.protocol.stream import RunStream, in_turns
from offloop.bus.types.demand import BASE_EVENTS
from offloop.bus.types.event import Event
from offloop.bus.types.time import Time
from offloop.bus.types.timestamp import Timestamp

OfBatch: TypeAlias = Callable[[int], Any] | Any
"""A value, or a function of the number of the batch, from 1, that returns it."""

Evaluation: TypeAlias = Mapping[str, Mapping[str, float]]
"""Result of an evaluation: label of an evaluator to names and values of its metrics."""

_BEGIN = (Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD, Event.FIT_START, Event.ITERATION_START)
_EVENTS = tuple(Event)
_BEFORE_STEP = _EVENTS[_EVENTS.index(Event.BEFORE_DATALOADER) : _EVENTS.index(Event.BATCH_END)]
_NEW_LOSS = _BEFORE_STEP.index(Event.AFTER_LOSS)
_EVALUATION_BATCH = _EVENTS[_EVENTS.index(Event.EVAL_BATCH_START) : _EVENTS.index(Event.EVAL_END)]
_PAUSES = {Event.EPOCH_END, Event.EPOCH_CHECKPOINT, Event.FIT_END}
_WITH_TRAIN_METRICS = {Event.BATCH_END, Event.BATCH_CHECKPOINT} | _PAUSES
_WITH_EVAL_METRICS = {Event.EVAL_END, Event.EVAL_AFTER_ALL} | _PAUSES
_ALWAYS_SENT = {"flops_per_batch", "logged"}
_START_NS = 1_700_000_000 * 10**9


class MemoryStream(RunStream):
    """A made-up training: pass it to :func:`~offloop.consumers.testing.replay`, or iterate over its snapshots.

        stream = MemoryStream(loss=lambda batch: 1 / batch)
        stream.train(batches=3)
        stream.batch(loss=math.nan)
        logged = replay(NaNMonitor(action="stop"), stream)
        assert [(command.name, command.decided_at) for command in logged.commands] == [("stop", 4)]

    All events come in the order of a real training, with consistent counters, durations, times and sequence numbers; a
    callback gets those that it overrides. As with a real training, a callback sees only the fields that it requests in
    its ``fields``. The clock is made up too, and begins at 1,700,000,000 s since 1970.

    Args:
        loss: of each batch.
        lr: of each batch: a rate, or a map of optimizer to the rates of its groups.
        fields: further fields of each batch, such as ``{"gradient_norm": 1.5}``, at all of its events.
        train_metrics: of each batch, name to value.
        evaluation: the result after each epoch; a function receives the number of the epoch, from 1. ``None`` evaluates
            nothing.
        batches_per_epoch: batches in an epoch.
        batch_size: samples in a batch, of all ranks together.
        seconds_per_batch: duration of a batch, and of an evaluation for each evaluator.
        ranks: processes that train. Each publishes every event, the first one first.
        max_duration: planned duration of the training, such as ``2ep``.
        run_name: name of the run.
        attempt: number of the attempt, from 1.

    Raises:
        ConfigurationError: a count is below 1, or a duration negative.
        InvalidRunNameError: ``run_name`` is not a valid name of a run.
        InvalidTimeError: ``max_duration`` is malformed.
    """

    def __init__(
        self,
        *,
        loss: OfBatch = 1.0,
        lr: OfBatch = 0.1,
        fields: Mapping[str, OfBatch] | None = None,
        train_metrics: OfBatch = None,
        evaluation: Callable[[int], Evaluation] | Evaluation | None = None,
        batches_per_epoch: int = 4,
        batch_size: int = 8,
        seconds_per_batch: float = 0.25,
        ranks: int = 1,
        max_duration: str | None = None,
        run_name: str = "run",
        attempt: int = 1,
    ) -> None:
        counts = {"batches_per_epoch": batches_per_epoch, "batch_size": batch_size, "ranks": ranks, "attempt": attempt}
        for name, count in counts.items():
            if count < 1:
                raise ConfigurationError(f"{name} is {count}: use 1 or more")
        _check_seconds("seconds_per_batch", seconds_per_batch)
        self.run_name: str = check_run_name(run_name)
        self.attempt = attempt
        self._ending: Ending | None = None
        self._of_batch = {"loss": loss, "lr": lr, "train_metrics": train_metrics}
        self._fields = dict(fields or {})
        self._evaluation = evaluation
        self._batches_per_epoch = batches_per_epoch
        self._batch_size = batch_size
        self._seconds = seconds_per_batch
        self._ranks = ranks
        self._max_duration = None if max_duration is None else Time.from_timestring(max_duration)
        self._snapshots: list[Snapshot] = []
        self._numbers = [(0, 0)] * ranks
        self._time_ns = _START_NS
        self._timestamp = Timestamp()
        self._previous: Timestamp | None = None
        self._context: dict[str, Any] = {
            "max_duration": max_duration,
            "dataloader_label": None,
            "dataloader_len": None,
            "eval_timestamp": None,
            "predict_timestamp": None,
            "world_size": ranks,
            "device_name": "cpu",
            "precision": "fp32",
        }
        self._now: dict[str, Any] = {"loss": None, "lr": _rates(_value(lr, 1)), "batch_size": None}
        self._train_metrics: Mapping[str, Any] | None = None
        self._eval_metrics: dict[str, dict[str, float]] = {}

    @property
    def timestamp(self) -> Timestamp:
        return self._timestamp

    def __iter__(self) -> Iterator[Snapshot]:
        return iter(tuple(self._snapshots))

    def __aiter__(self) -> AsyncGenerator[Snapshot, None]:
        return in_turns(self)

    @property
    def ending(self) -> Ending | None:
        return self._ending

    def __len__(self) -> int:
        return len(self._snapshots)

    def batch(
        self,
        *,
        loss: float | None = None,
        lr: float | Mapping[str, Sequence[float]] | None = None,
        train_metrics: Mapping[str, Any] | None = None,
        evaluation: Evaluation | None = None,
        seconds: float | None = None,
        tokens: int = 0,
        of_rank: Mapping[int, Mapping[str, Any]] | None = None,
        **fields: Any,
    ) -> None:
        """Train one batch, with all events of its place: start of the training, start and end of an epoch.

        Arguments replace those of the stream, for this batch.

        Args:
            loss, lr, train_metrics: of this batch.
            evaluation: result of an evaluation after the batch, and after the epoch if that ends with it.
            seconds: duration of the batch.
            tokens: in this batch.
            of_rank: number of a rank to fields that differ there.
            fields: further fields, at all events of this batch.

        Raises:
            ClosedError: the training has ended.
            ConfigurationError: an unknown rank, or negative ``seconds``.
        """
        seconds = self._seconds if seconds is None else _check_seconds("seconds", seconds)
        self._check_ranks(of_rank or {})
        self._begin()
        if self._timestamp.batch_in_epoch == 0:
            self.emit(Event.EPOCH_START)
        number = int(self._timestamp.batch) + 1
        given: dict[str, Any] = {"loss": loss, "lr": lr, "train_metrics": train_metrics}
        chosen = {
            name: _value(self._of_batch[name], number) if value is None else value for name, value in given.items()
        }
        now = {name: _value(value, number) for name, value in self._fields.items()} | fields
        self._now |= {"batch_size": self._batch_size, "lr": _rates(chosen["lr"])}
        for event in _BEFORE_STEP[:_NEW_LOSS]:
            self.emit(event, of_rank, **now)
        self._now["loss"] = chosen["loss"]
        self._train_metrics = chosen["train_metrics"]
        self._time_ns += round(seconds * 10**9)
        for event in _BEFORE_STEP[_NEW_LOSS:]:
            self.emit(event, of_rank, **now)
        self._previous = self._timestamp
        self._timestamp = self._timestamp.advance_batch(self._batch_size, tokens, round(seconds * 10**6))
        self.emit(Event.BATCH_END, of_rank, **now)
        self._end_batch(of_rank, now, evaluation)

    def train(self, batches: int | None = None) -> None:
        """Train a number of batches, or up to ``max_duration``.

        Raises ClosedError: the training has ended; ConfigurationError: neither is known."""
        if batches is None and self._max_duration is None:
            raise ConfigurationError("how long to train is not known: train(batches=8), or MemoryStream(max_duration=)")
        end = None if batches is None else self._timestamp.batch + batches
        while not self._is_over() if end is None else self._timestamp.batch < end:
            self.batch()

    def finish(self, status: str = "finished", error: str | None = None) -> None:
        """End the training.

        ``finished`` and ``stopped`` (on request) come after the event FIT_END, ``failed`` (with the text of an
        ``error``) and ``lost`` without it.

        Raises ClosedError: it has ended already; ConfigurationError: an unknown ``status``."""
        if status not in SEVERITY:
            raise ConfigurationError(f"invalid status {status!r}: use {', '.join(SEVERITY)}")
        self._begin()
        if status in ("finished", "stopped"):
            self.emit(Event.FIT_END)
        self._ending = Ending(status, error)

    def emit(self, event: Event | str, of_rank: Mapping[int, Mapping[str, Any]] | None = None, **fields: Any) -> None:
        """Add any event, with further fields; ``of_rank`` is as for :meth:`batch`.

        Raises ClosedError: the training has ended; ConfigurationError: an unknown event or rank."""
        if self.ending is not None:
            raise ClosedError(f"the made-up training has {self.ending.status}: make a new MemoryStream")
        self._check_ranks(of_rank or {})
        event = Event(event)
        for rank in range(self._ranks):
            self._snapshots.append(self._snapshot(event, rank, {**fields, **(of_rank or {}).get(rank, {})}))

    def _begin(self) -> None:
        if self._snapshots:
            return
        for event in _BEGIN:
            self.emit(event)
            self._context |= {"dataloader_label": "train", "dataloader_len": self._batches_per_epoch}

    def _end_batch(
        self, of_rank: Mapping[int, Mapping[str, Any]] | None, fields: Mapping[str, Any], evaluation: Evaluation | None
    ) -> None:
        ends_epoch = self._timestamp.batch_in_epoch == self._batches_per_epoch
        if evaluation and not ends_epoch:
            self._evaluate(evaluation)
        self.emit(Event.BATCH_CHECKPOINT, of_rank, **fields)
        if not ends_epoch:
            return
        # Here it turns out that this was the last batch.
        self.emit(Event.BEFORE_DATALOADER)
        self._previous = self._timestamp
        self._timestamp = self._timestamp.to_next_epoch()
        self.emit(Event.EPOCH_END)
        of_epoch = self._evaluation
        if evaluation is None and of_epoch is not None:
            evaluation = of_epoch(int(self._timestamp.epoch)) if callable(of_epoch) else of_epoch
        if evaluation:
            self._evaluate(evaluation)
        self.emit(Event.EPOCH_CHECKPOINT)

    def _evaluate(self, evaluation: Evaluation) -> None:
        training = {name: self._context[name] for name in ("dataloader_label", "dataloader_len")}
        self.emit(Event.EVAL_BEFORE_ALL)
        for label, metrics in evaluation.items():
            self._context |= {"dataloader_label": label, "dataloader_len": 1, "eval_timestamp": None}
            self.emit(Event.EVAL_START)
            for event in _EVALUATION_BATCH[:-1]:
                self.emit(event)
            self._time_ns += round(self._seconds * 10**9)
            now = Timestamp().advance_batch(self._batch_size, 0, round(self._seconds * 10**6))
            self._context["eval_timestamp"] = list(now.values)
            self.emit(_EVALUATION_BATCH[-1])
            self._eval_metrics = {**self._eval_metrics, label: dict(metrics)}
            self.emit(Event.EVAL_END)
        self._context |= training
        self.emit(Event.EVAL_AFTER_ALL)

    def _snapshot(self, event: Event, rank: int, further: dict[str, Any]) -> Snapshot:
        fields = {} if event.is_own else dict(self._now)
        if fields.get("batch_size") is not None:
            # Each rank trains its share of a batch.
            fields["batch_size"] = len(range(rank, fields["batch_size"], self._ranks))
        if event in _WITH_EVAL_METRICS and self._eval_metrics:
            fields["eval_metrics"] = self._eval_metrics
        if event in _WITH_TRAIN_METRICS and self._train_metrics is not None:
            fields["train_metrics"] = dict(self._train_metrics)
        on_demand = [name for name in further if name not in fields and name not in _ALWAYS_SENT]
        fields |= further
        if on_demand and not event.is_own:
            fields["on_demand"] = on_demand
        seq, base_seq = self._numbers[rank]
        self._numbers[rank] = seq, base_seq = seq + 1, base_seq + (event in BASE_EVENTS)
        previous = None if self._previous is None else self._previous.values
        place = (seq, base_seq, self._time_ns, self._timestamp.values, previous)
        body = EventBody(PROTOCOL_VERSION, self.attempt, *place, fields, dict(self._context))
        return Snapshot(event, self.run_name, rank, body)

    def _is_over(self) -> bool:
        end = self._max_duration
        if end is None:
            return False
        return bool(self._timestamp.get(end.unit) >= end)

    def _check_ranks(self, ranks: Mapping[int, object]) -> None:
        for rank in ranks:
            if not 0 <= rank < self._ranks:
                raise ConfigurationError(f"of_rank has rank {rank}: use 0 to {self._ranks - 1}")


def _value(given: OfBatch, number: int) -> Any:
    return given(number) if callable(given) else given


def _rates(lr: Any) -> dict[str, list[float]]:
    if isinstance(lr, Mapping):
        return {name: list(rates) for name, rates in lr.items()}
    return {"SGD": [lr]}


def _check_seconds(name: str, seconds: float) -> float:
    if not 0 <= seconds < float("inf"):
        raise ConfigurationError(f"{name} is {seconds}: use a number of seconds from 0 on")
    return seconds
