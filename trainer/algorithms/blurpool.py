"""Sampling down without aliasing."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.event import Event
from offloop.trainer.algorithms.common import change_behavior
from offloop.trainer.arguments.checks import check_count
from offloop.trainer.engine.state import Algorithm, AlgorithmLogger, State


class BlurPool(Algorithm):
    """Blurs images, and the outputs of layers, where the model downsamples them, so that a shift of the input by a
    pixel changes the output less.

    The filter is ``[1, 2, 1]`` in both directions, divided by 16, with zeros around the edges. Max pools take the
    maximum at every pixel, and the blurred maxima are downsampled. Parameters, their names and the shapes of all
    outputs stay. The numbers of changed layers are logged as ``blurpool/num_blurpool_layers`` and
    ``blurpool/num_blurconv_layers``.

    Args:
        replace_convs: blur at two-dimensional convolutions with a stride above 1.
        replace_maxpools: blur at two-dimensional max pools with a stride above 1, except for those that round their
            output's size up (``ceil_mode``) or return indices.
        blur_first: blur the input of a convolution. Otherwise it is computed at every pixel, and its output blurred
            and downsampled, as in the paper: at a stride of 2 that takes four times as long.
        min_channels: convolutions of fewer input channels stay, such as a first one, which sees colors.

    Paper: Zhang 2019, "Making Convolutional Networks Shift-Invariant Again", arXiv:1904.11486. Reference:
    ``composer/algorithms/blurpool``."""

    def __init__(
        self,
        replace_convs: bool = True,
        replace_maxpools: bool = True,
        blur_first: bool = True,
        min_channels: int = 16,
    ) -> None:
        if not replace_convs and not replace_maxpools:
            raise ConfigurationError(
                "replace_convs and replace_maxpools are both False: leave BlurPool out, or set one"
            )
        self.replace_convs = replace_convs
        self.replace_maxpools = replace_maxpools
        self.blur_first = blur_first
        self.min_channels = check_count(min_channels, "min_channels", 0)

    def match(self, event: Event, state: State) -> bool:
        return event is Event.INIT

    def apply(self, event: Event, state: State, logger: AlgorithmLogger) -> None:
        for module in state.model.modules():
            if isinstance(module, BlurredBefore | BlurredAfter):
                continue
            if self.replace_maxpools and _is_pool(module):
                _make_blurred(module, BlurredAfter)
            elif self.replace_convs and _is_convolution(module, self.min_channels):
                _make_blurred(module, BlurredBefore if self.blur_first else BlurredAfter)
        blurred = [module for module in state.model.modules() if isinstance(module, BlurredBefore | BlurredAfter)]
        pools = sum(isinstance(module, nn.MaxPool2d) for module in blurred)
        logger.log_metrics(
            {"blurpool/num_blurpool_layers": pools, "blurpool/num_blurconv_layers": len(blurred) - pools}
        )

    def check(self, state: State) -> None:
        if not any(self._goes_with(module) for module in state.model.modules()):
            raise ConfigurationError(
                f"BlurPool finds nothing to blur in {type(state.model).__name__}: it needs a MaxPool2d with a stride, "
                f"or a Conv2d with a stride and at least {self.min_channels} input channels (min_channels)"
            )

    def _goes_with(self, module: nn.Module) -> bool:
        return (
            isinstance(module, BlurredBefore | BlurredAfter)
            or (self.replace_maxpools and _is_pool(module))
            or (self.replace_convs and _is_convolution(module, self.min_channels))
        )


class BlurredBefore(nn.Module):
    """A layer whose input is blurred."""

    blur_filter: Tensor

    def forward(self, inputs: Tensor) -> Any:
        return super().forward(_blur(inputs, self.blur_filter))


class BlurredAfter(nn.Module):
    """A layer that does not sample down by itself: its output is blurred and sampled down."""

    blur_filter: Tensor
    blur_stride: tuple[int, int]

    def forward(self, inputs: Tensor) -> Any:
        return _blur(super().forward(inputs), self.blur_filter, self.blur_stride)


def _is_pool(module: nn.Module) -> bool:
    if not isinstance(module, nn.MaxPool2d) or module.ceil_mode or module.return_indices:
        return False
    return max(_pair(module.stride)) > 1


def _is_convolution(module: nn.Module, min_channels: int) -> bool:
    return isinstance(module, nn.Conv2d) and module.in_channels >= min_channels and max(module.stride) > 1


def _make_blurred(module: Any, mixin: type[nn.Module]) -> None:
    edge = torch.tensor([1.0, 2.0, 1.0])
    # Left out of the state, so that weights go from blurred models to others and back.
    module.register_buffer("blur_filter", edge.outer(edge)[None, None] / 16, persistent=False)
    if mixin is BlurredAfter:
        module.blur_stride, module.stride = _pair(module.stride), (1, 1)
    change_behavior(module, mixin)


def _blur(images: Tensor, kernel: Tensor, stride: int | tuple[int, int] = 1) -> Tensor:
    channels = images.shape[-3]
    weight = kernel.to(images.dtype).expand(channels, 1, 3, 3)
    return functional.conv2d(images, weight, stride=stride, padding=1, groups=channels)


def _pair(stride: Any) -> tuple[int, int]:
    return (stride, stride) if isinstance(stride, int) else tuple(stride)
