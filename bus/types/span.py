"""Spans of a training's own: the field of their events."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

SPAN = "span"
"""The field of a span's event: ``[id, parent, duration]``."""


class Span(NamedTuple):
    """A span that ended at its event. Ids are of one process and attempt."""

    id: int
    parent: int
    """Id of the enclosing span; 0 for none."""
    duration: int
    """Nanoseconds."""


def read_span(fields: Mapping[str, Any]) -> Span | None:
    """Return the span of an event with these fields; ``None`` for an event without one, or a malformed one."""
    try:
        return msgspec.convert(fields.get(SPAN), Span)
    except msgspec.ValidationError:
        return None
