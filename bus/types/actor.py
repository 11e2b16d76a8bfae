"""Actors: processes of a run that are not ranks of its training, such as rollout workers and evaluators."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec

FIRST_ACTOR = 1 << 20
"""Actors have numbers from here on in the place of a rank."""


JOIN = "OFFLOOP_JOIN"
"""The environment variable with the directory of the run that an actor joins. A training sets it for its children."""

ACTOR = "actor"
"""The field of an actor's first event, with its name and role."""


class ActorName(NamedTuple):
    """Name of an actor, unique among those of a run that are there at a time, and its role."""

    name: str
    role: str

    def __str__(self) -> str:
        return self.name if self.name.startswith(self.role) else f"{self.name} ({self.role})"


def actor_in(fields: Mapping[str, Any]) -> ActorName | None:
    """Return the actor that an event's fields introduce; ``None`` without one."""
    try:
        return ActorName(**msgspec.convert(fields.get(ACTOR), dict[Literal["name", "role"], str]))
    except (msgspec.ValidationError, TypeError):
        return None


def is_actor(rank: int) -> bool:
    return rank >= FIRST_ACTOR
