"""Hyperparameters: the model, optimizer, data and start of a training."""

import json
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from offloop.bus.strict_json import flatten, json_text
from offloop.bus.types.event import Event

FIELD = "hyperparameters"

EVENTS = frozenset((Event.INIT, Event.FIT_START, Event.EVAL_STANDALONE_START, Event.PREDICT_START))
"""Events of the first rank at which hyperparameters are read. A later event adds or replaces values."""

MOST = 1000  # maximum number of hyperparameters read from one event

_OF_THE_START = ("command", "git", "version", "machine")


def hyperparameters_in(fields: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the hyperparameters of an event by name, nested maps joined by ``/``.

    Values that are not texts, numbers, booleans, ``None`` or lists of these become JSON text."""
    given = fields.get(FIELD)
    if not isinstance(given, Mapping):
        return {}
    flat = flatten(given)
    return {
        str(name): value if all(map(_is_single, value if isinstance(value, list) else [value])) else json_text(value)
        for name, value in islice(flat.items(), MOST)
    }


def is_of_the_training(name: str) -> bool:
    """Return whether it is of the training itself, so that it is the same in equal trainings."""
    return name.partition("/")[0] not in _OF_THE_START


def chosen_first(names: Iterable[str]) -> list[str]:
    """Sort names for people: ``config/`` first, then names of one word, then the model, optimizer and machine."""
    return sorted(names, key=lambda name: (not name.startswith("config/"), "/" in name))


def value_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _is_single(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)
