"""Runs as brokers list them: ``runs`` in ``docs/protocol.md``."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import asdict

from offloop.bus.runs.directory import RunInfo


def describe_run(run: RunInfo, served: Mapping[str, Any]) -> dict[str, Any]:
    """What a list of runs says of one; ``served`` holds its ``attempt`` and the address of its ``stream`` where it is
    served."""
    last = run.last
    live = served.get("attempt") == last.number
    return {
        "run": run.name,
        "recorded_as": run.recorded_as,
        "id": run.id,
        "host": text if isinstance(text := last.info.get("host"), str) else None,
        "world_size": last.world_size,
        "local_world_size": last.local_world_size,
        "ranks": sorted(rank for one in last.publishers if type(rank := one.get("rank")) is int),
        "attempt": last.number,
        "attempts": [attempt.number for attempt in run.attempts],
        # Also while its trainer, on this machine, is about to find the broker again.
        "status": run.status if not live or run.paused else "live",
        "paused": None if run.paused is None else asdict(run.paused),
        "live": live,
        "event_feed": served.get("event_feed"),
        "started": last.started,
        "ended": last.ended,
        "error": last.error,
        "reason": last.reason,
        "reached": None if last.reached is None else asdict(last.reached),
    }
