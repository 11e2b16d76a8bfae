"""Fields of gradients in loops that discard the gradients before the batch ends."""

import functools
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.event import Event
from offloop.trainer.engine.state import State
from offloop.trainer.fields.field import Field, FieldFunction, FieldNotReadyError, hook_optimizers

OF_GRADIENTS = ("gradient_norm", "gradient_norms", "optimizer_norms", "gradient_histograms")


class GradientProbe:
    """Computes a due field right after the optimizer's step, from the gradients that it used."""

    def __init__(self, compute: FieldFunction, state: State, is_due: Callable[[], bool]) -> None:
        self._compute = compute
        self._state = state
        self._is_due = is_due
        self._computed_at = -1
        self._found: Any = None
        self._trouble: Exception | None = None
        hook_optimizers(register_optimizer_step_post_hook, self._after_step)

    def found(self) -> Any:
        found, self._found = self._found, None
        if self._trouble is not None:
            raise self._trouble
        if found is None:
            raise FieldNotReadyError("this batch began before the field was requested")
        return found

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        batch = self._state.timestamp.values.batch
        if batch == self._computed_at or all(optimizer is not one for one in self._state.optimizers):
            return
        self._computed_at = batch
        self._found, self._trouble = None, None
        if self._is_due():
            try:
                self._found = self._compute(self._state)
            # This runs within the optimizer's step, which must not fail.
            except (ConfigurationError, RuntimeError) as error:
                self._trouble = error


def keep_gradients(fields: dict[str, Field]) -> None:
    """Compute fields of gradients right after the step, and send them at the end of the batch."""
    for name in OF_GRADIENTS:
        field = fields[name]
        probe = functools.partial(GradientProbe, field.compute)
        fields[name] = field._replace(compute=GradientProbe.found, events=frozenset({Event.BATCH_END}), probe=probe)
