"""The top-level package: what a training script needs, under the distribution's name.

    from offloop import Callback, Event, Publisher, Trainer, runs, watch

Names are loaded when they are first used, so that a machine without torch can import this package. What is behind it is
in ``offloop.bus``, ``offloop.trainer`` and ``offloop.consumers``.
"""

# Nothing is imported here: until the module of a command is, Ctrl-C shows a traceback.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from offloop.bus import Event, Publisher, Recording, Subscriber
    from offloop.consumers import Callback
    from offloop.folder import runs
    from offloop.own_loop import watch
    from offloop.trainer import Algorithm, Trainer

__all__ = ["Algorithm", "Callback", "Event", "Publisher", "Recording", "Subscriber", "Trainer", "runs", "watch"]

_HOMES = {
    "Algorithm": "offloop.trainer",
    "Callback": "offloop.consumers",
    "Event": "offloop.bus",
    "Publisher": "offloop.bus",
    "Recording": "offloop.bus",
    "Subscriber": "offloop.bus",
    "Trainer": "offloop.trainer",
    "runs": "offloop.folder",
    "watch": "offloop.own_loop",
}


def __getattr__(name: str) -> "Any":
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    home = _HOMES[name]
    if home == "offloop.own_loop":
        # Says what to install.
        import_module("offloop.attached")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
