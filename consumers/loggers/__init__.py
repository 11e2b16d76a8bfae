"""The destinations that come with offloop, a module each.

May import: api. Begin with ``jsonl``, then ``files``; ``consumers.cli.registry`` has their short names.
"""

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
