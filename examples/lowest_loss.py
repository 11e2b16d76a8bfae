"""Your own callback: ``consumer --callbacks examples/lowest_loss.py:LowestLoss -o LowestLoss.below=0.5``."""

from offloop import Callback


class LowestLoss(Callback):
    """Logs the lowest loss so far, once it is below a limit."""

    def __init__(self, below: float = 1.0):
        self.lowest = below

    def batch_end(self, state, logger):
        if state.loss < self.lowest:
            self.lowest = state.loss
            logger.log_metrics({"loss/lowest": self.lowest})
