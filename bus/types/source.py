"""What the events of a run come from, and which events and fields it can never give."""

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, NamedTuple

from offloop.bus.errors import ConfigurationError, close_matches
from offloop.bus.types.event import Event

FIELDS = ("framework", "unavailable")
"""The entries of a run's description that say so; the first event, ``INIT``, has them as fields."""

IMPORTED = "an imported log"
"""What imported runs have as the name of their framework."""

_EVENTS = {event.value: event for event in Event}
_MOST_FIELDS = 200
_LONGEST = 300


class Source(NamedTuple):
    """What the events of a run come from."""

    name: str = "this training"
    """As people know it, with its version: ``Lightning 2.6.6``."""
    events: frozenset[Event] = frozenset()
    """The events that it never gives."""
    fields: Mapping[str, str] = {}
    """The fields that it never gives, and why."""

    @property
    def is_imported(self) -> bool:
        """Whether a log was imported, whose steps are its own: see :func:`offloop.bus.types.metrics.shown_step`."""
        return self.name.startswith(IMPORTED)

    @classmethod
    def of(cls, values: Mapping[Any, Any]) -> "Source":
        """Reads it from an event's fields or a run's description. What is malformed there is left out: it comes from a
        peer or a file."""
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
        """What it says of itself, for programs; empty where it says nothing."""
        if self == Source():
            return {}
        name = None if self.name == Source().name else self.name
        events = [event.value for event in Event if event in self.events]
        return {"framework": name, "unavailable": {"events": events, "fields": dict(self.fields)}}


def check_unavailable(unavailable: Any) -> None:
    """Raises :class:`offloop.bus.errors.ConfigurationError` for a description that is not
    ``{"events": [names], "fields": {name: reason}}``."""
    if not isinstance(unavailable, Mapping) or not unavailable.keys() <= {"events", "fields"}:
        raise ConfigurationError(
            f"info['unavailable'] is {unavailable!r}: use a map of events (a list of names) and fields (a map of names "
            "to reasons)"
        )
    events = unavailable.get("events", ())
    if not isinstance(events, list | tuple):
        raise ConfigurationError(f"info['unavailable'] has the events {events!r}: use a list of names")
    for name in events:
        if not isinstance(name, str) or name not in _EVENTS:
            raise ConfigurationError(
                f"info['unavailable'] has the event {name!r}, which is none: {close_matches(str(name), _EVENTS)}"
                "offloop.bus.Event has all of them"
            )
    fields = unavailable.get("fields", {})
    if not isinstance(fields, Mapping) or not all(isinstance(one, str) for pair in fields.items() for one in pair):
        raise ConfigurationError(f"info['unavailable'] has the fields {fields!r}: use a map of names to reasons")


def shorten_names(names: Iterable[str], most: int = 3) -> str:
    """Names as people list them: the first ones, and how many more there are."""
    listed = list(names)
    if len(listed) > most + 1:
        return f"{', '.join(listed[:most])} and {len(listed) - most} more"
    *first, last = listed
    return f"{', '.join(first)} and {last}" if first else last


def _map(value: Any) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else {}
