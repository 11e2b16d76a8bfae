"""Images of a model's inputs, targets and predictions."""

import logging
from collections.abc import Mapping
from typing import Any, Literal

from offloop.bus.errors import ConfigurationError, FieldNotAvailableError, check_at_least, check_choice, require
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.tensors.view import TensorView
from offloop.bus.types.demand import Demand, EventDemand
from offloop.bus.types.event import Event
from offloop.bus.types.time import Time, TimeUnit
from offloop.consumers.api.callback import Callback
from offloop.consumers.api.logger import Logger
from offloop.consumers.api.optional import np

_log = logging.getLogger("offloop")

# Events at which all tensors of a mode are available: in the training, and in an evaluation or a prediction.
_EVENTS = {
    "input": (Event.BEFORE_FORWARD, Event.EVAL_BEFORE_FORWARD),
    "segmentation": (Event.BEFORE_LOSS, Event.EVAL_AFTER_FORWARD),
}
_PARTS = ("inputs", "targets")
_FIRST_BATCH = "1ep"  # an interval within an evaluation that is due only at its first batch


class ImageVisualizer(Callback):
    """The first images of a batch every ``interval`` of the training, and of the first batch of each evaluation.

    Logs ``Images/Train`` and ``Images/Eval``, of a batch's first microbatch. With ``mode=input`` they are the model's
    inputs; ``segmentation`` adds the masks ``prediction``, the class with the highest output at each pixel, and
    ``ground_truth``, the targets, in which classes below 0 (ignored by the loss) become the number after the last.

    Args:
        interval: a time in batches or epochs, or a number of batches.
        mode: ``input`` or ``segmentation``.
        num_images: the most images.
        channels_last: the channels are the last dimension of an image, not the first.
        input_key, target_key: the tensors of the images and the targets: 0 for the inputs of the batch (its first
        part), 1 for its targets (the second), or a name where these have several parts.

    Inputs that are not images are skipped, with a warning. Large batches go through shared memory and are not recorded,
    so a replay has no images of them. Unlike Composer's it does not change the labels. Needs ``pip install
    'offloop[images]'``. Reference: ``composer/callbacks/image_visualizer.py``."""

    def __init__(
        self,
        interval: int | str | Time = "100ba",
        mode: Literal["input", "segmentation"] = "input",
        num_images: int = 10,
        channels_last: bool = False,
        input_key: int | str = 0,
        target_key: int | str = 1,
    ) -> None:
        every = Time.from_input(interval, TimeUnit.BATCH)
        if every.unit not in (TimeUnit.BATCH, TimeUnit.EPOCH) or every.value < 1:
            raise ConfigurationError(
                f"interval {interval!r} is not allowed: use batches or epochs, such as 100ba or 1ep"
            )
        check_choice("mode", mode, _EVENTS)
        check_at_least("num_images", num_images, 1)
        require("ImageVisualizer", "images", "numpy")
        self._interval = str(every)
        self._mode = mode
        self._num_images = num_images
        self._channels_last = channels_last
        self._input_key = _checked_key("input_key", input_key)
        self._target_key = _checked_key("target_key", target_key)
        key = self._input_key
        self._fields = (
            (*_PARTS, "outputs") if mode == "segmentation" else (_PARTS[key] if isinstance(key, int) else "inputs",)
        )
        self._warned = False

    def demand(self) -> Demand:
        train, evaluation = _EVENTS[self._mode]
        return Demand({train: self._event_demand(self._interval), evaluation: self._event_demand(_FIRST_BATCH)})

    def run_event(self, event: Event, state: Snapshot, logger: Logger) -> None:
        name = "Images/Eval" if event.is_eval else "Images/Train"
        try:
            tensors = {field: getattr(state, field) for field in self._fields}
        except FieldNotAvailableError as error:
            self._warn_once(name, state, state.fields.get("not_sent", error))
            return
        images = _part(tensors, self._input_key)[: self._num_images]
        if images.ndim not in (3, 4):
            self._warn_once(
                name,
                state,
                f"inputs of shape {images.shape} are not images, which have height, width and maybe channels: choose "
                "a tensor with input_key",
            )
            return
        if images.ndim == 3:
            images = images[..., None] if self._channels_last else images[:, None]
        masks = None
        if self._mode == "segmentation":
            outputs, targets = _only("outputs", tensors["outputs"]), _part(tensors, self._target_key)
            masks = segmentation_masks(outputs, targets, len(images))
            images = images[: len(masks["prediction"])]
        logger.log_images(images, name=name, channels_last=self._channels_last, masks=masks)

    def _warn_once(self, name: str, state: Snapshot, reason: object) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("%s at %s, and maybe others, are not logged: %s", name, state.timestamp.batch, reason)

    def _event_demand(self, interval: str) -> EventDemand:
        return EventDemand(interval, dict.fromkeys(self._fields, interval))


def segmentation_masks(
    outputs: "np.ndarray[Any, Any]", targets: "np.ndarray[Any, Any]", count: int
) -> "dict[str, np.ndarray[Any, Any]]":
    """Return the masks ``prediction`` and ``ground_truth`` of up to ``count`` images, (images, height, width).

    ``outputs`` are of shape (images, classes, height, width), ``targets`` of shape (images, height, width); targets
    below 0 become the number after the last class, in a copy. Raises ConfigurationError for other shapes."""
    if outputs.ndim != 4 or targets.ndim != 3:
        raise ConfigurationError(
            f"mode segmentation takes outputs of shape (images, classes, height, width) and targets of shape (images, "
            f"height, width), not {outputs.shape} and {targets.shape}: use mode input"
        )
    count = min(count, len(outputs), len(targets))
    targets = targets[:count]
    return {
        "prediction": outputs[:count].argmax(axis=1),
        "ground_truth": np.where(targets < 0, outputs.shape[1], targets),
    }


def _checked_key(what: str, key: int | str) -> int | str:
    if isinstance(key, str) or key in (0, 1):
        return key
    raise ConfigurationError(
        f"{what} {key!r} is not allowed: 0 stands for the inputs of a batch, 1 for its targets, and a tensor within "
        "them goes by its name, such as 'image'"
    )


def _part(tensors: Mapping[str, Mapping[str, TensorView]], key: int | str) -> "np.ndarray[Any, Any]":
    if isinstance(key, int):
        return _only(_PARTS[key], tensors[_PARTS[key]])
    found = {name: view for part in _PARTS for name, view in tensors.get(part, {}).items()}
    if key not in found:
        raise ConfigurationError(f"the batch has no {key!r}: it has {', '.join(found)}")
    return found[key].numpy()


def _only(field: str, tensors: Mapping[str, TensorView]) -> "np.ndarray[Any, Any]":
    if len(tensors) != 1:
        raise ConfigurationError(f"the {field} are {len(tensors)} tensors ({', '.join(tensors)}): give a name as key")
    return next(iter(tensors.values())).numpy()
