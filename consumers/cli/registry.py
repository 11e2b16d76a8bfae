"""Which callbacks and loggers there are."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from bus.plugins.registry import Registry, options_for
from consumers.adapters.adapt import adapt_callback, adapt_logger, naming_package
from consumers.api.callback import Callback
from consumers.api.logger import LoggerDestination
from consumers.composer.adapter import adapt
from consumers.composer.names import stand_in


def _adapt(found: object) -> type[Callback] | None:
    return adapt(found) or adapt_callback(found)


@contextmanager
def _importing() -> Iterator[None]:
    with stand_in(), naming_package():
        yield


CALLBACKS: Registry[Callback] = Registry(
    "callback",
    Callback,
    "offloop.callbacks",
    {
        "activations": "consumers.callbacks.activation_monitor:ActivationMonitor",
        "alert": "consumers.callbacks.alert.alert:Alert",
        "checkpoint": "consumers.callbacks.checkpoint_saver:CheckpointSaver",
        "dashboard": "consumers.dashboard.web.callback:Dashboard",
        "early-stop": "consumers.callbacks.stoppers:EarlyStopper",
        "export": "consumers.callbacks.export.export:ExportForInferenceCallback",
        "images": "consumers.callbacks.image_visualizer:ImageVisualizer",
        "lr": "consumers.callbacks.lr_monitor:LRMonitor",
        "memory": "consumers.callbacks.memory_monitor:MemoryMonitor",
        "metrics": "consumers.callbacks.trainer_metrics:TrainerMetrics",
        "mlperf": "consumers.callbacks.mlperf:MLPerfCallback",
        "nan": "consumers.callbacks.nan_monitor:NaNMonitor",
        "optimizer": "consumers.callbacks.optimizer_monitor:OptimizerMonitor",
        "phases": "consumers.callbacks.phases.phases:Phases",
        "runtime": "consumers.callbacks.runtime_estimator:RuntimeEstimator",
        "speed": "consumers.callbacks.speed_monitor:SpeedMonitor",
        "stall": "consumers.callbacks.stall_monitor:StallMonitor",
        "system": "consumers.callbacks.system_monitor:SystemMonitor",
        "threshold-stop": "consumers.callbacks.stoppers:ThresholdStopper",
        "top": "consumers.dashboard.terminal.top:Top",
        "trace": "consumers.callbacks.trace:Trace",
    },
    adapt=_adapt,
    importing=_importing,
)
"""What ``--callbacks`` takes."""

LOGGERS: Registry[LoggerDestination] = Registry(
    "logger",
    LoggerDestination,
    "offloop.loggers",
    {
        "console": "consumers.loggers.console:ConsoleLogger",
        "csv": "consumers.loggers.csv:CsvLogger",
        "jsonl": "consumers.loggers.jsonl:JsonlLogger",
        "mlflow": "consumers.loggers.mlflow:MLFlowLogger",
        "parquet": "consumers.loggers.parquet:ParquetLogger",
        "progress": "consumers.loggers.progress:ProgressLogger",
        "prometheus": "consumers.loggers.prometheus:PrometheusLogger",
        "tensorboard": "consumers.loggers.tensorboard:TensorboardLogger",
        "wandb": "consumers.loggers.wandb:WandBLogger",
    },
    adapt=adapt_logger,
    importing=naming_package,
)
"""What ``--log`` takes."""


def create_selected(
    callbacks: Sequence[str], loggers: Sequence[str], assignments: Sequence[str]
) -> tuple[list[Callback], list[LoggerDestination]]:
    """Makes the callbacks and loggers of those names, each once, with options such as ``speed.window_size=50``, see
    :func:`bus.plugins.registry.options_for`.

    Raises:
        ConfigurationError: a name, an option or a value is not allowed, or an option belongs to none of the names.
    """
    found_callbacks = {name: CALLBACKS.find(name) for name in callbacks}
    found_loggers = {name: LOGGERS.find(name) for name in loggers}
    options = options_for({**found_callbacks, **found_loggers}, assignments)
    return (
        [CALLBACKS.create(name, options[name]) for name in found_callbacks],
        [LOGGERS.create(name, options[name]) for name in found_loggers],
    )
