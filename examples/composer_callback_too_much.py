"""A callback for MosaicML Composer that reads the model, which a consumer does not have.

    consumer --callbacks examples/composer_callback_too_much.py:DeadUnits

reports it, and what to do instead. The run and the other callbacks continue.
"""

from composer.core import Callback, State
from composer.loggers import Logger


class DeadUnits(Callback):
    """Logs the share of the weights without gradients."""

    def batch_end(self, state: State, logger: Logger) -> None:
        dead = total = 0
        for parameter in state.model.parameters():
            dead += int((parameter.grad == 0).sum())
            total += parameter.numel()
        logger.log_metrics({"gradients/dead": dead / total})
