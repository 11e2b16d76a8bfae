"""Training fewer and fewer layers."""

from typing import Any

from torch import nn

from offloop.bus.types.event import Event
from offloop.trainer.arguments.checks import check_number
from offloop.trainer.engine.state import Algorithm, AlgorithmLogger, State


class LayerFreezing(Algorithm):
    """Freezes the layers of the model one after the other, from the first on, so that the backward pass gets cheaper.

    Layers are the modules that have parameters of their own, in the order in which the model registers them. After
    ``freeze_start`` the share of frozen ones grows evenly, at the end of each epoch, up to ``freeze_level`` at the end
    of the training; the last layer is always trained. A parameter that a later layer shares is frozen with that one.
    Frozen parameters get no gradients, and the optimizers forget them; statistics of batch normalization are still
    updated. The number and the share (0 to 1) of frozen layers are logged as ``layer_freezing/layers_frozen`` and
    ``layer_freezing/percentage_frozen``.

    Args:
        freeze_start: share of the training in which nothing is frozen, from 0 to 1.
        freeze_level: share of the layers that are frozen at the end, from 0 to 1.

    Papers: Brock et al. 2017, "FreezeOut: Accelerate Training by Progressively Freezing Layers", arXiv:1706.04983;
    Raghu et al. 2017, "SVCCA", arXiv:1706.05806, section 4.1. Reference: ``composer/algorithms/layer_freezing``."""

    find_unused_parameters = True
    """Several ranks have to expect that parameters get no gradient."""

    def __init__(self, freeze_start: float = 0.5, freeze_level: float = 1.0) -> None:
        self.freeze_start = check_number(freeze_start, "freeze_start", most=1)
        self.freeze_level = check_number(freeze_level, "freeze_level", most=1)
        self._frozen = 0
        self._state: State | None = None

    def match(self, event: Event, state: State) -> bool:
        return event in (Event.INIT, Event.EPOCH_END)

    def apply(self, event: Event, state: State, logger: AlgorithmLogger) -> None:
        if event is Event.INIT:
            self._state = state
            return
        share = self._share_at(float(state.get_elapsed_duration() or 0))
        # Rounded, because 0.58 * 50 is a little less than 29. A longer training does not thaw what is frozen.
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
