"""Runs as peers list them: ``runs`` in ``docs/protocol.md``."""

from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

import msgspec

from offloop.bus.protocol.order import Count, Reached

SecondsSince1970: TypeAlias = Annotated[float, msgspec.Meta(ge=0, lt=253402214400)]
"""Until the last day of the year 9999: a later time has no date in some zones."""


class Pause(msgspec.Struct, frozen=True):
    """A training that is paused by a command."""

    since: SecondsSince1970
    batch: Count
    """After which batch."""


class _Listed(msgspec.Struct):
    run: str
    attempt: int
    status: str
    recorded_as: str | None = None
    id: str | None = None
    host: str | None = None
    world_size: int = 1
    local_world_size: int = 1
    ranks: list[int] = []
    attempts: list[int] = []
    live: bool = False
    stream: str | None = None
    started: SecondsSince1970 | None = None
    ended: SecondsSince1970 | None = None
    error: str | None = None
    reason: str | None = None
    reached: Reached | None = None
    paused: Pause | None = None


def listed_run(said: object) -> dict[str, Any] | None:
    """A run as a peer lists it, with the defaults of the keys that are missing; ``None`` if it is malformed."""
    try:
        known = msgspec.convert(said, _Listed)
    except (msgspec.ValidationError, RecursionError):
        return None
    assert isinstance(said, dict)
    return {**said, **msgspec.to_builtins(known)}


def is_silent(listed: Mapping[str, Any]) -> bool:
    """Whether a run that is read from NATS may continue on its host, whose bridge says nothing."""
    return listed.get("status") in ("live", "paused") and not listed.get("live")
