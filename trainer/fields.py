"""Fields that are computed only when a consumer asks for them."""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from bus.demand import MAX_FIELD_NAME
from bus.errors import ConfigurationError
from bus.event import Event
from bus.options import close_matches
from bus.snapshot import Snapshot
from bus.wire import is_shallow, pack_map
from trainer.arguments import check_function
from trainer.data import map_tensors
from trainer.device import DeferredMap, DeferredScalar
from trainer.state import State
from trainer.values import plain

__all__ = ["BUILT_IN", "Field", "FieldFunction", "FieldsOnDemand", "check_fields"]

_log = logging.getLogger("offloop")

FieldFunction: TypeAlias = Callable[[State], Any]
"""What computes a field: from the state, which it must leave as it is."""

_MAX_BYTES = 1024 * 1024
_RESERVED = {*dir(Snapshot), "device_name", "flops_per_batch", "logged", "not_sent", "on_demand", "precision"}


class Field(NamedTuple):
    """A field that can be asked for."""

    compute: FieldFunction
    events: frozenset[Event] = frozenset(Event)
    """The events that it exists at; at others it is never there, whoever asks for it."""


def gradient_norm(state: State) -> Tensor:
    """The L2 norm of all gradients of the model together, as the optimizers use them: of the whole batch, averaged over
    ranks, unscaled with ``amp_fp16``, and clipped where an algorithm clips. 0 without any gradient.

    With ``amp_fp16`` it is infinite or NaN for a batch whose step the scaler leaves out."""
    return _norm([one.grad for one in state.model.parameters() if one.grad is not None])


def parameter_norm(state: State) -> Tensor:
    """The L2 norm of all parameters of the model together, as they are at the event."""
    return _norm(state.model.parameters())


def _norm(tensors: Iterable[Tensor]) -> Tensor:
    tensors = list(tensors)
    if any(hasattr(one, "device_mesh") for one in tensors):
        # The ranks learn at different times what is wanted, and one that computes alone would wait for the others.
        raise ConfigurationError(
            "with fsdp_config each rank has a part of the weights, and norms of all of them take all ranks at once: "
            "log it from an algorithm"
        )
    return get_total_norm(tensors)


BUILT_IN: dict[str, Field] = {
    "gradient_norm": Field(gradient_norm, frozenset({Event.AFTER_TRAIN_BATCH, Event.BATCH_END})),
    "parameter_norm": Field(parameter_norm),
}
"""The fields that every training has."""


def check_fields(given: Any) -> dict[str, Field]:
    """The fields of a training: those that are built in, and the functions that the user gave by name.

    Raises :class:`bus.errors.ConfigurationError` for what is no function, or has a name that is not allowed."""
    if given is None:
        return dict(BUILT_IN)
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"fields is a {type(given).__name__}: give a dict of names to functions of the state")
    for name, function in given.items():
        if not isinstance(name, str) or not name.isidentifier() or name[0] == "_" or len(name) > MAX_FIELD_NAME:
            raise ConfigurationError(
                f"fields has the name {name!r}: use an identifier of at most {MAX_FIELD_NAME} characters that does not "
                "begin with '_', such as 'queue_length'"
            )
        if name in _RESERVED or name in BUILT_IN:
            raise ConfigurationError(
                f"fields has the name {name!r}, which every snapshot or training has already: use another one"
            )
        check_function(function, f"the field {name!r}", "(state)")
    return BUILT_IN | {name: Field(function) for name, function in given.items()}


class FieldsOnDemand:
    """Computes what consumers ask for, each rank for itself.

    A field that cannot be had ends no training: it is left out, with the reason in the event's field ``not_sent``, and
    in the log the first time.
    """

    def __init__(self, state: State, fields: Mapping[str, Field]) -> None:
        self._state = state
        self._fields = fields
        self._said: set[str] = set()

    def compute(self, event: Event, names: Iterable[str]) -> dict[str, Any]:
        """The fields of these names that exist at an event. ``on_demand`` lists them, so that a consumer can tell what
        another one asked for."""
        values: dict[str, Any] = {}
        trouble: list[str] = []
        for name in names:
            field = self._fields.get(name)
            if field is None:
                self._say(
                    name,
                    f"a consumer asks for the field {name!r}, which this training does not have: "
                    f"{close_matches(name, list(self._fields))}it has {', '.join(self._fields)}",
                )
            elif event in field.events:
                try:
                    with torch.no_grad():
                        values[name] = self._sendable(name, field.compute(self._state))
                # A user's function may raise anything, and the training is worth more than the field.
                except Exception as error:  # noqa: BLE001
                    reason = f"{name}: {error}" if isinstance(error, ConfigurationError) else f"{name}: {error!r}"
                    trouble.append(reason)
                    self._say(name, f"a field that a consumer asks for is left out, {reason}")
        if values:
            values["on_demand"] = list(values)
        if trouble:
            values["not_sent"] = "; ".join(trouble)
        return values

    def _say(self, name: str, text: str) -> None:
        # What consumers ask for has no bound over time; what is remembered has one.
        if name not in self._said and len(self._said) < 100:
            self._said.add(name)
            _log.warning("run %s: %s", self._state.run_name, text)

    def _sendable(self, name: str, value: Any) -> Any:
        """The value as it is sent; numbers on a GPU, alone or in a map, are on their way."""
        if isinstance(value, Tensor) and value.numel() == 1:
            return self._number(value)
        on_gpu = self._state.device.name == "gpu"
        if on_gpu and isinstance(value, Mapping) and any(isinstance(one, Tensor) for one in value.values()):
            return DeferredMap({str(key): self._number(one) for key, one in value.items()})
        map_tensors(value, _check_on_host)
        value = plain(value)
        if not is_shallow({name: value}):
            raise ConfigurationError("its lists and maps are nested too deeply: send it flat")
        size = len(pack_map({name: value}))
        if size > _MAX_BYTES:
            raise ConfigurationError(f"it has {size:,} bytes, at most {_MAX_BYTES:,} are allowed: send less of it")
        return value

    def _number(self, value: Any) -> "float | DeferredScalar":
        if isinstance(value, Tensor):
            return self._state.device.read_later(value.reshape(()))
        return float(value)


def _check_on_host(tensor: Tensor) -> None:
    if tensor.device.type != "cpu":
        raise ConfigurationError(
            f"reading a tensor of {tensor.numel()} numbers would make the training wait for the GPU: return one number "
            "or a dict of names to single numbers"
        )
