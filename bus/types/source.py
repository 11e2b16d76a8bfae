"""The source of a run's events, and the events and fields that it never gives."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.event import Event

FIELDS = ("framework", "unavailable")
"""Entries about the source in a run's description, and fields of the first event, ``INIT``."""

IMPORTED = "an imported log"

_EVENTS = {event.value: event for event in Event}
_MOST_FIELDS = 200
_LONGEST = 300


class Source(NamedTuple):
    name: str = "this training"  # name with version: `Lightning 2.6.6`
    events: frozenset[Event] = frozenset()  # events that it never gives
    fields: Mapping[str, str] = {}  # fields that it never gives, and the reason for each

    @property
    def is_imported(self) -> bool:
        """True if it is an imported log, which has its own steps, see :func:`offloop.bus.types.metrics.shown_step`."""
        return self.name.startswith(IMPORTED)

    @classmethod
    def of(cls, values: Mapping[Any, Any]) -> "Source":
        framework, unavailable = (_map(values.get(name)) for name in FIELDS)
        words = [framework.get("name"), framework.get("version")]
        name = " ".join(word[:_LONGEST] for word in words if isinstance(word, str) and word)
        events, fields = unavailable.get("events"), _map(unavailable.get("fields"))
        listed = events if isinstance(events, list | tuple) else ()
        return cls(
            name or cls._field_defaults["name"],
            frozenset(_EVENTS[one] for one in listed if isinstance(one, str) and one in _EVENTS),
            {
                field[:_LONGEST]: reason[:_LONGEST]
                for field, reason in islice(fields.items(), _MOST_FIELDS)
                if isinstance(field, str) and isinstance(reason, str)
            },
        )

    def describe(self) -> dict[str, Any]:
        if self == Source():
            return {}
        name = None if self.name == Source().name else self.name
        events = [event.value for event in Event if event in self.events]
        return {"framework": name, "unavailable": {"events": events, "fields": dict(self.fields)}}


class _Unavailable(msgspec.Struct, forbid_unknown_fields=True):
    events: Sequence[Event] = ()
    fields: Mapping[str, str] = {}


def check_unavailable(unavailable: Any) -> None:
    """Raise ConfigurationError unless it is ``{"events": [names], "fields": {name: reason}}``."""
    try:
        msgspec.convert(unavailable, _Unavailable)
    except (msgspec.ValidationError, ConfigurationError) as error:
        raise ConfigurationError(
            f"info['unavailable'] is {unavailable!r:.200}: use a map of events (a list of names) and fields (a map of "
            f"names to reasons); {error}"
        ) from None


def shorten_names(names: Iterable[str], most: int = 3) -> str:
    """Join names for people: the first ones, and the number of the others."""
    listed = list(names)
    if len(listed) > most + 1:
        return f"{', '.join(listed[:most])} and {len(listed) - most} more"
    *first, last = listed
    return f"{', '.join(first)} and {last}" if first else last


def _map(value: Any) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else {}
