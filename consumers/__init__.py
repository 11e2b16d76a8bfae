"""Watch a training run from another process: callbacks, and the loggers that take what they log.

    from consumers import Callback

    class Perplexity(Callback):
        def batch_end(self, state, logger):
            logger.log_metrics({"perplexity": math.exp(state.loss)})

Run callbacks with the command ``consumer``, hand them to a ``Trainer``, or use :class:`Runner`.
"""

from consumers.callback import Callback
from consumers.callbacks import (
    ActivationMonitor,
    Alert,
    CheckpointSaver,
    EarlyStopper,
    ExportForInferenceCallback,
    ImageVisualizer,
    LRMonitor,
    MemoryMonitor,
    MLPerfCallback,
    NaNMonitor,
    OptimizerMonitor,
    RuntimeEstimator,
    SpeedMonitor,
    StallMonitor,
    SystemMonitor,
    ThresholdStopper,
    TrainerMetrics,
)
from consumers.logger import Logger, LoggerDestination
from consumers.loggers import (
    ConsoleLogger,
    CsvLogger,
    JsonlLogger,
    MLFlowLogger,
    ParquetLogger,
    ProgressLogger,
    PrometheusLogger,
    TensorboardLogger,
    WandBLogger,
)
from consumers.runner import Runner

__all__ = [
    "ActivationMonitor",
    "Alert",
    "Callback",
    "CheckpointSaver",
    "ConsoleLogger",
    "CsvLogger",
    "EarlyStopper",
    "ExportForInferenceCallback",
    "ImageVisualizer",
    "JsonlLogger",
    "LRMonitor",
    "Logger",
    "LoggerDestination",
    "MLFlowLogger",
    "MLPerfCallback",
    "MemoryMonitor",
    "NaNMonitor",
    "OptimizerMonitor",
    "ParquetLogger",
    "ProgressLogger",
    "PrometheusLogger",
    "Runner",
    "RuntimeEstimator",
    "SpeedMonitor",
    "StallMonitor",
    "SystemMonitor",
    "TensorboardLogger",
    "ThresholdStopper",
    "TrainerMetrics",
    "WandBLogger",
]
