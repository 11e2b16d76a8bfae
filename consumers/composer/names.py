"""The names that callbacks written for MosaicML Composer import from it, where it is not installed."""

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from offloop.bus.types.event import Event
from offloop.bus.types.time import Time, TimeInput, TimeUnit
from offloop.bus.types.timestamp import Timestamp
from offloop.consumers.api.callback import Callback
from offloop.consumers.api.logger import Logger, LoggerDestination
from offloop.consumers.composer.state import ComposerState, handled_snapshot

ROOT = "composer"
"""The package that they import from."""

METHODS = ("run_event", "close", "post_close", "state_dict", "load_state_dict", *(event.value for event in Event))
"""The methods of their callbacks."""


def _take_anything(self: object, *arguments: Any, **options: Any) -> None:
    pass


# Not a subclass of ours: what a callback of theirs is called with is in the form that they know.
_Callback = type("Callback", (), {"__init__": _take_anything, **{name: getattr(Callback, name) for name in METHODS}})


def _world_size() -> int:
    snapshot = handled_snapshot()
    return 1 if snapshot is None else snapshot.world_size


def _ensure_time(maximum: TimeInput, unit: TimeUnit | str) -> Time:
    return Time.from_input(maximum, unit)


_CORE = {
    "Callback": _Callback,
    "Event": Event,
    "State": ComposerState,
    "Time": Time,
    "TimeUnit": TimeUnit,
    "Timestamp": Timestamp,
    "ensure_time": _ensure_time,
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
        raise ImportError(_absent(f"{self.__name__}.{name}"), name=self.__name__)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the stand-ins."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _NAMES:
            if fullname.partition(".")[0] == ROOT:
                raise ModuleNotFoundError(_absent(fullname), name=fullname)
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=fullname.count(".") < 2)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(_NAMES[module.__name__])
        for name in _NAMES:
            if name.rpartition(".")[0] == module.__name__:
                importlib.import_module(name)


def _absent(name: str) -> str:
    return (
        f"Composer is not installed, and what offloop has in its place knows no {name}: a consumer takes callbacks "
        f"that need no more of it than {', '.join(sorted({*_CORE, *_LOGGERS}))} and utils.dist"
    )


_finder = _Finder()


@contextlib.contextmanager
def stand_in() -> Iterator[None]:
    """While it lasts, ``import composer`` gets the names that callbacks use, where Composer cannot be imported."""
    if _finder in sys.meta_path or _is_installed():
        yield
        return
    sys.meta_path.insert(0, _finder)
    try:
        yield
    finally:
        sys.meta_path.remove(_finder)
        for name in _NAMES:
            if isinstance(sys.modules.get(name), _StandIn):
                del sys.modules[name]


def _is_installed() -> bool:
    try:
        spec = importlib.util.find_spec(ROOT)
    except (ImportError, ValueError):
        return False
    # A mere folder of that name is a package too, one without a file.
    return spec is not None and spec.origin is not None
