"""Training with layers left out at random."""

from typing import Any

import torch
from torch import nn

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.event import Event
from offloop.bus.types.time import TimeInput
from offloop.trainer.algorithms.common import change_behavior, check_point, share_of_way
from offloop.trainer.arguments.checks import check_choice, check_number
from offloop.trainer.arguments.values import describe
from offloop.trainer.engine.state import Algorithm, AlgorithmLogger, State


class StochasticDepth(Algorithm):
    """Leaves out residual layers at random in training, and uses all of them in evaluation.

    A residual layer adds something to its first argument and returns a tensor of the same shape. The addend is left out
    with the layer's drop rate, and otherwise divided by one minus that rate, which keeps its mean. Parameters and their
    names stay. Random numbers come from torch's global generator. During ``drop_warmup`` the drop rate of the last
    layer is logged as ``stochastic_depth/drop_rate``.

    Args:
        target_layer_name: the name of the layers' class, or of one that it inherits from, such as ``"Layer"``.
        stochastic_method: ``block`` leaves a layer out for a whole microbatch, without computing it; ``sample`` decides
            for each row, and saves no time.
        drop_rate: probability of leaving a layer out, from 0 up to, but not including, 1.
        drop_distribution: ``uniform`` for the same rate in all layers; ``linear`` for rates that grow evenly from layer
            to layer, in the order in which the model registers them, up to ``drop_rate`` in the last one.
        drop_warmup: how long the rates take to grow to these: a share of the training, or a count such as ``3ep``.

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
        self.stochastic_method = check_choice(stochastic_method, "stochastic_method", _METHODS)
        self.drop_rate = check_number(drop_rate, "drop_rate", most=1)
        if self.drop_rate == 1:
            raise ConfigurationError("drop_rate 1 would leave out everything: use a number below 1")
        self.drop_distribution = check_choice(drop_distribution, "drop_distribution", ("linear", "uniform"))
        self.drop_warmup = check_point("drop_warmup", drop_warmup)
        self._layers: list[Droppable] = []

    @property
    def find_unused_parameters(self) -> bool:
        """Several ranks have to expect that parameters get no gradient."""
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
    """A residual layer of which something can be left out in training."""

    # A name that no other layer is likely to have.
    stochastic_depth_rate = 0.0


class BlockDroppable(Droppable):
    """A residual layer that is left out for all rows or for none."""

    def forward(self, inputs: Any, *arguments: Any, **options: Any) -> Any:
        rate = self.stochastic_depth_rate
        if not self.training or not rate:
            return super().forward(inputs, *arguments, **options)
        if torch.rand(()).item() < rate:
            return inputs
        return inputs + _added(self, inputs, super().forward(inputs, *arguments, **options)) / (1 - rate)


class SampleDroppable(Droppable):
    """A residual layer that is left out for some rows."""

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
