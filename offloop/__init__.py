"""The top-level package: what a training script needs, under the distribution's name.

    from offloop import Callback, Event, Publisher, Trainer, runs, watch

Names are loaded when they are first used, so that a machine without torch can import this package. The packages behind
it, ``bus``, ``trainer`` and ``consumers``, have common names: where a file of the user's own hides one of them, using a
name says which file does.
"""

# Nothing is imported here: until the module of a command is, Ctrl-C shows a traceback.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from bus import Event, Publisher, Recording, Subscriber
    from consumers import Callback
    from offloop.folder import runs
    from offloop.own_loop import watch
    from trainer import Algorithm, Trainer

__all__ = ["Algorithm", "Callback", "Event", "Publisher", "Recording", "Subscriber", "Trainer", "runs", "watch"]

_HOMES = {
    "Algorithm": "trainer",
    "Callback": "consumers",
    "Event": "bus",
    "Publisher": "bus",
    "Recording": "bus",
    "Subscriber": "bus",
    "Trainer": "trainer",
    "runs": "offloop.folder",
    "watch": "offloop.own_loop",
}


def __getattr__(name: str) -> "Any":
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    from offloop.packages import check_packages

    home = _HOMES[name]
    check_packages("bus", {"offloop.folder": "consumers", "offloop.own_loop": "trainer"}.get(home, home))
    if home == "offloop.own_loop":
        # Says what hides a package of ours, or what to install.
        import_module("offloop.attached")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
