"""A snapshot in the form of Composer's state."""

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NoReturn

from offloop.bus.errors import FieldNotAvailableError, FrozenSnapshotError
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.event import Event
from offloop.bus.types.time import Time, TimeUnit

_BATCH = "a batch's inputs and targets are fields on demand (inputs, targets), its size is state.batch_size"
_RATES = "the learning rates are state.lr, {optimizer: [rate of each group]}"
_INSTEAD = {
    "batch": _BATCH,
    "batch_get_item": _BATCH,
    "device": "its name is state.device_name",
    "loss": "here it is that of a microbatch; the whole batch's comes with batch_end, and its parts with it as losses",
    "model": "its weights and the norms of weights and gradients are fields on demand (weights, parameter_norm, "
    "gradient_norm)",
    "optimizers": _RATES,
    "outputs": "a batch's outputs are a field on demand (outputs)",
    "schedulers": _RATES,
    "state_dict": "the callback 'checkpoint' saves the training",
}
_ON_DEMAND = (
    "norms, memory, inputs, outputs, weights and what the training registers are fields on demand, which a callback "
    "asks for with fields = (...)"
)
# Composer's loss is that of the microbatch here, a snapshot's still that of the batch before.
_OF_A_MICROBATCH = {Event.AFTER_LOSS, Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD}

_handled: ContextVar[Snapshot | None] = ContextVar("handled", default=None)


class Scalar(float):
    def item(self) -> float:
        return float(self)

    def detach(self) -> "Scalar":
        return self

    def cpu(self) -> "Scalar":
        return self


class _Metrics(dict[str, Any]):
    def __init__(self, values: Mapping[str, Any], event: Event) -> None:
        super().__init__(values)
        self._event = event

    def __missing__(self, name: str) -> NoReturn:
        raise KeyError(
            f"no metrics of {name!r} are in the {self._event.value} snapshot, which has {', '.join(self) or 'none'}: "
            "the training's come with batch_end, an evaluator's with eval_end, and both with epoch_end and fit_end"
        )


class MetricValue:
    def __init__(self, value: Any) -> None:
        self._value = value

    def compute(self) -> Any:
        return _scalar(self._value)

    def __repr__(self) -> str:
        return f"MetricValue({self._value!r})"


class ComposerState:
    """A snapshot with the attributes of Composer's state, read-only; other attributes are the snapshot's."""

    __slots__ = ("_snapshot",)

    def __init__(self, snapshot: Snapshot) -> None:
        object.__setattr__(self, "_snapshot", snapshot)

    @property
    def loss(self) -> Scalar | None:
        if self._snapshot.event in _OF_A_MICROBATCH:
            raise AttributeError("loss")  # Python asks __getattr__ then, which says why
        loss = self._snapshot.loss
        return None if loss is None else Scalar(loss)

    @property
    def train_metrics(self) -> dict[str, MetricValue]:
        snapshot = self._snapshot
        return _Metrics({name: MetricValue(value) for name, value in snapshot.train_metrics.items()}, snapshot.event)

    @property
    def eval_metrics(self) -> dict[str, dict[str, MetricValue]]:
        snapshot = self._snapshot
        values = {
            label: {name: MetricValue(value) for name, value in metrics.items()}
            for label, metrics in snapshot.eval_metrics.items()
        }
        return _Metrics(values, snapshot.event)

    @property
    def dataloader_len(self) -> Time | None:
        length = self._snapshot.dataloader_len
        return None if length is None else Time(length, TimeUnit.BATCH)

    def __getattr__(self, name: str) -> Any:
        snapshot: Snapshot = object.__getattribute__(self, "_snapshot")
        if name != "loss" and (name in snapshot.fields or hasattr(type(snapshot), name)):
            return getattr(snapshot, name)
        raise _not_available(name, snapshot.event, _INSTEAD.get(name, _ON_DEMAND))

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise FrozenSnapshotError(
            f"state.{name} cannot be assigned in a consumer: only an Algorithm in the trainer changes the training",
            field=name,
        )


@contextlib.contextmanager
def handling(state: Snapshot) -> Iterator[None]:
    before = _handled.set(state)
    try:
        yield
    finally:
        _handled.reset(before)


def handled_snapshot() -> Snapshot | None:
    return _handled.get()


def _not_available(name: str, event: Event, instead: str) -> FieldNotAvailableError:
    return FieldNotAvailableError(
        f"state.{name} is not in the {event.value} snapshot: {instead}; use an Algorithm in the trainer for the model, "
        "the optimizers or the data",
        field=name,
    )


def _scalar(value: Any) -> Any:
    return Scalar(value) if isinstance(value, float | int) else value
