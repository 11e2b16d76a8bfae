"""Images in another layout, with holes, or of growing size."""

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.event import Event
from offloop.trainer.algorithms.common import check_images, check_key, random_span
from offloop.trainer.arguments.checks import check_choice, check_count, check_number
from offloop.trainer.arguments.values import describe
from offloop.trainer.device.batch import BatchKey
from offloop.trainer.engine.state import Algorithm, AlgorithmLogger, State

# Of height and width. Targets may have fewer pixels than the images, and are reduced in proportion.
_Shares = tuple[Fraction, Fraction]


class ChannelsLast(Algorithm):
    """Lays out all parameters of four dimensions so that the channels of a pixel are neighbours in memory.

    Convolutions then compute in this layout and pass it on, which is faster on GPUs with tensor cores, above all in 16
    bits, and on many CPUs. Shapes and values do not change.

    Source: the PyTorch tutorial "Channels Last Memory Format in PyTorch". Reference:
    ``composer/algorithms/channels_last``."""

    def match(self, event: Event, state: State) -> bool:
        return event is Event.INIT

    def apply(self, event: Event, state: State, logger: AlgorithmLogger) -> None:
        state.model.to(memory_format=torch.channels_last)


class CutOut(Algorithm):
    """Sets square holes in the images to zero, at random places that are the same for all images of a batch.

    The holes stay in the batch until its end. They are cut off at the border.

    Args:
        num_holes: number of holes; they may overlap.
        length: side of a hole, as a share of the images' shorter side, above 0 and up to 1; rounded down to pixels.
        uniform_sampling: every pixel is in a hole with the same probability. By default a hole's middle is drawn from
            all pixels, as in the paper.
        input_key: key of the images (of shape (rows, channels, height, width)) in the batch, see
            :mod:`offloop.trainer.device.batch`.

    Paper: DeVries & Taylor 2017, "Improved Regularization of Convolutional Neural Networks with Cutout",
    arXiv:1708.04552. Reference: ``composer/algorithms/cutout``."""

    def __init__(
        self, num_holes: int = 1, length: float = 0.5, uniform_sampling: bool = False, input_key: BatchKey = 0
    ) -> None:
        self.num_holes: int = check_count(num_holes, "num_holes")
        self.length: float = check_number(length, "length", above=0, most=1)
        self.uniform_sampling = uniform_sampling
        self.input_key: BatchKey = check_key("input_key", input_key)

    def match(self, event: Event, state: State) -> bool:
        return event is Event.AFTER_DATALOADER

    def apply(self, event: Event, state: State, logger: AlgorithmLogger) -> None:
        images = check_images(state.batch_get_item(self.input_key), "CutOut").clone()
        height, width = images.shape[2:]
        length = int(self.length * min(height, width))
        for _ in range(self.num_holes):
            rows = random_span(height, length, self.uniform_sampling)
            columns = random_span(width, length, self.uniform_sampling)
            images[:, :, rows, columns] = 0
        state.batch_set_item(self.input_key, images)


class ProgressiveResizing(Algorithm):
    """Starts on reduced images, lets them grow, and ends on images of full size.

    Early batches take less time, and the model is tuned at its final size. The scale is ``initial_scale`` for the first
    ``delay_fraction`` of the training, 1 for the last ``finetune_fraction``, and grows evenly in between. The width is
    rounded to a multiple of ``size_increment``, the height follows in proportion. With a ``max_duration`` in epochs the
    size changes only between epochs, in batches or samples within them. Height, width and scale are logged as
    ``progressive_resizing/height``, ``/width`` and ``/scale_factor``.

    Args:
        mode: ``resize`` for nearest-neighbour interpolation, also of class numbers, ``crop`` for a piece of the batch's
            images, at a random place that is the same for all of them.
        initial_scale: scale at the start, above 0 and up to 1.
        finetune_fraction: share of the training at full size, at its end.
        delay_fraction: share of the training at the initial scale, at its start; at most 1 together with
            ``finetune_fraction``.
        size_increment: the reduced width is a multiple of so many pixels.
        resize_targets: reduce the targets too, of shape (rows, height, width) or (rows, channels, height, width), if
            they have a value for each pixel.
        input_key, target_key: keys of images (of shape (rows, channels, height, width)) and targets in the batch, see
            :mod:`offloop.trainer.device.batch`.

    Sources: Howard & Gugger, fast.ai, "Deep Learning for Coders", chapter 7, for the growing images; Touvron et al.
    2019, "Fixing the train-test resolution discrepancy", arXiv:1906.06423, for the end at full size. Reference:
    ``composer/algorithms/progressive_resizing``."""

    def __init__(
        self,
        mode: str = "resize",
        initial_scale: float = 0.5,
        finetune_fraction: float = 0.2,
        delay_fraction: float = 0.5,
        size_increment: int = 4,
        resize_targets: bool = False,
        input_key: BatchKey = 0,
        target_key: BatchKey = 1,
    ) -> None:
        self.mode: str = check_choice(mode, "mode", ("resize", "crop"))
        self.initial_scale: float = check_number(initial_scale, "initial_scale", above=0, most=1)
        self.finetune_fraction: float = check_number(finetune_fraction, "finetune_fraction", most=1)
        self.delay_fraction: float = check_number(delay_fraction, "delay_fraction", most=1)
        if delay_fraction + finetune_fraction > 1:
            raise ConfigurationError(
                f"delay_fraction {delay_fraction} and finetune_fraction {finetune_fraction} are more than the whole "
                "training: use two that add up to at most 1"
            )
        self.size_increment: int = check_count(size_increment, "size_increment")
        self.resize_targets = resize_targets
        self.input_key: BatchKey = check_key("input_key", input_key)
        self.target_key: BatchKey = check_key("target_key", target_key)

    def match(self, event: Event, state: State) -> bool:
        return event is Event.AFTER_DATALOADER

    def apply(self, event: Event, state: State, logger: AlgorithmLogger) -> None:
        images = check_images(state.batch_get_item(self.input_key), "ProgressiveResizing")
        scale = self._scale(float(state.get_elapsed_duration() or 0))
        height, width = self._size(images, scale)
        if (height, width) != images.shape[2:]:
            reduce = self._reduction(images, height, width)
            state.batch_set_item(self.input_key, reduce(images))
            if self.resize_targets:
                state.batch_set_item(self.target_key, reduce(_check_targets(state.batch_get_item(self.target_key))))
        sizes = {"height": height, "width": width, "scale_factor": scale}
        logger.log_metrics({f"progressive_resizing/{name}": size for name, size in sizes.items()})

    def _scale(self, elapsed: float) -> float:
        if elapsed < self.delay_fraction:
            return self.initial_scale
        growth_end = 1 - self.finetune_fraction
        if elapsed >= growth_end:
            return 1.0
        grown = (elapsed - self.delay_fraction) / (growth_end - self.delay_fraction)
        return self.initial_scale + (1 - self.initial_scale) * grown

    def _size(self, images: torch.Tensor, scale: float) -> tuple[int, int]:
        height, width = images.shape[2:]
        if scale == 1:
            return height, width
        steps = max(1, round(width * scale / self.size_increment))
        scaled = min(width, steps * self.size_increment)
        return max(1, height * scaled // width), scaled

    def _reduction(self, images: torch.Tensor, height: int, width: int) -> Callable[[torch.Tensor], torch.Tensor]:
        full_height, full_width = images.shape[2:]
        ratios = (Fraction(height, full_height), Fraction(width, full_width))
        if self.mode == "resize":
            return partial(_resize, ratios=ratios)
        top, left = torch.randint(full_height - height + 1, ()), torch.randint(full_width - width + 1, ())
        return partial(_crop, ratios=ratios, starts=(Fraction(int(top), full_height), Fraction(int(left), full_width)))


def _resize(values: torch.Tensor, ratios: _Shares) -> torch.Tensor:
    sides = [_part(side, ratio) for side, ratio in zip(values.shape[-2:], ratios, strict=True)]
    # Torch does not interpolate integers; class numbers are exact in double precision.
    numbers = values if values.is_floating_point() else values.double()
    images = numbers if numbers.ndim == 4 else numbers.unsqueeze(1)
    resized = functional.interpolate(images, size=sides, mode="nearest")
    return resized.reshape(*values.shape[:-2], *sides).to(values.dtype)


def _crop(values: torch.Tensor, ratios: _Shares, starts: _Shares) -> torch.Tensor:
    spans = []
    for side, ratio, start in zip(values.shape[-2:], ratios, starts, strict=True):
        first = int(side * start)
        spans.append(slice(first, first + _part(side, ratio)))
    return values[..., spans[0], spans[1]]


def _part(side: int, ratio: Fraction) -> int:
    return max(1, int(side * ratio))


def _check_targets(targets: Any) -> torch.Tensor:
    if isinstance(targets, torch.Tensor) and targets.ndim in (3, 4):
        return targets
    raise ConfigurationError(
        f"ProgressiveResizing cannot resize targets ({describe(targets)}): it needs (rows, height, width) or "
        "(rows, channels, height, width); name them by target_key, or leave out resize_targets"
    )
