"""Watch a training run from another process: callbacks, and the loggers that take what they log.

    from consumers import Callback

    class Perplexity(Callback):
        def batch_end(self, state, logger):
            logger.log_metrics({"perplexity": math.exp(state.loss)})

Run callbacks with the command ``consumer``, hand them to a ``Trainer``, or use :class:`Runner`.
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

_PLACES = (
    "consumers.api.callback",
    "consumers.api.logger",
    "consumers.runner.runner",
    "consumers.callbacks",
    "consumers.loggers",
    "consumers.dashboard",
)

_BUS = find_spec("bus")
if _BUS is not None and Path(str(_BUS.origin)).resolve().parent != Path(__file__).resolve().parents[1] / "bus":
    raise ImportError(
        f"{_BUS.origin} hides offloop's package 'bus', because it has the same name and Python finds it first: "
        "rename it (my_bus.py, for example) and what imports it, or start the script from another folder"
    )


def __getattr__(name: str) -> Any:
    if name in __all__:
        for place in _PLACES:
            module = import_module(place)
            if name in module.__all__:
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
