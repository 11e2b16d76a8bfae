"""The callbacks that come with offloop, a module each.

May import: bus.checkpoints, bus.protocol, bus.runs, bus.tensors, bus.trace, api, loggers. Begin with ``lr_monitor``,
the shortest; ``consumers.cli.registry`` has their short names.
"""

from typing import TYPE_CHECKING

from bus.lazy import lazy_exports

if TYPE_CHECKING:
    from consumers.callbacks.activation_monitor import ActivationMonitor
    from consumers.callbacks.alert.alert import Alert
    from consumers.callbacks.checkpoint_saver import CheckpointSaver
    from consumers.callbacks.export.export import ExportForInferenceCallback
    from consumers.callbacks.image_visualizer import ImageVisualizer
    from consumers.callbacks.lr_monitor import LRMonitor
    from consumers.callbacks.memory_monitor import MemoryMonitor
    from consumers.callbacks.mlperf import MLPerfCallback
    from consumers.callbacks.nan_monitor import NaNMonitor
    from consumers.callbacks.optimizer_monitor import OptimizerMonitor
    from consumers.callbacks.phases.phases import Phases
    from consumers.callbacks.runtime_estimator import RuntimeEstimator
    from consumers.callbacks.speed_monitor import SpeedMonitor
    from consumers.callbacks.stall_monitor import StallMonitor
    from consumers.callbacks.stoppers import EarlyStopper, ThresholdStopper
    from consumers.callbacks.system_monitor import SystemMonitor
    from consumers.callbacks.trace import Trace
    from consumers.callbacks.trainer_metrics import TrainerMetrics

__all__ = [
    "ActivationMonitor",
    "Alert",
    "CheckpointSaver",
    "EarlyStopper",
    "ExportForInferenceCallback",
    "ImageVisualizer",
    "LRMonitor",
    "MLPerfCallback",
    "MemoryMonitor",
    "NaNMonitor",
    "OptimizerMonitor",
    "Phases",
    "RuntimeEstimator",
    "SpeedMonitor",
    "StallMonitor",
    "SystemMonitor",
    "ThresholdStopper",
    "Trace",
    "TrainerMetrics",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "consumers.callbacks.activation_monitor": ["ActivationMonitor"],
        "consumers.callbacks.alert.alert": ["Alert"],
        "consumers.callbacks.checkpoint_saver": ["CheckpointSaver"],
        "consumers.callbacks.export.export": ["ExportForInferenceCallback"],
        "consumers.callbacks.image_visualizer": ["ImageVisualizer"],
        "consumers.callbacks.lr_monitor": ["LRMonitor"],
        "consumers.callbacks.memory_monitor": ["MemoryMonitor"],
        "consumers.callbacks.mlperf": ["MLPerfCallback"],
        "consumers.callbacks.nan_monitor": ["NaNMonitor"],
        "consumers.callbacks.optimizer_monitor": ["OptimizerMonitor"],
        "consumers.callbacks.phases.phases": ["Phases"],
        "consumers.callbacks.runtime_estimator": ["RuntimeEstimator"],
        "consumers.callbacks.speed_monitor": ["SpeedMonitor"],
        "consumers.callbacks.stall_monitor": ["StallMonitor"],
        "consumers.callbacks.stoppers": ["EarlyStopper", "ThresholdStopper"],
        "consumers.callbacks.system_monitor": ["SystemMonitor"],
        "consumers.callbacks.trace": ["Trace"],
        "consumers.callbacks.trainer_metrics": ["TrainerMetrics"],
    },
)
