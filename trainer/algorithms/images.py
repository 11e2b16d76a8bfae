"""Images in another layout, with holes, or of growing size."""

import torch
from torch.nn import functional

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.event import Event
from offloop.trainer.algorithms.common import check_images, check_key, random_span
from offloop.trainer.arguments.checks import check_choice, check_count, check_number
from offloop.trainer.device.batch import BatchKey
from offloop.trainer.engine.state import Algorithm, AlgorithmLogger, State


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
        input_key: key of the images (of shape (rows, channels, height, width)) in the batch, see
            :mod:`offloop.trainer.device.batch`.

    Paper: DeVries & Taylor 2017, "Improved Regularization of Convolutional Neural Networks with Cutout",
    arXiv:1708.04552. Reference: ``composer/algorithms/cutout``."""

    def __init__(self, num_holes: int = 1, length: float = 0.5, input_key: BatchKey = 0) -> None:
        self.num_holes = check_count(num_holes, "num_holes")
        self.length = check_number(length, "length", above=0, most=1)
        self.input_key = check_key("input_key", input_key)

    def match(self, event: Event, state: State) -> bool:
        return event is Event.AFTER_DATALOADER

    def apply(self, event: Event, state: State, logger: AlgorithmLogger) -> None:
        images = check_images(state.batch_get_item(self.input_key), "CutOut").clone()
        height, width = images.shape[2:]
        length = int(self.length * min(height, width))
        for _ in range(self.num_holes):
            rows = random_span(height, length)
            columns = random_span(width, length)
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
        mode: ``resize`` for nearest-neighbour interpolation, ``crop`` for a piece of the batch's images, at a random
            place that is the same for all of them.
        initial_scale: scale at the start, above 0 and up to 1.
        finetune_fraction: share of the training at full size, at its end.
        delay_fraction: share of the training at the initial scale, at its start; at most 1 together with
            ``finetune_fraction``.
        size_increment: the reduced width is a multiple of so many pixels.
        input_key: key of the images (of shape (rows, channels, height, width)) in the batch, see
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
        input_key: BatchKey = 0,
    ) -> None:
        self.mode = check_choice(mode, "mode", ("resize", "crop"))
        self.initial_scale = check_number(initial_scale, "initial_scale", above=0, most=1)
        self.finetune_fraction = check_number(finetune_fraction, "finetune_fraction", most=1)
        self.delay_fraction = check_number(delay_fraction, "delay_fraction", most=1)
        if delay_fraction + finetune_fraction > 1:
            raise ConfigurationError(
                f"delay_fraction {delay_fraction} and finetune_fraction {finetune_fraction} are more than the whole "
                "training: use two that add up to at most 1"
            )
        self.size_increment = check_count(size_increment, "size_increment")
        self.input_key = check_key("input_key", input_key)

    def match(self, event: Event, state: State) -> bool:
        return event is Event.AFTER_DATALOADER

    def apply(self, event: Event, state: State, logger: AlgorithmLogger) -> None:
        images = check_images(state.batch_get_item(self.input_key), "ProgressiveResizing")
        scale = self._scale(float(state.get_elapsed_duration() or 0))
        height, width = self._size(images, scale)
        if (height, width) != images.shape[2:]:
            state.batch_set_item(self.input_key, self._reduce(images, height, width))
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

    def _reduce(self, images: torch.Tensor, height: int, width: int) -> torch.Tensor:
        if self.mode == "resize":
            return functional.interpolate(images, size=(height, width), mode="nearest")
        full_height, full_width = images.shape[2:]
        top = int(torch.randint(full_height - height + 1, ()))
        left = int(torch.randint(full_width - width + 1, ()))
        return images[..., top : top + height, left : left + width]
