"""The description of a run by its bridge, see "Listed runs" in ``docs/protocol.md``."""

import msgspec

from offloop.bus.protocol.run_state import Count, Pause, Reached, SecondsSince1970
from offloop.bus.runs.bridged import BridgeStatus
from offloop.bus.runs.directory import RunInfo


class ListedRun(msgspec.Struct, frozen=True):
    """The newest attempt of a run on one host."""

    run: str
    attempt: Count
    status: str
    recorded_as: str | None = None
    id: str | None = None
    host: str | None = None
    world_size: Count = 1
    local_world_size: Count = 1
    ranks: tuple[Count, ...] = ()
    attempts: tuple[Count, ...] = ()
    live: bool = False  # as its bridge reports; for a reader also whether the bridge reported lately
    started: SecondsSince1970 | None = None
    ended: SecondsSince1970 | None = None
    error: str | None = None
    reason: str | None = None
    reached: Reached | None = None
    paused: Pause | None = None
    bridge: BridgeStatus | None = None

    @property
    def is_going_on(self) -> bool:
        """True if it may continue on its host, as far as its bridge reported."""
        return self.status in ("live", "paused", "running")

    @property
    def is_silent(self) -> bool:
        """True if it may continue on its host, although its bridge is silent."""
        return self.status in ("live", "paused") and not self.live


def list_run(run: RunInfo, host: str, bridge: BridgeStatus, reached: Reached | None) -> ListedRun:
    """Describe a run for its bridge; ``reached`` applies while ``run.json`` has no progress."""
    last = run.last
    # Before the bridge is done, a reader would take the copied part for the whole run.
    is_over = bridge.state == "done" and not run.live
    return ListedRun(
        run.name,
        last.number,
        run.status if is_over or run.paused else "live",
        run.recorded_as,
        run.id,
        host,
        last.world_size,
        last.local_world_size,
        tuple(sorted(rank for one in last.publishers if type(rank := one.get("rank")) is int and rank >= 0)),
        tuple(attempt.number for attempt in run.attempts),
        run.live,
        last.started,
        last.ended if is_over else None,
        last.error,
        last.reason,
        last.reached or reached,
        run.paused,
        bridge,
    )
