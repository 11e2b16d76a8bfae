"""Callbacks that were written for MosaicML Composer, recognised by their methods, in a consumer.

Where Composer is not installed, it has substitutes for the names that they import from it."""

import contextlib
import functools
import inspect
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.event import Event
from offloop.bus.types.time import Time, TimeUnit
from offloop.bus.types.timestamp import Timestamp
from offloop.consumers.api.callback import Callback, MaybeAwaitable
from offloop.consumers.api.logger import Logger, LoggerDestination
from offloop.consumers.composer.state import ComposerState, handled_snapshot, handling

_ROOT = "composer"

_METHODS = ("run_event", "close", "post_close", "state_dict", "load_state_dict", *(event.value for event in Event))


# Not a subclass of our class: it is called with Composer's arguments.
_Callback = type(
    "Callback",
    (),
    {"__init__": lambda self, *arguments, **options: None, **{name: getattr(Callback, name) for name in _METHODS}},
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
            f"Composer is not installed, and offloop has no substitute for {self.__name__}.{name}: it has substitutes "
            f"for {', '.join(sorted({*_CORE, *_LOGGERS}))} and utils.dist",
            name=self.__name__,
        )


@contextlib.contextmanager
def stand_in() -> Iterator[None]:
    """Let ``import composer`` find the names that callbacks use, where Composer cannot be imported."""
    if _ROOT in sys.modules or _is_installed():
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
        spec = find_spec(_ROOT)
    except (ImportError, ValueError):
        return False
    # A folder without an __init__ file is a package without an origin.
    return spec is not None and spec.origin is not None


class AdaptedCallback(Callback):
    """A callback of Composer, with its ``fields``, ``every``, ``background`` and ``barrier_events`` if it has them."""

    def __init__(self, callback: Any) -> None:
        self.callback = callback
        for name in ("fields", "every", "background", "barrier_events"):
            if hasattr(callback, name):
                setattr(self, name, getattr(callback, name))
        if not _overrides(callback, "run_event"):
            self.events: list[Event] = [event for event in Event if _overrides(callback, event.value)]

    @property
    def shown_as(self) -> str:
        return type(self.callback).__name__

    def run_event(self, event: Event, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        with handling(state):
            core = sys.modules.get(f"{_ROOT}.core")
            theirs = event if core is None else core.Event(event.value)
            result: MaybeAwaitable = self.callback.run_event(theirs, ComposerState(state), logger)
        return result

    def close(self, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        with handling(state):
            result: MaybeAwaitable = self.callback.close(ComposerState(state), logger)
        return result

    def post_close(self) -> MaybeAwaitable:
        result: MaybeAwaitable = self.callback.post_close()
        return result

    @property
    def has_state(self) -> bool:
        return _overrides(self.callback, "state_dict")

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.callback.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.callback.load_state_dict(state)


def adapt(found: object) -> type[Callback] | None:
    """Return our class for a class with all methods of Composer's callbacks; ``None`` for anything else."""
    if not isinstance(found, type) or not all(callable(getattr(found, name, None)) for name in _METHODS):
        return None
    return _adapted_class(found)


def _adapted_class(theirs: type[Any]) -> type[AdaptedCallback]:
    signature = inspect.signature(theirs.__init__)
    named = [one for one in signature.parameters.values() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]

    @functools.wraps(theirs.__init__)
    def make(self: AdaptedCallback, *arguments: Any, **options: Any) -> None:
        with stand_in():
            made = theirs(*arguments, **options)
        AdaptedCallback.__init__(self, made)

    make.__signature__ = signature.replace(parameters=named)  # type: ignore[attr-defined]
    members = {"__init__": make, "__module__": theirs.__module__, "__doc__": inspect.getdoc(theirs)}
    return type(theirs.__name__, (AdaptedCallback,), members)


def _overrides(callback: Any, name: str) -> bool:
    if name in vars(callback):
        return True
    defined = [base for base in type(callback).__mro__ if name in vars(base)]
    root = next(base for base in reversed(type(callback).__mro__) if "run_event" in vars(base))
    return defined[0] is not root
