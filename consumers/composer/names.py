"""The names that callbacks written for MosaicML Composer import from it, where it is not installed."""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from offloop.bus.types.event import Event
from offloop.bus.types.time import Time, TimeUnit
from offloop.bus.types.timestamp import Timestamp
from offloop.consumers.api.callback import Callback
from offloop.consumers.api.logger import Logger, LoggerDestination
from offloop.consumers.composer.state import ComposerState, handled_snapshot

ROOT = "composer"

METHODS = ("run_event", "close", "post_close", "state_dict", "load_state_dict", *(event.value for event in Event))


# Not a subclass of our class: it is called with Composer's arguments.
_Callback = type(
    "Callback",
    (),
    {"__init__": lambda self, *arguments, **options: None, **{name: getattr(Callback, name) for name in METHODS}},
)


def _world_size() -> int:
    snapshot = handled_snapshot()
    return 1 if snapshot is None else snapshot.world_size


_CORE = {
    "Callback": _Callback,
    "Event": Event,
    "State": ComposerState,
    "Time": Time,
    "TimeUnit": TimeUnit,
    "Timestamp": Timestamp,
    "ensure_time": Time.from_input,
}
_LOGGERS = {"Logger": Logger, "LoggerDestination": LoggerDestination}
# A consumer's callback sees the first of the training's ranks.
_DIST = {
    "get_global_rank": lambda: 0,
    "get_local_rank": lambda: 0,
    "get_world_size": _world_size,
    "is_initialized": lambda: False,
    "is_available": lambda: False,
    "barrier": lambda: None,
}
_NAMES: Mapping[str, Mapping[str, Any]] = {
    "composer": {**_CORE, "Logger": Logger},
    "composer.core": _CORE,
    "composer.core.callback": {"Callback": _Callback},
    "composer.core.event": {"Event": Event},
    "composer.core.state": {"State": ComposerState},
    "composer.core.time": {name: _CORE[name] for name in ("Time", "TimeUnit", "Timestamp", "ensure_time")},
    "composer.loggers": _LOGGERS,
    "composer.loggers.logger": {"Logger": Logger},
    "composer.loggers.logger_destination": {"LoggerDestination": LoggerDestination},
    "composer.utils": {},
    "composer.utils.dist": _DIST,
}


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(
            f"Composer is not installed, and what offloop has in its place knows no {self.__name__}.{name}: a consumer "
            f"takes callbacks that need no more of it than {', '.join(sorted({*_CORE, *_LOGGERS}))} and utils.dist",
            name=self.__name__,
        )


@contextlib.contextmanager
def stand_in() -> Iterator[None]:
    """Let ``import composer`` find the names that callbacks use, where Composer cannot be imported."""
    if ROOT in sys.modules or _is_installed():
        yield
        return
    made = {name: _StandIn(name) for name in _NAMES}
    for name, module in made.items():
        vars(module).update(_NAMES[name], __path__=[])
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(made[parent], own, module)
    sys.modules.update(made)
    try:
        yield
    finally:
        for name in made:
            sys.modules.pop(name, None)


def _is_installed() -> bool:
    try:
        spec = find_spec(ROOT)
    except (ImportError, ValueError):
        return False
    # A folder without an __init__ file is a package without an origin.
    return spec is not None and spec.origin is not None
