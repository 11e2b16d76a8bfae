"""Training towards flat minima."""

import torch

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.event import Event
from offloop.trainer.arguments.checks import check_count, check_number
from offloop.trainer.engine.state import Algorithm, AlgorithmLogger, State


class SAM(Algorithm):
    """Sharpness-aware minimization: steps along the gradients at the point nearby where the loss is highest, so that
    training prefers minima with low loss all around.

    The point is ``weights + rho * gradients / (norm + epsilon)``, with the norm over all gradients. Gradients are
    computed again there, so a batch takes twice the time; not with precision ``amp_fp16``. ``state.batch_loss`` is the
    loss at the weights; ``state.outputs``, ``state.loss`` and training metrics are those of the second pass.

    Args:
        rho: distance of the point, 0 or more.
        epsilon: keeps the division from failing where the gradients vanish.
        interval: every how many batches to do this; the batches in between are trained on as usual.

    Paper: Foret et al. 2021, "Sharpness-Aware Minimization for Efficiently Improving Generalization", arXiv:2010.01412,
    algorithm 1. Reference: ``composer/algorithms/sam``."""

    def __init__(self, rho: float = 0.05, epsilon: float = 1e-12, interval: int = 1) -> None:
        self.rho = check_number(rho, "rho")
        self.epsilon = check_number(epsilon, "epsilon")
        self.interval = check_count(interval, "interval")

    def match(self, event: Event, state: State) -> bool:
        return event is Event.AFTER_TRAIN_BATCH and (int(state.timestamp.batch) + 1) % self.interval == 0

    def apply(self, event: Event, state: State, logger: AlgorithmLogger) -> None:
        groups = [group for optimizer in state.optimizers for group in optimizer.param_groups]
        moved = [one for group in groups for one in group["params"] if one.grad is not None]
        # Copies, because subtracting what was added would not always give the same bits.
        kept = [parameter.detach().clone() for parameter in moved]
        with torch.no_grad():
            norm = torch.stack([torch.linalg.vector_norm(one.grad) for one in moved]).norm()
            for parameter in moved:
                parameter.add_(parameter.grad * (self.rho / (norm + self.epsilon)))
        try:
            state.recompute_gradients()
        finally:
            with torch.no_grad():
                for parameter, weights in zip(moved, kept, strict=True):
                    parameter.copy_(weights)

    def check(self, state: State) -> None:
        if state.scaler is not None:
            raise ConfigurationError(f"SAM does not go with precision {state.precision!r}: use amp_bf16 or fp32")
