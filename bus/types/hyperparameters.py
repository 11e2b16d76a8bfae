"""The description of a training as a whole: its model, optimizer and data, and how it was started."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from offloop.bus.strict_json import flatten, json_text
from offloop.bus.types.event import Event

FIELD = "hyperparameters"
"""The field that holds them, a map."""

EVENTS = frozenset((Event.INIT, Event.FIT_START, Event.EVAL_STANDALONE_START, Event.PREDICT_START))
"""The events of the first rank at which it is read. A later one adds to those before it, or replaces values."""

MOST = 1000
"""So many of one event are read."""

_OF_THE_START = ("command", "git", "version", "machine")


def hyperparameters_in(fields: Mapping[Any, Any]) -> dict[str, Any]:
    """The hyperparameters in an event's fields by name, maps within maps joined by ``/``; empty when there are none.

    Values are texts, numbers, booleans, ``None`` and lists of these: a peer may send anything, and what is something
    else is JSON text."""
    given = fields.get(FIELD)
    if not isinstance(given, Mapping):
        return {}
    flat = flatten(given)
    return {str(name): _plain(flat[name]) for name, _ in zip(flat, range(MOST), strict=False)}


def is_of_the_training(name: str) -> bool:
    """A hyperparameter of the training itself; ``command``, ``git/``, ``version/`` and ``machine/`` may differ where
    the same is computed."""
    return name.partition("/")[0] not in _OF_THE_START


def chosen_first(names: Iterable[str]) -> list[str]:
    """The names in the order in which people look for them: what the training was started with (``config/``), then the
    other things that are named by one word (``seed``), then parts of the model, the optimizer and the machine."""
    return sorted(names, key=lambda name: (not name.startswith("config/"), "/" in name))


def value_text(value: Any) -> str:
    """A value for people."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, list) and all(_is_single(part) for part in value):
        return value
    return value if _is_single(value) else json_text(value)


def _is_single(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)
