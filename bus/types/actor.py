"""Actors: processes of a run that are not ranks of its training, such as rollout workers and evaluators."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

FIRST_ACTOR = 1 << 20
"""Actors have numbers from here on in the place of a rank."""


DERIVED = "derived"
"""The role of an actor whose values a consumer has computed from the run."""

JOIN = "OFFLOOP_JOIN"
"""The environment variable with the directory of the run that an actor joins. A training sets it for its children."""

ACTOR = "actor"
"""The field of an actor's first event, with its name and role."""


class ActorName(NamedTuple):
    """Name of an actor, unique among those of a run that are there at a time, and its role."""

    name: str
    role: str
    is_exclusive: bool = False
    """It does not join while another one has its name."""

    def __str__(self) -> str:
        return self.name if self.name.startswith(self.role) else f"{self.name} ({self.role})"


def actor_in(fields: Mapping[str, Any]) -> ActorName | None:
    """Return the actor that an event's fields introduce; ``None`` without one."""
    try:
        found = msgspec.convert(fields.get(ACTOR), dict[str, str])
        return ActorName(found["name"], found["role"])
    except (msgspec.ValidationError, KeyError):
        return None


def is_actor(rank: int) -> bool:
    return rank >= FIRST_ACTOR
