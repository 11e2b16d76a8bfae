"""The optimizers and schedulers of a training: each is made as soon as what it depends on is known."""

from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from trainer.arguments.checks import check_optimized, check_schedulers, given_optimizers, make_optimizers
from trainer.engine.state import State
from trainer.schedulers import compile_scheduler


class Optimization:
    """What a trainer was given as ``optimizers``, ``schedulers`` and ``scale_schedule_ratio``.

    Raises :class:`bus.errors.ConfigurationError` for optimizers and schedulers that are not allowed."""

    def __init__(self, optimizers: Any, schedulers: Any, scale_schedule_ratio: float) -> None:
        made = given_optimizers(optimizers)
        self.optimizers = made or []
        """Those that were given; none while they have yet to be made."""
        self._factory = optimizers if made is None else None
        self._waiting = check_schedulers(schedulers, made)
        self._scale_schedule_ratio = scale_schedule_ratio

    def make_optimizers(self, state: State) -> None:
        """Puts the optimizers into the state, when algorithms have made their changes to the model.

        Raises :class:`bus.errors.ConfigurationError` for optimizers of another model, and for schedulers of other
        optimizers."""
        if self._factory is not None:
            state.optimizers[:] = make_optimizers(self._factory(state.model))
        check_optimized(state.optimizers, state.model)
        check_schedulers(self._waiting, state.optimizers)

    def compile_schedulers(self, state: State) -> bool:
        """Puts the schedulers into the state, once it is known how long the training is where one has to know; says
        whether they are there."""
        if state.max_duration is None and any(not isinstance(one, LRScheduler) for one in self._waiting):
            return False
        for given in self._waiting:
            if isinstance(given, LRScheduler):
                state.schedulers.append(given)
            else:
                state.schedulers += [
                    compile_scheduler(given, optimizer, state, self._scale_schedule_ratio)
                    for optimizer in state.optimizers
                ]
        self._waiting = []
        return True
