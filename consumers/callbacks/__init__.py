"""The callbacks that come with offloop, a module each.

May import: bus.checkpoints, bus.protocol, bus.runs, bus.tensors, bus.trace, api, loggers. Begin with ``lr_monitor``,
the shortest; ``offloop.consumers.cli.registry`` has their short names.
"""

from typing import TYPE_CHECKING

from offloop.bus.lazy import lazy_exports

if TYPE_CHECKING:
    from offloop.consumers.callbacks.activation_monitor import ActivationMonitor
    from offloop.consumers.callbacks.alert.alert import Alert
    from offloop.consumers.callbacks.checkpoint_saver import CheckpointSaver
    from offloop.consumers.callbacks.export.export import ExportForInferenceCallback
    from offloop.consumers.callbacks.image_visualizer import ImageVisualizer
    from offloop.consumers.callbacks.lr_monitor import LRMonitor
    from offloop.consumers.callbacks.memory_monitor import MemoryMonitor
    from offloop.consumers.callbacks.mlperf import MLPerfCallback
    from offloop.consumers.callbacks.nan_monitor import NaNMonitor
    from offloop.consumers.callbacks.optimizer_monitor import OptimizerMonitor
    from offloop.consumers.callbacks.phases.phases import Phases
    from offloop.consumers.callbacks.runtime_estimator import RuntimeEstimator
    from offloop.consumers.callbacks.speed_monitor import SpeedMonitor
    from offloop.consumers.callbacks.stall_monitor import StallMonitor
    from offloop.consumers.callbacks.stoppers import EarlyStopper, ThresholdStopper
    from offloop.consumers.callbacks.system_monitor import SystemMonitor
    from offloop.consumers.callbacks.trace import Trace
    from offloop.consumers.callbacks.trainer_metrics import TrainerMetrics

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
        "offloop.consumers.callbacks.activation_monitor": ["ActivationMonitor"],
        "offloop.consumers.callbacks.alert.alert": ["Alert"],
        "offloop.consumers.callbacks.checkpoint_saver": ["CheckpointSaver"],
        "offloop.consumers.callbacks.export.export": ["ExportForInferenceCallback"],
        "offloop.consumers.callbacks.image_visualizer": ["ImageVisualizer"],
        "offloop.consumers.callbacks.lr_monitor": ["LRMonitor"],
        "offloop.consumers.callbacks.memory_monitor": ["MemoryMonitor"],
        "offloop.consumers.callbacks.mlperf": ["MLPerfCallback"],
        "offloop.consumers.callbacks.nan_monitor": ["NaNMonitor"],
        "offloop.consumers.callbacks.optimizer_monitor": ["OptimizerMonitor"],
        "offloop.consumers.callbacks.phases.phases": ["Phases"],
        "offloop.consumers.callbacks.runtime_estimator": ["RuntimeEstimator"],
        "offloop.consumers.callbacks.speed_monitor": ["SpeedMonitor"],
        "offloop.consumers.callbacks.stall_monitor": ["StallMonitor"],
        "offloop.consumers.callbacks.stoppers": ["EarlyStopper", "ThresholdStopper"],
        "offloop.consumers.callbacks.system_monitor": ["SystemMonitor"],
        "offloop.consumers.callbacks.trace": ["Trace"],
        "offloop.consumers.callbacks.trainer_metrics": ["TrainerMetrics"],
    },
)
