"""Watch a training run from another process: callbacks, and the loggers that take what they log.

    from consumers import Callback

    class Perplexity(Callback):
        def batch_end(self, state, logger):
            logger.log_metrics({"perplexity": math.exp(state.loss)})

Run callbacks with the command ``consumer``, hand them to a ``Trainer``, or use :class:`Runner`.
"""

from consumers.callback import Callback
from consumers.callbacks import LRMonitor, SpeedMonitor, TrainerMetrics
from consumers.logger import Logger, LoggerDestination
from consumers.loggers import ConsoleLogger, CsvLogger, JsonlLogger
from consumers.runner import Runner

__all__ = [
    "Callback",
    "ConsoleLogger",
    "CsvLogger",
    "JsonlLogger",
    "LRMonitor",
    "Logger",
    "LoggerDestination",
    "Runner",
    "SpeedMonitor",
    "TrainerMetrics",
]
