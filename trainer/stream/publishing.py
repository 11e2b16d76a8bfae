"""Publishes the state at an event."""

import logging
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter_ns, thread_time_ns, time_ns
from typing import Any, NamedTuple

import torch

from offloop.bus.publisher.deferred import keep_sendable
from offloop.bus.publisher.publisher import Publisher
from offloop.bus.types import hyperparameters
from offloop.bus.types.demand import BASE_EVENTS, Demand
from offloop.bus.types.event import Event
from offloop.bus.types.intervals import MICROBATCH_EVENTS, EventPosition, batch_number
from offloop.bus.types.source import FIELDS as SOURCE_FIELDS
from offloop.bus.types.timestamp import Timestamp, TrainingTime
from offloop.trainer.arguments.values import optimizer_names
from offloop.trainer.engine.state import AlgorithmLogger, State
from offloop.trainer.fields.field import Field
from offloop.trainer.fields.phases import PhaseProbe
from offloop.trainer.fields.registry import BUILT_IN, FieldsOnDemand
from offloop.trainer.fields.values import read_tree_later
from offloop.trainer.stream.description import describe_hyperparameters, describe_sizes, describe_system
from offloop.trainer.stream.tensor_sharing import TensorSharing

_AFTER_EVALUATION = {Event.EVAL_END, Event.EVAL_AFTER_ALL, Event.EVAL_STANDALONE_END}
_PAUSES = {Event.EPOCH_END, Event.EPOCH_CHECKPOINT, Event.ITERATION_END, Event.ITERATION_CHECKPOINT, Event.FIT_END}
_WITH_EVAL_METRICS = _AFTER_EVALUATION | _PAUSES
_WITH_TRAIN_METRICS = {Event.BATCH_END, Event.BATCH_CHECKPOINT} | _PAUSES
_WITH_FLOPS = {Event.BATCH_END}
_WITH_HYPERPARAMETERS = hyperparameters.EVENTS - {Event.INIT}
_WITH_FACTS = {Event.INIT} | _WITH_HYPERPARAMETERS

_MAX_OVERDUE = 8

_log = logging.getLogger("offloop")


_BASE = Demand.of(BASE_EVENTS)


class _Due(NamedTuple):
    moment: EventPosition
    fields: Sequence[str] = ()
    overdue: Mapping[str, Sequence[EventPosition]] = {}
    """Fields that were not available when they were due, and their due events."""


_NOTHING_MORE = _Due(EventPosition(Event.INIT, TrainingTime()))


class StatePublisher:
    """Publishes the state for consumers, at about a microsecond beside the sending.

    The context is packed only after a change. The loss is read once for each batch, and only for a published event.

    Args:
        state, logger: the source of the fields.
        stream: the publisher, with the demand for it. A changed demand takes effect with the next batch, never within
            one. Batches of an evaluation count separately, and BATCH_CHECKPOINT comes after them.
        always: the demand that is always met.
        fields: the fields that consumers can request.
        sharing: sends tensors to the consumers that request them. A field with the policy ``wait`` that is not
            available when it is due comes with the next event for which it is requested.
        clock: nanoseconds since 1970, the times of events.
        info: the run's description, which is part of its hyperparameters."""

    def __init__(
        self,
        state: State,
        logger: AlgorithmLogger,
        stream: Publisher,
        always: Demand = _BASE,
        fields: Mapping[str, Field] = BUILT_IN,
        sharing: TensorSharing | None = None,
        clock: Callable[[], int] = time_ns,
        info: Mapping[str, Any] = {},
    ) -> None:
        self._state = state
        self._info = info
        self._hyperparameters: dict[str, Any] = {}
        self._stream = stream
        self._always = always
        self._sharing = sharing
        self._clock = clock
        self._fields = FieldsOnDemand(state, fields, None if sharing is None else sharing.share)
        self._overdue: dict[str, list[EventPosition]] = {}
        # Fields whose memory will be allocated once all of their tensors exist, and fields whose memory is allocated.
        self._to_reserve: set[str] = set()
        self._reserved: set[str] = set()
        # Times the phases of batches while a consumer requests them.
        self._phases: PhaseProbe | None = None
        self._has_marks = False
        self._marks_version = 0
        # Count of each event of a microbatch in the batch with this timestamp.
        self._microbatches: tuple[tuple[int, ...], dict[Event, int]] = ((), {})
        # The batch in which the demand changed; the change is not in effect yet.
        self._changed_in: tuple[int, bool, bool] | None = None
        # Events without any look-up; empty while a demand is to take effect.
        self._plain: frozenset[Event] = frozenset()
        self._use_demand()
        self._logger = logger
        self._logged = logger.entries
        self._defers = state.device.name == "gpu"
        self._send = stream.send
        self._read_later: Callable[[Any], Any] = state.device.read_later
        self._optimizers: list[Any] = []
        self._named_optimizers: list[tuple[str, Any]] = []
        self._loss: Any = None
        self._loss_value: Any = None
        self._losses: Any = None
        self._context = b""
        self._with_more = _WITH_FACTS | _WITH_EVAL_METRICS | (_WITH_TRAIN_METRICS if state.train_metrics else set())
        if hasattr(state.model, "flops_per_batch"):
            self._with_more = self._with_more | _WITH_FLOPS

    @property
    def context(self) -> bytes:
        """The rarely changing fields, packed for :meth:`offloop.bus.publisher.publisher.Publisher.send`."""
        if self._state.context_changed:
            self._pack_context()
        return self._context

    def send_through(self, send: Callable[..., None]) -> None:
        self._send = send

    @property
    def is_plain(self) -> bool:
        """True if a batch's end is published with no more than its loss, learning rates and size."""
        return Event.BATCH_END in self._plain and self._phases is None and Event.BATCH_END not in self._with_more

    def publish(
        self,
        event: Event,
        *,
        is_timed: bool = False,
        lr: dict[str, list[float]] | None = None,
        time: int | None = None,
    ) -> None:
        """Publish an event with its fields, if it is due.

        An event that happened earlier has its ``time``, and ``lr`` of then by :meth:`learning_rates`."""
        if self._phases is not None and not is_timed:
            self._publish_timed(event, self._phases)
            return
        state = self._state
        more = _NOTHING_MORE
        if event not in self._plain:
            due = self._due(event)
            if due is None:
                return
            more = due
        if state.context_changed:
            self._pack_context()
        loss = state.batch_loss
        if loss is not self._loss:
            self._loss = loss
            self._loss_value = self._read_later(loss) if isinstance(loss, torch.Tensor) else loss
            self._losses = read_tree_later(state.batch_losses, state.device) if state.batch_losses else None
        if lr is None:
            lr = self.learning_rates()
        fields = {"loss": self._loss_value, "lr": lr, "batch_size": state.batch_size}
        if self._losses is not None and event in _WITH_TRAIN_METRICS:
            fields["losses"] = self._losses
        if event in self._with_more or (self._logged and event in BASE_EVENTS):
            fields.update(self._more(event))
        if more is not _NOTHING_MORE:
            fields.update(self._on_demand(more))
            if len(self._fields.never) > self._never:
                self._prepare()
        values, previous = state.timestamp.values, state.previous_timestamp
        before = None if previous is None else previous.values
        try:
            self._send(event, values, before, fields, self._context, self._defers, time)
        except (TypeError, ValueError, OverflowError):
            # A value that cannot be packed, or is too large, does not end the training.
            fields = keep_sendable(fields, self._stream.left_out)
            self._send(event, values, before, fields, self._context, self._defers, time)
        if self._stream.demand_version != self._version:
            self._changed_in = self._batch(event)
            self._plain = frozenset()
            # Probes start at once, to be ready when the demand takes effect.
            self._fields.use(Demand.merge([self._demand, self._stream.demand]))
            self._probe_phases()

    def publish_own(self, event: Event, fields: dict[str, Any]) -> None:
        """Publish a custom event or rows of a table."""
        self._stream.send(event, self._state.timestamp.values, None, fields, self.context)

    def publish_logged(self) -> None:
        """Publish at the run's end what was logged since the last event, as :meth:`Publisher.close` does."""
        if self._logged:
            fields = {"logged": self._logger.take()}
            # As an event with deferred values it loses what cannot be sent, and no more.
            self._stream.send(
                Event.ITERATION_CHECKPOINT, self._state.timestamp.values, None, fields, self.context, has_deferred=True
            )

    def learning_rates(self) -> dict[str, list[float]]:
        """Return the present learning rates of each optimizer's groups, by the optimizer's name."""
        state = self._state
        if state.optimizers != self._optimizers:
            self._optimizers = list(state.optimizers)
            self._named_optimizers = list(zip(optimizer_names(self._optimizers), self._optimizers, strict=True))
        # Loops, because each comprehension would be a function call.
        found: dict[str, list[float]] = {}
        for name, optimizer in self._named_optimizers:
            found[name] = own = []
            for group in optimizer.param_groups:
                rate = group["lr"]
                own.append(rate if rate.__class__ is float else float(rate))
        return found

    def _publish_timed(self, event: Event, phases: PhaseProbe) -> None:
        if self._stream.demand_version != self._marks_version:
            # A change of demand between two events removes the ones that are no longer requested.
            phases.drop()
        if event in phases.marks:
            phases.before(event)
        began, own = perf_counter_ns(), thread_time_ns()
        self.publish(event, is_timed=True)
        phases.after(event, perf_counter_ns() - began, thread_time_ns() - own)
        if phases.is_timing is not self._has_marks and self._phases is phases:
            self._request_marks(phases.is_timing)

    def take_up_demand(self) -> None:
        """Apply the present demand from the next event on: called between two batches."""
        if self._stream.demand_version != self._version:
            self._use_demand()
            self._stream.demand_in_effect(self._state.timestamp.values)

    def _probe_phases(self) -> None:
        self._phases = self._fields.phases
        if self._phases is not None:
            self._phases.clock = self._clock
        self._request_marks(self._phases is not None and self._phases.is_timing)

    def _request_marks(self, requested: bool) -> None:
        self._marks_version = self._stream.demand_version
        if requested:
            # Unrequested marks are not published: _due() finds that out. A closed stream requests nothing.
            if Event.BATCH_END in self._stream.requested_events:
                self._stream.requested_events |= PhaseProbe.marks
        elif self._has_marks:
            self._stream.requested_events -= PhaseProbe.marks - self._always.events - self._stream.demand.events
        self._has_marks = requested

    def _due(self, event: Event) -> _Due | None:
        """Return the fields that are due at an event; ``None`` for an event that is not due."""
        if self._changed_in is not None and not self._is_in_same_batch(event):
            self._use_demand()
            self._stream.demand_in_effect(self._state.timestamp.values)
        if self._to_reserve and event is Event.BATCH_END:
            # An optimizer has its moments from the first batch on.
            self._reserve()
        demand = self._demand
        if event not in self._requested and not self._overdue:
            return None
        number = self._number(event)
        moment = self._moment(event) if event in self._timed else None
        names = demand.due_fields(event, number, moment)
        overdue: dict[str, list[EventPosition]] = {}
        if self._overdue and self._sharing is not None and not self._sharing.is_allocating:
            overdue = {name: moments for name, moments in self._overdue.items() if demand.has_field(event, name)}
        if names or overdue or (moment and moment.microbatch and demand.is_due(event, number, moment)):
            return _Due(moment or self._moment(event), names, overdue)
        # A demand that is not in effect yet already requests its events.
        return _NOTHING_MORE if demand.is_due(event, number, moment) else None

    def _on_demand(self, due: _Due) -> dict[str, Any]:
        names = list(dict.fromkeys((*due.fields, *due.overdue)))
        values = self._fields.compute(due.moment.event, names) if names else {}
        if self._sharing is not None:
            waiting = self._sharing.take_waiting()
            for name in names:
                if name not in waiting:
                    self._overdue.pop(name, None)
                elif name in due.fields:
                    self._overdue[name] = [*due.overdue.get(name, ()), due.moment][:_MAX_OVERDUE]
        late: dict[str, Any] = {name: _positions(moments) for name, moments in due.overdue.items() if name in values}
        how = ({"late": late} if late else {}) | ({"microbatch": number} if (number := due.moment.microbatch) else {})
        if how:
            values.update(how, on_demand=[*values.get("on_demand", ()), *how])
        return values

    def _use_demand(self) -> None:
        stream = self._stream
        self._demand, self._version = Demand.merge([self._always, stream.demand]), stream.demand_version
        self._changed_in = None
        self._fields.use(self._demand)
        self._probe_phases()
        requested = set() if self._sharing is None else self._fields.reserving(self._demand)
        self._reserved &= requested
        self._to_reserve = requested - self._reserved
        self._prepare()

    def _reserve(self) -> None:
        assert self._sharing is not None  # only sharing reserves memory
        self._sharing.reserve(self._fields.tensors_of(self._to_reserve))
        self._reserved |= self._to_reserve
        self._to_reserve = set()
        self._prepare()

    def _prepare(self) -> None:
        self._never = len(self._fields.never)
        self._demand = self._demand.without(self._fields.never.keys())
        events = self._demand.events
        self._requested = events
        self._plain = frozenset(event for event in events if self._demand.is_always_same(event))
        if self._to_reserve:
            self._plain -= {Event.BATCH_END}
        self._timed = frozenset(event for event in events if self._demand.is_timed(event))
        # A field that is no longer requested is not kept for a later consumer.
        self._overdue = {
            name: moments
            for name, moments in self._overdue.items()
            if any(self._demand.has_field(event, name) for event in events)
        }

    def _moment(self, event: Event) -> EventPosition:
        state = self._state
        previous = state.previous_timestamp
        return EventPosition(
            event,
            state.timestamp.values,
            None if previous is None else previous.values,
            state.eval_timestamp.values,
            state.predict_timestamp.values,
            state.max_duration,
            state.dataloader_len,
            self._count_microbatch(event) if event in MICROBATCH_EVENTS else 0,
        )

    def _count_microbatch(self, event: Event) -> int:
        batch, counts = self._microbatches
        if batch is not self._state.timestamp.values:
            self._microbatches = batch, counts = self._state.timestamp.values, {}
        count = counts.get(event, 0)
        counts[event] = count + 1
        return count

    def _number(self, event: Event) -> int:
        state = self._state
        return batch_number(event, state.timestamp.values, state.eval_timestamp.values, state.predict_timestamp.values)

    def _batch(self, event: Event) -> tuple[int, bool, bool]:
        return self._number(event), event.is_eval, event.is_predict

    def _is_in_same_batch(self, event: Event) -> bool:
        batch = self._batch(event)
        return batch[0] > 0 and batch == self._changed_in

    def _more(self, event: Event) -> dict[str, Any]:
        state = self._state
        more: dict[str, Any] = {}
        if event is Event.INIT:
            more["system"] = describe_system(state)
            more.update((name, self._info[name]) for name in SOURCE_FIELDS if name in self._info)
        elif event is Event.FIT_START:
            more.update(describe_sizes(state))
        if event in _WITH_HYPERPARAMETERS and state.rank == 0 and (changed := self._changed_hyperparameters()):
            more[hyperparameters.FIELD] = changed
        if event in _WITH_EVAL_METRICS and state.eval_metric_values:
            more["eval_metrics"] = state.eval_metric_values
        if event in _WITH_TRAIN_METRICS and state.train_metrics and state.batch_loss is not None:
            more["train_metrics"] = self._read_train_metrics()
        if event in _WITH_FLOPS and (flops := getattr(state.model, "flops_per_batch", None)) is not None:
            more["flops_per_batch"] = float(flops(state.batch) if callable(flops) else flops)
        # Only base events reach every consumer: others depend on the present consumers.
        if self._logged and event in BASE_EVENTS:
            more["logged"] = self._logger.take()
        return more

    def _changed_hyperparameters(self) -> dict[str, Any]:
        try:
            found = describe_hyperparameters(self._state, describe_system(self._state), self._info)
        except Exception as error:  # noqa: BLE001  they are read from objects of the user's, which may do anything
            _log.warning(
                "the hyperparameters of run %s are not published: reading them raised %s: %s",
                *(self._state.run_name, type(error).__name__, error),
            )
            return {}
        known, self._hyperparameters = self._hyperparameters, found
        return {name: value for name, value in found.items() if name not in known or known[name] != value}

    def _read_train_metrics(self) -> Any:
        metrics = self._state.train_metrics
        if self._state.world_size > 1:
            # Computing them takes all ranks, which publish at different times or not at all.
            return self._state.train_metric_values
        return read_tree_later({name: metric.compute() for name, metric in metrics.items()}, self._state.device)

    def _pack_context(self) -> None:
        state = self._state
        state.context_changed = False
        stopped = state.planned_duration != state.max_duration
        self._context = Publisher.pack_context(
            {
                "max_duration": None if state.max_duration is None else str(state.max_duration),
                **({"planned_duration": str(state.planned_duration)} if stopped else {}),
                "dataloader_label": state.dataloader_label,
                "dataloader_len": state.dataloader_len,
                "eval_timestamp": _unless_zero(state.eval_timestamp),
                "predict_timestamp": _unless_zero(state.predict_timestamp),
                "world_size": state.world_size,
                "device_name": state.device.model_name,
                "precision": state.precision,
            }
        )


def _positions(moments: Sequence[EventPosition]) -> list[list[Any]]:
    return [[moment.event.value, moment.timestamp, moment.previous] for moment in moments]


def _unless_zero(timestamp: Timestamp) -> TrainingTime | None:
    values = timestamp.values
    return values if any(values) else None
