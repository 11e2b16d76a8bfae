"""Options of every adapter."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict

from offloop.bus.errors import ConfigurationError, close_matches
from offloop.bus.protocol.frames import check_run_name
from offloop.bus.types.disabled import is_disabled
from offloop.bus.types.event import Event
from offloop.trainer.arguments.checks import check_function
from offloop.trainer.arguments.config import PathInput, StreamConfig
from offloop.trainer.stream.description import plain_value
from offloop.trainer.stream.run_stream import TrainingStream

_NOT_IN_NAMES = re.compile("[^A-Za-z0-9._-]+")


class Options(TypedDict, total=False):
    """Keyword arguments of every adapter, as in :class:`offloop.trainer.Trainer`.

    With ``enabled=False``, or ``OFFLOOP_DISABLED=1`` in the environment, the adapter leaves the training unchanged: no
    hook, no process, no file.

    ``on_set`` maps names to functions of a value, for ``offloop send RUN set NAME VALUE``, besides ``lr`` and ``eval``.
    They are called between two batches, on every rank, and raise for an invalid value."""

    run_name: str | None
    runs_dir: PathInput | None
    stream_to: str | None
    callbacks: Any | Sequence[Any] | None
    loggers: Any | Sequence[Any] | None
    wait_for: str | Sequence[str] | None
    wait_seconds: float
    record: str | Iterable[Event | str] | None
    capture_console: bool
    config: Mapping[str, Any] | None
    on_set: Mapping[str, Callable[[Any], object]] | None
    enabled: bool


def check_options(options: Options) -> None:
    allowed = list(Options.__annotations__)
    for name in options:
        if name not in allowed:
            raise ConfigurationError(
                f"there is no option {name!r}: {close_matches(name, allowed)}there are {', '.join(allowed)}", name=name
            )
    if (run_name := options.get("run_name")) is not None:
        check_run_name(run_name)
    on_set = options.get("on_set")
    if on_set is not None and not isinstance(on_set, Mapping):
        raise ConfigurationError(f"on_set is a {type(on_set).__name__}: give a dict of names to functions of the value")
    for name, function in (on_set or {}).items():
        check_function(function, f"on_set[{name!r}]", "(value)")
    # A disabled training may lack servers and packages of loggers.
    if is_enabled(options):
        make_stream(options, {})


def as_run_name(text: object) -> str | None:
    return _NOT_IN_NAMES.sub("-", str(text or "")).strip("-._")[:100] or None


def is_enabled(options: Options) -> bool:
    """Return whether the run is enabled, see :class:`Options`. Raises ConfigurationError for an invalid value."""
    enabled = options.get("enabled", True)
    if not isinstance(enabled, bool):
        raise ConfigurationError(f"enabled is {enabled!r}: use True or False", name="enabled", value=enabled)
    return not is_disabled() and enabled


def make_stream(options: Options, config: Mapping[str, Any]) -> TrainingStream:
    own = {name: value for name, value in options.items() if name in StreamConfig.__dataclass_fields__}
    # A framework's configuration may contain any object.
    own["config"] = plain_value({**config, **(options.get("config") or {})})
    given = StreamConfig(**own)  # type: ignore[arg-type]
    return TrainingStream(given, options.get("callbacks"), options.get("loggers"))
