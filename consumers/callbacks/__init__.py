"""The built-in callbacks; begin with ``lr_monitor``, the shortest."""

from typing import TYPE_CHECKING

from offloop.bus.lazy import lazy_exports

if TYPE_CHECKING:
    from offloop.consumers.callbacks.activation_monitor import ActivationMonitor as ActivationMonitor
    from offloop.consumers.callbacks.alert import Alert as Alert
    from offloop.consumers.callbacks.checkpoint_saver import CheckpointSaver as CheckpointSaver
    from offloop.consumers.callbacks.export import ExportForInferenceCallback as ExportForInferenceCallback
    from offloop.consumers.callbacks.histograms import Histograms as Histograms
    from offloop.consumers.callbacks.image_visualizer import ImageVisualizer as ImageVisualizer
    from offloop.consumers.callbacks.lr_monitor import LRMonitor as LRMonitor
    from offloop.consumers.callbacks.memory_monitor import MemoryMonitor as MemoryMonitor
    from offloop.consumers.callbacks.nan_monitor import NaNMonitor as NaNMonitor
    from offloop.consumers.callbacks.optimizer_monitor import OptimizerMonitor as OptimizerMonitor
    from offloop.consumers.callbacks.phases import Phases as Phases
    from offloop.consumers.callbacks.run_tables import Tables as Tables
    from offloop.consumers.callbacks.run_tables import Trace as Trace
    from offloop.consumers.callbacks.runtime_estimator import RuntimeEstimator as RuntimeEstimator
    from offloop.consumers.callbacks.speed_monitor import SpeedMonitor as SpeedMonitor
    from offloop.consumers.callbacks.stall_monitor import StallMonitor as StallMonitor
    from offloop.consumers.callbacks.stoppers import EarlyStopper as EarlyStopper
    from offloop.consumers.callbacks.stoppers import ThresholdStopper as ThresholdStopper
    from offloop.consumers.callbacks.system_monitor import SystemMonitor as SystemMonitor
    from offloop.consumers.callbacks.trainer_metrics import TrainerMetrics as TrainerMetrics
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
