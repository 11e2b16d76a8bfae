"""Fields of tensors: parts of a batch, the model's weights, a whole checkpoint."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

from torch import Tensor

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.event import Event
from offloop.trainer.checkpoints.file import draft_checkpoint
from offloop.trainer.checkpoints.training_state import weights_tree
from offloop.trainer.device.batch import walk_tensors
from offloop.trainer.engine.state import State
from offloop.trainer.fields.field import Field

Policy: TypeAlias = Literal["skip", "wait"]
"""Without free memory tensors are left out (``skip``), or come with a later event (``wait``)."""

_TARGETS = ("labels", "label", "targets", "target", "y")


def _between(first: Event, last: Event) -> frozenset[Event]:
    events = list(Event)
    return frozenset(events[events.index(first) : events.index(last) + 1])


_WITH_BATCH = (
    _between(Event.AFTER_DATALOADER, Event.BATCH_END)
    | _between(Event.EVAL_BATCH_START, Event.EVAL_BATCH_END)
    | _between(Event.PREDICT_BATCH_START, Event.PREDICT_BATCH_END)
)
_WITH_OUTPUTS = (
    _between(Event.AFTER_FORWARD, Event.BATCH_END)
    | _between(Event.EVAL_AFTER_FORWARD, Event.EVAL_BATCH_END)
    | _between(Event.PREDICT_AFTER_FORWARD, Event.PREDICT_BATCH_END)
)
_WITH_MODEL = frozenset(Event) - {Event.INIT, Event.BEFORE_LOAD}
_WITHIN_FIT = frozenset(
    {
        Event.FIT_START,
        Event.BATCH_END,
        Event.BATCH_CHECKPOINT,
        Event.EPOCH_END,
        Event.EPOCH_CHECKPOINT,
        Event.ITERATION_END,
        Event.ITERATION_CHECKPOINT,
        Event.FIT_END,
        Event.EVAL_AFTER_ALL,
    }
)


class TensorPayload(NamedTuple):
    """Tensors to send, as a field's function returns them."""

    tensors: Mapping[str, Tensor]
    """By name; on any device, contiguous or not. They are copied before the training continues."""
    metadata: Mapping[str, str] = {}
    policy: Policy = "skip"


def _part(batch: Any, *, is_target: bool) -> Any:
    if isinstance(batch, Mapping):
        parts = {name: batch[name] for name in batch if (str(name).lower() in _TARGETS) is is_target}
    elif isinstance(batch, list | tuple):
        parts = {index: part for index, part in enumerate(batch) if (index == 1) is is_target}
    elif is_target:
        parts = {}
    else:
        return batch
    if parts:
        return parts
    what = "targets" if is_target else "inputs"
    raise ConfigurationError(
        f"the batch is a {type(batch).__name__} in which no {what} are found: use pairs of inputs and targets, or a "
        f"mapping with targets under one of the names {', '.join(_TARGETS)}"
    )


def _flat(field: str, value: Any) -> TensorPayload:
    found = {path or field: tensor.detach() for path, tensor in walk_tensors("", value)}
    if not found:
        raise ConfigurationError(f"the {field} are a {type(value).__name__} without a tensor in it")
    return TensorPayload(found)


def _weights(state: State) -> TensorPayload:
    weights = {name: value.detach() for name, value in state.model.state_dict().items() if isinstance(value, Tensor)}
    _check_whole(weights)
    return TensorPayload(weights, policy="wait")


def _checkpoint(state: State) -> TensorPayload:
    if state.world_size > 1:
        # The ranks receive the demand at different times, and the position in the data takes all of them.
        raise ConfigurationError(
            f"a checkpoint needs all {state.world_size} ranks at once, and a request reaches one: use save_folder of "
            "the Trainer, or request the weights alone"
        )
    if state.gather_checkpoint is None:
        raise ConfigurationError("a checkpoint is available only within fit()")
    return _as_checkpoint(state, state.gather_checkpoint)


def _as_checkpoint(state: State, gather: Callable[[], Mapping[str, Any]]) -> TensorPayload:
    draft = draft_checkpoint({**gather(), "timestamp": list(state.timestamp.values)}, "the checkpoint for a consumer")
    _check_whole(draft.tensors)
    return TensorPayload(draft.tensors, draft.metadata(), "wait")


def _check_whole(tensors: Mapping[str, Tensor]) -> None:
    if any(type(one) is not Tensor and hasattr(one, "device_mesh") for one in tensors.values()):
        raise ConfigurationError(
            "with fsdp_config each rank has a part of the weights only: use save_folder of the Trainer"
        )


TENSOR_FIELDS: dict[str, Field] = {
    "inputs": Field(lambda state: _flat("inputs", _part(state.batch, is_target=False)), _WITH_BATCH),
    "targets": Field(lambda state: _flat("targets", _part(state.batch, is_target=True)), _WITH_BATCH),
    "outputs": Field(lambda state: _flat("outputs", state.outputs), _WITH_OUTPUTS),
    "weights": Field(_weights, _WITH_MODEL, reserves=True),
    "checkpoint": Field(_checkpoint, _WITHIN_FIT, reserves=True),
    "weights_checkpoint": Field(
        lambda state: _as_checkpoint(state, lambda: weights_tree(state)), _WITH_MODEL, reserves=True
    ),
}
