"""Watch a training run from another process: callbacks, and the loggers that take what they log.

    from offloop.consumers import Callback

    class Perplexity(Callback):
        def batch_end(self, state, logger):
            logger.log_metrics({"perplexity": math.exp(state.loss)})

Run callbacks with the command ``consumer``, hand them to a ``Trainer``, or use :class:`Runner`.
"""

from typing import TYPE_CHECKING

from offloop.bus.lazy import lazy_exports
from offloop.consumers import callbacks, loggers

if TYPE_CHECKING:
    from offloop.consumers.api.callback import Callback, CannotWorkError
    from offloop.consumers.api.logger import Logger, LoggerDestination
    from offloop.consumers.callbacks import (
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
        Phases,
        RuntimeEstimator,
        SpeedMonitor,
        StallMonitor,
        SystemMonitor,
        ThresholdStopper,
        Trace,
        TrainerMetrics,
    )
    from offloop.consumers.dashboard import Dashboard, Top
    from offloop.consumers.loggers import (
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
    from offloop.consumers.runner.runner import Runner

__all__ = [
    "ActivationMonitor",
    "Alert",
    "Callback",
    "CannotWorkError",
    "CheckpointSaver",
    "ConsoleLogger",
    "CsvLogger",
    "Dashboard",
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
    "Phases",
    "ProgressLogger",
    "PrometheusLogger",
    "Runner",
    "RuntimeEstimator",
    "SpeedMonitor",
    "StallMonitor",
    "SystemMonitor",
    "TensorboardLogger",
    "ThresholdStopper",
    "Top",
    "Trace",
    "TrainerMetrics",
    "WandBLogger",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "offloop.consumers.api.callback": ["Callback", "CannotWorkError"],
        "offloop.consumers.api.logger": ["Logger", "LoggerDestination"],
        "offloop.consumers.callbacks": callbacks.__all__,
        "offloop.consumers.dashboard": ["Dashboard", "Top"],
        "offloop.consumers.loggers": loggers.__all__,
        "offloop.consumers.runner.runner": ["Runner"],
    },
)
