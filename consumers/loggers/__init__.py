"""The destinations that come with offloop, a module each.

May import: bus.protocol, api. Begin with ``jsonl``, then ``files``; ``offloop.consumers.cli.registry`` has their short
names.
"""

from typing import TYPE_CHECKING

from offloop.bus.lazy import lazy_exports

if TYPE_CHECKING:
    from offloop.consumers.loggers.console import ConsoleLogger
    from offloop.consumers.loggers.csv import CsvLogger
    from offloop.consumers.loggers.jsonl import JsonlLogger
    from offloop.consumers.loggers.mlflow import MLFlowLogger
    from offloop.consumers.loggers.parquet import ParquetLogger
    from offloop.consumers.loggers.progress import ProgressLogger
    from offloop.consumers.loggers.prometheus import PrometheusLogger
    from offloop.consumers.loggers.tensorboard import TensorboardLogger
    from offloop.consumers.loggers.wandb import WandBLogger

__all__ = [
    "ConsoleLogger",
    "CsvLogger",
    "JsonlLogger",
    "MLFlowLogger",
    "ParquetLogger",
    "ProgressLogger",
    "PrometheusLogger",
    "TensorboardLogger",
    "WandBLogger",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "offloop.consumers.loggers.console": ["ConsoleLogger"],
        "offloop.consumers.loggers.csv": ["CsvLogger"],
        "offloop.consumers.loggers.jsonl": ["JsonlLogger"],
        "offloop.consumers.loggers.mlflow": ["MLFlowLogger"],
        "offloop.consumers.loggers.parquet": ["ParquetLogger"],
        "offloop.consumers.loggers.progress": ["ProgressLogger"],
        "offloop.consumers.loggers.prometheus": ["PrometheusLogger"],
        "offloop.consumers.loggers.tensorboard": ["TensorboardLogger"],
        "offloop.consumers.loggers.wandb": ["WandBLogger"],
    },
)
