"""The built-in destinations; begin with ``jsonl``, then ``files``."""

from typing import TYPE_CHECKING

from offloop.bus.lazy import lazy_exports

if TYPE_CHECKING:
    from offloop.consumers.loggers.console import ConsoleLogger as ConsoleLogger
    from offloop.consumers.loggers.csv import CsvLogger as CsvLogger
    from offloop.consumers.loggers.jsonl import JsonlLogger as JsonlLogger
    from offloop.consumers.loggers.mlflow import MLFlowLogger as MLFlowLogger
    from offloop.consumers.loggers.prometheus import PrometheusLogger as PrometheusLogger
    from offloop.consumers.loggers.run import RunLogger as RunLogger
    from offloop.consumers.loggers.tensorboard import TensorboardLogger as TensorboardLogger
    from offloop.consumers.loggers.wandb import WandBLogger as WandBLogger
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
