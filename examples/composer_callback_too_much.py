"""A callback as it was written for MosaicML Composer that needs more than a consumer has: it reads the model itself.

    consumer --callbacks examples/composer_callback_too_much.py:DeadUnits

says so, and what to do instead. The run goes on, and so do the other callbacks.
"""

from composer.core import Callback, State
from composer.loggers import Logger


class DeadUnits(Callback):
    """Logs which share of the weights has no gradient."""

    def batch_end(self, state: State, logger: Logger) -> None:
        dead = total = 0
        for parameter in state.model.parameters():
            dead += int((parameter.grad == 0).sum())
            total += parameter.numel()
        logger.log_metrics({"gradients/dead": dead / total})
