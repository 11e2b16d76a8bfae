"""What an agent that waits is told, event by event."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from run_folders import WrittenRun

from offloop.bus import ConfigurationError, Event
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.actor import FIRST_ACTOR
from offloop.bus.types.health import HEALTH
from offloop.bus.types.timestamp import Timestamp
from offloop.consumers.mcp.waiting import WatchedRun, earlier_attempt
from offloop.consumers.runner.places import FolderRuns, FoundRun


def followed(run: FoundRun, rules: list[str]) -> WatchedRun:
    watched = WatchedRun(run, rules, stall_seconds=60)
    watched.start()
    watched.join()
    return watched


def of_events(attach: Any) -> FoundRun:
    place: Any = SimpleNamespace(attach=attach)
    return FoundRun(place, "r", 1, "live", is_live=True)


def trained(losses: list[float]) -> FoundRun:
    """A run with these losses, whose host was measured last."""
    events = [Snapshot.build(Event.FIT_START, seq=1)]
    for batch, loss in enumerate(losses, 1):
        fields: dict[str, Any] = {"loss": loss, "time_ns": batch * 10**9}
        events.append(Snapshot.build(Event.BATCH_END, seq=1 + batch, timestamp=Timestamp(batch=batch), **fields))
    events.append(Snapshot.build(HEALTH, seq=2, rank=FIRST_ACTOR, host="h"))
    return of_events(lambda run, subscription: events)


ONE_PEAK = [*[0.0] * 7, 9.0, 0.0, 0.0]


def test_a_measurement_of_the_host_hides_no_finding() -> None:
    run = followed(trained(ONE_PEAK), ["loss > 5"])
    told = run.look("")
    assert [(one["status"], one["batch"]) for one in told["findings"]] == [("firing", 8), ("resolved", 9)]
    assert told["batch"] == 10
    again = run.look(told["cursor"])
    assert "findings" not in again
    assert again["cursor"] == told["cursor"]


def test_many_findings_of_one_event_come_in_parts_without_a_loss_and_before_the_end(runs_dir: Path) -> None:
    rules = [f"loss > {1 + number / 10}" for number in range(40)]
    WrittenRun(runs_dir, "r").train(ONE_PEAK).end()
    run, cursor, found, ended = followed(FolderRuns().find("r"), rules), "", list[tuple[str, str]](), [False]
    while not ended[-1]:
        told = run.look(cursor)
        found += [(one["rule"], one["status"]) for one in told["findings"]]
        cursor = told["cursor"]
        ended.append("ended" in told)
    assert found == [(rule, status) for status in ("firing", "resolved") for rule in rules]
    assert ended == [False, False, False, True]


def test_findings_that_are_not_kept_are_said_to_be_left_out() -> None:
    run = followed(trained([0.0, 9.0] * 600), ["loss > 5"])
    told = run.look("")
    assert told["older findings left out"]
    assert "older findings left out" not in run.look(told["cursor"])


def test_a_wait_continues_with_the_end_of_its_attempt_and_then_with_the_next_one(runs_dir: Path) -> None:
    run = WrittenRun(runs_dir, "r").train([0.0, 9.0])
    run.end("failed", "boom")
    cursor = followed(FolderRuns().find("r"), ["loss > 100"]).look("")["cursor"]
    WrittenRun(runs_dir, "r").train([0.0, 0.0]).end()
    newest = FolderRuns().find("r")
    earlier = earlier_attempt(newest, cursor)
    assert earlier is not None
    watched = followed(earlier, ["loss > 5"])
    watched.is_newest = False
    told = watched.look(cursor)
    (firing, ended) = told["findings"]
    assert (firing["rule"], firing["batch"]) == ("loss > 5", 2)
    assert "failed: boom" in ended["text"]
    assert "ended" not in told
    assert earlier_attempt(newest, told["cursor"]) is None
    assert followed(newest, ["loss > 5"]).look(told["cursor"])["ended"] == "finished"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_wait_that_fails_for_any_reason_says_so() -> None:
    def attach(run: FoundRun, subscription: Any) -> None:
        raise RuntimeError("can't start new thread")

    assert followed(of_events(attach), []).look("")["problem"] == "RuntimeError: can't start new thread"


def test_the_rule_about_stalls_is_the_wait_s_own() -> None:
    with pytest.raises(ConfigurationError, match="leave out the rule 'stalled'"):
        WatchedRun(trained([]), ["stalled for 5min"], stall_seconds=60)
