"""The known callbacks and loggers."""

from collections.abc import Sequence

from offloop.bus.plugins.registry import Registry, options_for
from offloop.consumers.api.callback import Callback
from offloop.consumers.api.logger import LoggerDestination
from offloop.consumers.composer.adapter import adapt, stand_in

CALLBACKS: Registry[Callback] = Registry(
    "callback",
    Callback,
    "offloop.callbacks",
    {
        "activations": "offloop.consumers.callbacks.activation_monitor:ActivationMonitor",
        "alert": "offloop.consumers.callbacks.alert:Alert",
        "checkpoint": "offloop.consumers.callbacks.checkpoint_saver:CheckpointSaver",
        "dashboard": "offloop.consumers.dashboard.web.callback:Dashboard",
        "early-stop": "offloop.consumers.callbacks.stoppers:EarlyStopper",
        "export": "offloop.consumers.callbacks.export:ExportForInferenceCallback",
        "histograms": "offloop.consumers.callbacks.histograms:Histograms",
        "images": "offloop.consumers.callbacks.image_visualizer:ImageVisualizer",
        "lr": "offloop.consumers.callbacks.lr_monitor:LRMonitor",
        "memory": "offloop.consumers.callbacks.memory_monitor:MemoryMonitor",
        "metrics": "offloop.consumers.callbacks.trainer_metrics:TrainerMetrics",
        "nan": "offloop.consumers.callbacks.nan_monitor:NaNMonitor",
        "optimizer": "offloop.consumers.callbacks.optimizer_monitor:OptimizerMonitor",
        "phases": "offloop.consumers.callbacks.phases:Phases",
        "tables": "offloop.consumers.callbacks.run_tables:Tables",
        "trace": "offloop.consumers.callbacks.run_tables:Trace",
        "runtime": "offloop.consumers.callbacks.runtime_estimator:RuntimeEstimator",
        "speed": "offloop.consumers.callbacks.speed_monitor:SpeedMonitor",
        "stall": "offloop.consumers.callbacks.stall_monitor:StallMonitor",
        "system": "offloop.consumers.callbacks.system_monitor:SystemMonitor",
        "threshold-stop": "offloop.consumers.callbacks.stoppers:ThresholdStopper",
        "top": "offloop.consumers.dashboard.terminal.top:Top",
    },
    adapt=adapt,
    importing=stand_in,
)
"""Values of ``--callbacks``."""

LOGGERS: Registry[LoggerDestination] = Registry(
    "logger",
    LoggerDestination,
    "offloop.loggers",
    {
        "console": "offloop.consumers.loggers.console:ConsoleLogger",
        "csv": "offloop.consumers.loggers.csv:CsvLogger",
        "jsonl": "offloop.consumers.loggers.jsonl:JsonlLogger",
        "mlflow": "offloop.consumers.loggers.mlflow:MLFlowLogger",
        "prometheus": "offloop.consumers.loggers.prometheus:PrometheusLogger",
        "run": "offloop.consumers.loggers.run:RunLogger",
        "tensorboard": "offloop.consumers.loggers.tensorboard:TensorboardLogger",
        "wandb": "offloop.consumers.loggers.wandb:WandBLogger",
    },
)
"""Values of ``--log``."""


def create_selected(
    callbacks: Sequence[str], loggers: Sequence[str], assignments: Sequence[str]
) -> tuple[list[Callback], list[LoggerDestination]]:
    """Create the callbacks and loggers of those names, each once, with options such as ``speed.window_size=50``.

    See :func:`offloop.bus.plugins.registry.options_for`. Raises ConfigurationError for an invalid name, option or
    value, or an option of none of the names."""
    found_callbacks = {name: CALLBACKS.find(name) for name in callbacks}
    found_loggers = {name: LOGGERS.find(name) for name in loggers}
    options = options_for({**found_callbacks, **found_loggers}, assignments)
    return (
        [CALLBACKS.create(name, options[name]) for name in found_callbacks],
        [LOGGERS.create(name, options[name]) for name in found_loggers],
    )
