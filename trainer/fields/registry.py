"""Computes fields while a consumer requests them."""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from offloop.bus.errors import ConfigurationError, close_matches
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.redaction import redact
from offloop.bus.types.demand import MAX_FIELD_NAME, Demand
from offloop.bus.types.event import Event
from offloop.bus.types.intervals import EventPosition
from offloop.bus.types.timestamp import TrainingTime
from offloop.trainer.arguments.checks import check_function
from offloop.trainer.engine.state import State
from offloop.trainer.fields.field import Field, FieldNotReadyError, FieldUnsupportedError
from offloop.trainer.fields.model import ACTIVATION_FIELDS, MODEL_FIELDS
from offloop.trainer.fields.norms import NORM_FIELDS
from offloop.trainer.fields.phases import PHASE_FIELDS, PhaseProbe
from offloop.trainer.fields.tensors import TENSOR_FIELDS, TensorPayload
from offloop.trainer.fields.values import sendable

_log = logging.getLogger("offloop")

BUILT_IN: dict[str, Field] = NORM_FIELDS | MODEL_FIELDS | ACTIVATION_FIELDS | PHASE_FIELDS | TENSOR_FIELDS
"""The fields of every training."""

_RESERVED = {*dir(Snapshot), "device_name", "flops_per_batch", "logged", "not_sent", "on_demand", "precision"}


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not name.isidentifier() or name[0] == "_" or len(name) > MAX_FIELD_NAME:
        raise ConfigurationError(
            f"fields has the name {name!r}: use an identifier of at most {MAX_FIELD_NAME} characters that does not "
            "begin with '_', such as 'queue_length'"
        )
    if name in BUILT_IN or name in _RESERVED:
        raise ConfigurationError(
            f"fields has the name {name!r}, which every snapshot or training has already: use another one"
        )


def check_fields(given: Any) -> dict[str, Field]:
    """Return the built-in fields and a user's own."""
    if not isinstance(given, Mapping | None):
        raise ConfigurationError(f"fields is a {type(given).__name__}: give a dict of names to functions of the state")
    for name, function in (given or {}).items():
        _check_name(name)
        check_function(function, f"the field {name!r}", "(state)")
    return BUILT_IN | {name: Field(function) for name, function in (given or {}).items()}


class _Schedule:
    def __init__(self, state: State, name: str, events: Collection[Event], demand: Demand) -> None:
        self._state = state
        self._name = name
        self._events = events
        self.demand = demand

    def is_due(self) -> bool:
        """Return whether the field is requested at one of its events in the current batch."""
        state = self._state
        values = state.timestamp.values
        number = values.batch + 1
        for event in self._events:
            after_batch = event is Event.BATCH_END
            moment = EventPosition(
                event,
                _after_batch(values) if after_batch else values,
                values if after_batch else None,
                max_duration=state.max_duration,
                dataloader_len=state.dataloader_len,
            )
            if self._name in self.demand.due_fields(event, number, moment):
                return True
        return False


class FieldsOnDemand:
    """Computes requested fields, on each rank alone.

    ``share`` is called with the name and value of a field of tensors, and returns the value to send. A field that is
    not available does not end the training: it is left out, with the reason in the event's field ``not_sent``, and in
    the log the first time."""

    def __init__(
        self, state: State, fields: Mapping[str, Field], share: Callable[[str, TensorPayload], Any] | None = None
    ) -> None:
        self._state = state
        self._fields = fields
        self._share = share
        self._probes: dict[str, tuple[object, _Schedule]] = {}
        self._said: set[str] = set()
        self.never: dict[str, str] = {}  # reasons by the names of fields that this training does not support

    def use(self, demand: Demand) -> None:
        """Make the probes of the fields that a demand requests, and drop the others."""
        for name, field in self._fields.items():
            if field.probe is None:
                continue
            is_requested = any(demand.has_field(event, name) for event in field.events)
            if not is_requested and name in self._probes:
                del self._probes[name]
            elif is_requested and name in self._probes:
                self._probes[name][1].demand = demand
            elif is_requested:
                schedule = _Schedule(self._state, name, field.events, demand)
                self._probes[name] = (field.probe(self._state, schedule.is_due), schedule)

    def reserving(self, demand: Demand) -> set[str]:
        return {
            name
            for name, field in self._fields.items()
            if field.reserves and any(demand.has_field(event, name) for event in field.events)
        }

    def tensors_of(self, names: Iterable[str]) -> Iterator[TensorPayload]:
        for name in names:
            try:
                with torch.no_grad():
                    tensors = self._fields[name].compute(self._state)
            # Errors are reported when the field is due.
            except Exception:  # noqa: BLE001
                continue
            yield tensors

    @property
    def phases(self) -> PhaseProbe | None:
        probe = self._probes.get("phases", (None,))[0]
        return probe if isinstance(probe, PhaseProbe) else None

    def compute(self, event: Event, names: Iterable[str]) -> dict[str, Any]:
        """Compute the named fields that exist at an event; ``on_demand`` lists them, for consumers of other fields."""
        values: dict[str, Any] = {}
        trouble: list[str] = []
        for name in names:
            if name in self.never:
                trouble.append(self.never[name])
                continue
            field = self._fields.get(name)
            if field is None:
                self._say(
                    name,
                    f"a consumer requests the field {name!r}, which this training does not have: "
                    f"{close_matches(name, list(self._fields))}it has {', '.join(self._fields)}",
                )
            elif event in field.events:
                try:
                    with torch.no_grad():
                        values[name] = self._sendable(name, self._computed(name, field))
                # A user's function may raise anything, and must not end the training.
                except Exception as error:  # noqa: BLE001
                    said = str(error) if isinstance(error, ConfigurationError) else redact(repr(error))
                    reason = f"{name}: {said}"
                    trouble.append(reason)
                    if isinstance(error, FieldUnsupportedError):
                        self.never[name] = reason
                    if not isinstance(error, FieldNotReadyError):
                        self._say(name, f"a field that a consumer requests is left out, {reason}")
        if values:
            values["on_demand"] = list(values)
        if trouble:
            values["not_sent"] = "; ".join(trouble)
        return values

    def _computed(self, name: str, field: Field) -> Any:
        if field.probe is None:
            return field.compute(self._state)
        if name not in self._probes:
            raise FieldNotReadyError("its probe begins with the next batch")
        return field.compute(self._probes[name][0])

    def _sendable(self, name: str, value: Any) -> Any:
        if not isinstance(value, TensorPayload):
            return sendable(value, self._state.device)
        if self._share is None:
            raise ConfigurationError("tensors need a stream: set publish=True")
        return self._share(name, value)

    def _say(self, name: str, text: str) -> None:
        # Bounded, because consumers may request any number of names.
        if name not in self._said and len(self._said) < 100:
            self._said.add(name)
            _log.warning("run %s: %s", self._state.run_name, text)


_MANY = 2**60


def _after_batch(now: TrainingTime) -> TrainingTime:
    return now._replace(
        batch=now.batch + 1,
        batch_in_epoch=now.batch_in_epoch + 1,
        sample=now.sample + _MANY,
        token=now.token + _MANY,
        sample_in_epoch=now.sample_in_epoch + _MANY,
        token_in_epoch=now.token_in_epoch + _MANY,
        total_wct=now.total_wct + _MANY,
    )
