"""Layers that are dropped at random, frozen one after the other, or downsample without aliasing."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.event import Event
from offloop.bus.types.time import Time, TimeInput
from offloop.trainer.algorithms.common import change_behavior, check_point, share_of_way
from offloop.trainer.arguments.checks import check_choice, check_count, check_number
from offloop.trainer.arguments.values import describe
from offloop.trainer.engine.state import Algorithm, AlgorithmLogger, State


class StochasticDepth(Algorithm):
    """Drops residual layers at random in training, and uses all of them in evaluation.

    A residual layer adds something to its first argument and returns a tensor of the same shape. The addend is dropped
    with the layer's drop rate, and otherwise divided by one minus that rate, which keeps its mean. Parameters and their
    names stay. Random numbers come from torch's global generator. During ``drop_warmup`` the drop rate of the last
    layer is logged as ``stochastic_depth/drop_rate``.

    Args:
        target_layer_name: the name of the layers' class, or of a base class, such as ``"Layer"``.
        stochastic_method: ``block`` drops a layer for a whole microbatch, without computing it. ``sample`` decides for
            each row, and saves no time.
        drop_rate: probability of dropping a layer, from 0 up to, but not including, 1.
        drop_distribution: ``uniform`` for the same rate in all layers. ``linear`` for rates that grow evenly from layer
            to layer, in the order in which the model registers them, up to ``drop_rate`` in the last one.
        drop_warmup: how long the rates take to grow: a share of the training, or a count such as ``3ep``.

    Paper: Huang et al. 2016, "Deep Networks with Stochastic Depth", arXiv:1603.09382. Reference:
    ``composer/algorithms/stochastic_depth``."""

    def __init__(
        self,
        target_layer_name: str,
        stochastic_method: str = "block",
        drop_rate: float = 0.2,
        drop_distribution: str = "linear",
        drop_warmup: TimeInput = "0dur",
    ) -> None:
        if not isinstance(target_layer_name, str) or not target_layer_name:
            raise ConfigurationError(
                f"target_layer_name {target_layer_name!r} is not a name: use the name of a class, such as 'Layer'"
            )
        self.target_layer_name = target_layer_name
        self.stochastic_method: str = check_choice(stochastic_method, "stochastic_method", _METHODS)
        self.drop_rate: float = check_number(drop_rate, "drop_rate", most=1)
        if self.drop_rate == 1:
            raise ConfigurationError("drop_rate 1 would leave out everything: use a number below 1")
        self.drop_distribution: str = check_choice(drop_distribution, "drop_distribution", ("linear", "uniform"))
        self.drop_warmup: Time = check_point("drop_warmup", drop_warmup)
        self._layers: list[Droppable] = []

    @property
    def find_unused_parameters(self) -> bool:
        """Whether some parameters may get no gradient, for several ranks."""
        return self.stochastic_method == "block"

    def match(self, event: Event, state: State) -> bool:
        return event is Event.INIT or (event is Event.BATCH_START and self.drop_warmup.value > 0)

    def apply(self, event: Event, state: State, logger: AlgorithmLogger) -> None:
        if event is Event.INIT:
            self._layers = self._change_layers(state.model)
            self._set_rates(self.drop_rate)
        else:
            rate = self.drop_rate * share_of_way(state, self.drop_warmup)
            self._set_rates(rate)
            logger.log_metrics({"stochastic_depth/drop_rate": rate})

    def check(self, state: State) -> None:
        self._find_layers(state.model)

    def _set_rates(self, rate: float) -> None:
        for number, layer in enumerate(self._layers, 1):
            depth = number / len(self._layers) if self.drop_distribution == "linear" else 1.0
            layer.stochastic_depth_rate = depth * rate

    def _find_layers(self, model: nn.Module) -> list[nn.Module]:
        name = self.target_layer_name
        named = [one for one in model.modules() if any(kind.__name__ == name for kind in type(one).__mro__)]
        if not named:
            kinds = sorted({type(module).__name__ for module in model.modules()})
            raise ConfigurationError(
                f"target_layer_name {name!r} names no layer of the model: it has {', '.join(kinds)}"
            )
        return named

    def _change_layers(self, model: nn.Module) -> "list[Droppable]":
        named = self._find_layers(model)
        for module in named:
            change_behavior(module, _METHODS[self.stochastic_method])
        return [module for module in named if isinstance(module, Droppable)]


class Droppable(nn.Module):
    """A residual layer that may be dropped in training."""

    # A name that no other layer is likely to have.
    stochastic_depth_rate: float = 0.0


class BlockDroppable(Droppable):
    """A residual layer that is dropped for all rows or for none."""

    def forward(self, inputs: Any, *arguments: Any, **options: Any) -> Any:
        rate = self.stochastic_depth_rate
        if not self.training or not rate:
            return super().forward(inputs, *arguments, **options)
        if torch.rand(()).item() < rate:
            return inputs
        return inputs + _added(self, inputs, super().forward(inputs, *arguments, **options)) / (1 - rate)


class SampleDroppable(Droppable):
    """A residual layer that is dropped for some rows."""

    def forward(self, inputs: Any, *arguments: Any, **options: Any) -> Any:
        rate = self.stochastic_depth_rate
        outputs = super().forward(inputs, *arguments, **options)
        if not self.training or not rate:
            return outputs
        added = _added(self, inputs, outputs)
        kept = torch.rand(len(inputs), device=inputs.device) >= rate
        return inputs + added / (1 - rate) * kept.view(-1, *[1] * (added.ndim - 1))


def _added(layer: Droppable, inputs: Any, outputs: Any) -> torch.Tensor:
    if isinstance(outputs, torch.Tensor) and outputs.shape == inputs.shape:
        added: torch.Tensor = outputs - inputs
        return added
    raise ConfigurationError(
        f"StochasticDepth cannot leave out a {type(layer).__name__}, which turns {describe(inputs)} into "
        f"{describe(outputs)}: "
        "name residual layers, whose outputs have the shape of their inputs, as target_layer_name"
    )


_METHODS: dict[str, type[Droppable]] = {"block": BlockDroppable, "sample": SampleDroppable}


class LayerFreezing(Algorithm):
    """Freezes the layers of the model one after the other, from the first on, so that the backward pass gets faster.

    Layers are the modules with parameters of their own, in the order in which the model registers them. After
    ``freeze_start`` the share of frozen ones grows evenly, at the end of each epoch, up to ``freeze_level`` at the end
    of the training; the last layer is always trained. A parameter shared with a later layer is frozen with that one.
    Frozen parameters get no gradients, and the optimizers forget them; statistics of batch normalization are still
    updated. The number and the share (0 to 1) of frozen layers are logged as ``layer_freezing/layers_frozen`` and
    ``layer_freezing/percentage_frozen``.

    Args:
        freeze_start: share of the training without frozen layers, from 0 to 1.
        freeze_level: share of frozen layers at the end, from 0 to 1.

    Papers: Brock et al. 2017, "FreezeOut: Accelerate Training by Progressively Freezing Layers", arXiv:1706.04983;
    Raghu et al. 2017, "SVCCA", arXiv:1706.05806, section 4.1. Reference: ``composer/algorithms/layer_freezing``."""

    find_unused_parameters = True  # some parameters get no gradient, for several ranks

    def __init__(self, freeze_start: float = 0.5, freeze_level: float = 1.0) -> None:
        self.freeze_start: float = check_number(freeze_start, "freeze_start", most=1)
        self.freeze_level: float = check_number(freeze_level, "freeze_level", most=1)
        self._frozen = 0
        self._state: State | None = None

    def match(self, event: Event, state: State) -> bool:
        return event in (Event.INIT, Event.EPOCH_END)

    def apply(self, event: Event, state: State, logger: AlgorithmLogger) -> None:
        if event is Event.INIT:
            self._state = state
            return
        share = self._share_at(float(state.get_elapsed_duration() or 0))
        # Rounded, because 0.58 * 50 is a little less than 29. A longer training keeps layers frozen.
        self._freeze(state, max(self._frozen, int(round(share * (len(_layers_of(state.model)) - 1), 6))))
        logger.log_metrics({"layer_freezing/layers_frozen": self._frozen, "layer_freezing/percentage_frozen": share})

    def state_dict(self) -> dict[str, Any]:
        return {"layers_frozen": self._frozen} if self._frozen else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert self._state is not None  # since INIT
        self._freeze(self._state, state.get("layers_frozen", 0))

    def _share_at(self, elapsed: float) -> float:
        if elapsed <= self.freeze_start:
            return 0.0
        return self.freeze_level * min(1.0, (elapsed - self.freeze_start) / (1 - self.freeze_start))

    def _freeze(self, state: State, count: int) -> None:
        self._frozen = count
        layers = _layers_of(state.model)
        trained = {id(parameter) for layer in layers[count:] for parameter in layer.parameters(recurse=False)}
        frozen = {
            id(parameter): parameter
            for layer in layers[:count]
            for parameter in layer.parameters(recurse=False)
            if id(parameter) not in trained
        }
        for parameter in frozen.values():
            parameter.requires_grad_(False)
            parameter.grad = None
        for optimizer in state.optimizers:
            for group in optimizer.param_groups:
                group["params"] = [parameter for parameter in group["params"] if id(parameter) not in frozen]
            for parameter in frozen.values():
                optimizer.state.pop(parameter, None)


def _layers_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if next(module.parameters(recurse=False), None) is not None]


class BlurPool(Algorithm):
    """Blurs images, and the outputs of layers, where the model downsamples them.

    Then a shift of the input by a pixel changes the output less. The filter is ``[1, 2, 1]`` in both directions,
    divided by 16, with zeros around the edges. Max pools take the maximum at every pixel, and the blurred maxima are
    downsampled. Parameters, their names and the shapes of all outputs stay. The numbers of changed layers are logged as
    ``blurpool/num_blurpool_layers`` and ``blurpool/num_blurconv_layers``.

    Args:
        replace_convs: blur at two-dimensional convolutions with a stride above 1.
        replace_maxpools: blur at two-dimensional max pools with a stride above 1, except those that round their
            output's size up (``ceil_mode``) or return indices.
        blur_first: blur the input of a convolution. Otherwise it is computed at every pixel, and its output blurred and
            downsampled, as in the paper, which takes four times as long at a stride of 2.
        min_channels: convolutions of fewer input channels stay, such as the first one, whose input are colors.

    Paper: Zhang 2019, "Making Convolutional Networks Shift-Invariant Again", arXiv:1904.11486. Reference:
    ``composer/algorithms/blurpool``."""

    def __init__(
        self, replace_convs: bool = True, replace_maxpools: bool = True, blur_first: bool = True, min_channels: int = 16
    ) -> None:
        if not replace_convs and not replace_maxpools:
            raise ConfigurationError(
                "replace_convs and replace_maxpools are both False: leave BlurPool out, or set one"
            )
        self.replace_convs = replace_convs
        self.replace_maxpools = replace_maxpools
        self.blur_first = blur_first
        self.min_channels: int = check_count(min_channels, "min_channels", 0)

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
    """A layer without a stride, whose output is blurred and downsampled."""

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
    # Left out of the state, so that weights move between blurred models and others.
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
