"""What an agent that waits is told, event by event."""

from types import SimpleNamespace
from typing import Any

from offloop.bus import Event
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.actor import FIRST_ACTOR
from offloop.bus.types.health import HEALTH
from offloop.bus.types.timestamp import Timestamp
from offloop.consumers.mcp.waiting import WatchedRun
from offloop.consumers.runner.places import FoundRun


def watched(rules: list[str]) -> WatchedRun:
    """A run of ten batches, whose loss is 0, and of 9 at the eighth. Its host was measured last."""
    events = [Snapshot.build(Event.FIT_START, seq=1)]
    for batch in range(1, 11):
        fields: dict[str, Any] = {"loss": 9.0 if batch == 8 else 0.0, "time_ns": batch * 10**9}
        events.append(Snapshot.build(Event.BATCH_END, seq=1 + batch, timestamp=Timestamp(batch=batch), **fields))
    events.append(Snapshot.build(HEALTH, seq=2, rank=FIRST_ACTOR, host="h"))
    place: Any = SimpleNamespace(attach=lambda run, subscription: events)
    run = WatchedRun(FoundRun(place, "r", 1, "live", is_live=True), rules, stall_seconds=60)
    run.start()
    run.join()
    return run


def test_a_measurement_of_the_host_hides_no_finding() -> None:
    run = watched(["loss > 5"])
    told = run.look("")
    assert [(one["status"], one["batch"]) for one in told["findings"]] == [("firing", 8), ("resolved", 9)]
    assert told["batch"] == 10
    again = run.look(told["cursor"])
    assert "findings" not in again
    assert again["cursor"] == told["cursor"]


def test_many_findings_of_one_event_come_in_parts_without_a_loss() -> None:
    rules = [f"loss > {1 + number / 10}" for number in range(40)]
    run, cursor, found = watched(rules), "", list[tuple[str, str]]()
    while part := (told := run.look(cursor)).get("findings"):
        found += [(one["rule"], one["status"]) for one in part]
        cursor = told["cursor"]
    assert found == [(rule, status) for status in ("firing", "resolved") for rule in rules]
