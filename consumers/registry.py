"""Which callbacks and loggers there are."""

from collections.abc import Sequence

from bus.registry import Registry, options_for
from consumers.callback import Callback
from consumers.logger import LoggerDestination

__all__ = ["CALLBACKS", "LOGGERS", "create_selected"]

CALLBACKS: Registry[Callback] = Registry(
    "callback",
    Callback,
    "offloop.callbacks",
    {
        "lr": "consumers.callbacks.lr_monitor:LRMonitor",
        "metrics": "consumers.callbacks.trainer_metrics:TrainerMetrics",
        "speed": "consumers.callbacks.speed_monitor:SpeedMonitor",
    },
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
    },
)
"""What ``--log`` takes."""


def create_selected(
    callbacks: Sequence[str], loggers: Sequence[str], assignments: Sequence[str]
) -> tuple[list[Callback], list[LoggerDestination]]:
    """Makes the callbacks and loggers of those names, each once, with options such as ``speed.window_size=50``, see
    :func:`bus.registry.options_for`.

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
