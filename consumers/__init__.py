"""Watch a training run from another process: callbacks, and the loggers of their values.

    from offloop.consumers import Callback


    class Perplexity(Callback):
        def batch_end(self, state, logger):
            logger.log_metrics({"perplexity": math.exp(state.loss)})

Run callbacks with the command ``consumer``, pass them to a ``Trainer``, or use :class:`Runner`."""

from typing import TYPE_CHECKING

from offloop.bus.lazy import lazy_exports

if TYPE_CHECKING:
    from offloop.consumers.api.callback import Callback as Callback
    from offloop.consumers.api.callback import CannotWorkError as CannotWorkError
    from offloop.consumers.api.logger import Logger as Logger
    from offloop.consumers.api.logger import LoggerDestination as LoggerDestination
    from offloop.consumers.api.logger import Row as Row
    from offloop.consumers.api.logger import RunContext as RunContext
    from offloop.consumers.callbacks import *  # noqa: F403  # all that they export
    from offloop.consumers.dashboard import Dashboard as Dashboard
    from offloop.consumers.dashboard import Top as Top
    from offloop.consumers.loggers import *  # noqa: F403  # all that they export
    from offloop.consumers.runner.runner import Runner as Runner
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
