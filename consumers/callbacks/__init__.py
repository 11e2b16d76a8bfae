"""The callbacks that come with offloop."""

from consumers.callbacks.lr_monitor import LRMonitor
from consumers.callbacks.speed_monitor import SpeedMonitor
from consumers.callbacks.trainer_metrics import TrainerMetrics

__all__ = ["LRMonitor", "SpeedMonitor", "TrainerMetrics"]
