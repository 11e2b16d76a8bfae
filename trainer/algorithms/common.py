"""Parts that several algorithms share: checks, training time, targets, images, changes of a model."""

from typing import Any

import torch
from torch import nn

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.event import Event
from offloop.bus.types.time import Time, TimeInput, TimeUnit
from offloop.trainer.arguments.values import describe
from offloop.trainer.device.batch import BatchKey
from offloop.trainer.engine.state import State

_combined: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}

_UPDATE_EVENTS = {TimeUnit.BATCH: Event.BATCH_END, TimeUnit.EPOCH: Event.EPOCH_END}


def check_key(name: str, key: Any) -> BatchKey:
    """Return the key, if it can name a part of a batch."""
    path = key if isinstance(key, list) else [key]
    is_path = bool(path) and all(isinstance(step, int | str) and not isinstance(step, bool) for step in path)
    is_pair = isinstance(key, tuple) and len(key) == 2 and all(map(callable, key))
    if is_path or is_pair:
        return key  # type: ignore[no-any-return]
    raise ConfigurationError(
        f"{name} {key!r} names no part of a batch: use an index, a name, a list of these, "
        "or a pair of functions (get, set)"
    )


def check_point(name: str, point: TimeInput) -> Time:
    """Read a point in the training: a share of it such as ``0.7dur``, or a count from its start such as ``3ep``."""
    time = Time.from_input(point)
    if time.value >= 0 and (time.unit is not TimeUnit.DURATION or time.value <= 1):
        return time
    raise ConfigurationError(f"{name} {str(time)!r} is not allowed: use 0dur to 1dur, or a count such as 3ep or 100ba")


def check_update_interval(name: str, interval: TimeInput) -> Time:
    time = Time.from_input(interval)
    if time.unit in _UPDATE_EVENTS and time.value > 0:
        return time
    raise ConfigurationError(f"{name} {str(time)!r} is not allowed: use batches or epochs, such as 10ba or 1ep")


def update_event(interval: Time) -> Event:
    return _UPDATE_EVENTS[interval.unit]


def has_reached(state: State, point: Time) -> bool:
    return _elapsed(state, point.unit) >= point


def share_of_way(state: State, point: Time) -> float:
    """Return the share of the way to a point that has passed, from 0 to 1."""
    return 1.0 if has_reached(state, point) else _elapsed(state, point.unit).value / point.value


def _elapsed(state: State, unit: TimeUnit) -> Time:
    if unit is TimeUnit.DURATION:
        return state.get_elapsed_duration() or Time(0, unit)
    return state.timestamp.get(unit)


def soft_targets(targets: Any, outputs: Any) -> torch.Tensor:
    """Convert targets to probabilities of the classes that the outputs score.

    Args:
        targets: class numbers, integers of shape (...), or probabilities, floats of shape (..., classes), which are
            returned unchanged. A negative class number means "no target" and becomes a row of zeros.
        outputs: the model's scores, of shape (..., classes).

    Returns probabilities of the outputs' shape, in single precision or the outputs', whichever is higher: half
    precision would round shares of targets visibly."""
    if (
        not isinstance(outputs, torch.Tensor)
        or not isinstance(targets, torch.Tensor)
        or targets.shape != (outputs.shape if targets.is_floating_point() else outputs.shape[:-1])
    ):
        raise ConfigurationError(
            f"targets ({describe(targets)}) and outputs ({describe(outputs)}) do not go together: use one tensor of "
            "each, and class numbers of the outputs' shape without its last dimension, the classes, or probabilities "
            "of the outputs' shape; name the targets by target_key"
        )
    if targets.is_floating_point():
        return targets
    dtype = torch.promote_types(outputs.dtype, torch.float32)
    classes = targets.long().unsqueeze(-1)
    # Not one_hot(), which refuses negative numbers.
    probabilities = torch.zeros(outputs.shape, dtype=dtype, device=targets.device)
    return probabilities.scatter_(-1, classes.clamp(min=0), (classes >= 0).to(dtype))


def check_images(images: Any, algorithm: str) -> torch.Tensor:
    """Refuse anything but a tensor of shape (rows, channels, height, width)."""
    if isinstance(images, torch.Tensor) and images.ndim == 4:
        return images
    raise ConfigurationError(
        f"{algorithm} cannot use {describe(images)}: it needs images of shape (rows, channels, height, width); "
        "name them by input_key"
    )


def random_span(size: int, length: int, uniform: bool) -> slice:
    """Draw one side of a box of ``length`` pixels in an image side of ``size`` pixels, cut off at the border.

    With ``uniform`` every pixel is in the box with the same probability; otherwise the box's middle is drawn from all
    pixels, as in the papers. Draws from torch's generator on the host."""
    lowest, offset = (1 - max(length, 1), 0) if uniform else (0, length // 2)
    start = int(torch.randint(lowest, size, ())) - offset
    return slice(max(start, 0), min(start + length, size))


def change_behavior(module: nn.Module, mixin: type[nn.Module]) -> None:
    """Derive a module's class from ``mixin`` and its own class, whose methods ``mixin`` calls by ``super()``.

    The module stays the same object, with its parameters, hooks and place in the model, so that optimizers, checkpoints
    and names keep working. As with ``torch.nn.utils.parametrize``, the whole module can no longer be pickled; its
    ``state_dict()`` can."""
    bases = (mixin, type(module))
    if not isinstance(module, mixin):
        if bases not in _combined:
            _combined[bases] = type(f"{mixin.__name__}{bases[1].__name__}", bases, {})
        module.__class__ = _combined[bases]
