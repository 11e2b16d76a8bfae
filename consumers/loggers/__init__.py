"""The destinations that come with offloop, a module each.

May import: bus.protocol, api. Begin with ``jsonl``, then ``files``; ``consumers.cli.registry`` has their short names.
"""

from typing import TYPE_CHECKING

from bus.lazy import lazy_exports

if TYPE_CHECKING:
    from consumers.loggers.console import ConsoleLogger
    from consumers.loggers.csv import CsvLogger
    from consumers.loggers.jsonl import JsonlLogger
    from consumers.loggers.mlflow import MLFlowLogger
    from consumers.loggers.parquet import ParquetLogger
    from consumers.loggers.progress import ProgressLogger
    from consumers.loggers.prometheus import PrometheusLogger
    from consumers.loggers.tensorboard import TensorboardLogger
    from consumers.loggers.wandb import WandBLogger

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
        "consumers.loggers.console": ["ConsoleLogger"],
        "consumers.loggers.csv": ["CsvLogger"],
        "consumers.loggers.jsonl": ["JsonlLogger"],
        "consumers.loggers.mlflow": ["MLFlowLogger"],
        "consumers.loggers.parquet": ["ParquetLogger"],
        "consumers.loggers.progress": ["ProgressLogger"],
        "consumers.loggers.prometheus": ["PrometheusLogger"],
        "consumers.loggers.tensorboard": ["TensorboardLogger"],
        "consumers.loggers.wandb": ["WandBLogger"],
    },
)
