"""What a broker lists of its runs directory."""

from pathlib import Path

from offloop.bus import Event, Publisher
from offloop.bus.broker.archive import Archive
from offloop.bus.types.timeouts import Timeouts


def test_a_run_that_began_after_the_last_look_is_listed_at_once(runs_dir: Path) -> None:
    runs = Archive(runs_dir, Timeouts(list_runs=3600.0))
    assert runs.listing(None, {}) == []
    with Publisher("r") as publisher:
        publisher.publish(Event.BATCH_END, batch=1)
    served = {"r": {"attempt": 1, "event_feed": "tcp://127.0.0.1:1"}}
    assert [run["run"] for run in runs.listing(None, served)] == ["r"]
