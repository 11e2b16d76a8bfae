"""Watch a training run from another process: callbacks, and the loggers that take what they log.

    from consumers import Callback

    class Perplexity(Callback):
        def batch_end(self, state, logger):
            logger.log_metrics({"perplexity": math.exp(state.loss)})

Run callbacks with the command ``consumer``, hand them to a ``Trainer``, or use :class:`Runner`.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from consumers.api.callback import Callback, CannotWorkError
    from consumers.api.logger import Logger, LoggerDestination
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
        Phases,
        RuntimeEstimator,
        SpeedMonitor,
        StallMonitor,
        SystemMonitor,
        ThresholdStopper,
        Trace,
        TrainerMetrics,
    )
    from consumers.dashboard import Dashboard, Top
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
    from consumers.runner.runner import Runner

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

_BUS = find_spec("bus")
if _BUS is not None and Path(str(_BUS.origin)).resolve().parent != Path(__file__).resolve().parents[1] / "bus":
    raise ImportError(
        f"{_BUS.origin} hides offloop's package 'bus', because it has the same name and Python finds it first: "
        "rename it (my_bus.py, for example) and what imports it, or start the script from another folder"
    )

# Only now is it known that this 'bus' is ours.
from bus.lazy import lazy_exports  # noqa: E402
from consumers import callbacks, loggers  # noqa: E402

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "consumers.api.callback": ["Callback", "CannotWorkError"],
        "consumers.api.logger": ["Logger", "LoggerDestination"],
        "consumers.callbacks": callbacks.__all__,
        "consumers.dashboard": ["Dashboard", "Top"],
        "consumers.loggers": loggers.__all__,
        "consumers.runner.runner": ["Runner"],
    },
)
