"""What a broker lists of its runs directory."""

from pathlib import Path

import pytest

from bus import Event, Publisher
from bus.broker import archive
from bus.broker.archive import Archive


def test_a_run_that_began_after_the_last_look_is_listed_at_once(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "LIST_SECONDS", 3600.0)
    runs = Archive(runs_dir)
    assert runs.listing(None, {}) == []
    with Publisher("r") as publisher:
        publisher.publish(Event.BATCH_END, batch=1)
    served = {"r": {"attempt": 1, "stream": "tcp://127.0.0.1:1"}}
    assert [run["run"] for run in runs.listing(None, served)] == ["r"]
