"""Which run a start is: another one, whose name has a number if it is taken, or the next attempt of one."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from offloop.bus import Event, Publisher
from offloop.bus.runs.directory import find_run, list_runs, numbered_names


def finish(publisher: Publisher) -> tuple[str, int]:
    with publisher:
        publisher.publish(Event.BATCH_END, batch=1)
    return publisher.run_name, publisher.attempt


def test_a_start_under_a_taken_name_is_a_new_run(runs_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert finish(Publisher("r")) == ("r", 1)
    assert not caplog.text
    assert finish(Publisher("r", info=lambda name: {"place": f"saved/{name}"})) == ("r-2", 1)
    assert caplog.messages == ["run r exists already and is not resumed: this run is r-2"]
    assert finish(Publisher("r", resume=True)) == ("r", 2)
    assert finish(Publisher("r-2")) == ("r-2-2", 1)
    with (
        Publisher("r", world_size=2) as first,
        Publisher("r", rank=1, world_size=2, broker=first.address) as second,
    ):
        second.publish(Event.BATCH_END, batch=1)
        assert (first.run_name, second.run_name, second.run_dir) == ("r-3", "r-3", first.run_dir)
        assert finish(Publisher("r")) == ("r-4", 1)
    assert sorted((one.name, one.status, len(one.attempts)) for one in list_runs()) == [
        *(("r", "finished", 2), ("r-2", "finished", 1), ("r-2-2", "finished", 1)),
        *(("r-3", "finished", 1), ("r-4", "finished", 1)),
    ]
    assert find_run("r-2").last.info["place"] == "saved/r-2"
    assert find_run("r-2").recorded_as == "r-2"


def test_simultaneous_starts_get_different_names(runs_dir: Path) -> None:
    code = "from offloop.bus import Publisher; publisher = Publisher('r'); publisher.close(); print(publisher.run_name)"
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = [one.communicate(timeout=100) for one in started]
    assert sorted(out.strip() for out, _ in said) == ["r", "r-2", "r-3"]
    assert [len(find_run(one.strip()).attempts) for one, _ in said] == [1] * 3


def test_a_folder_without_a_run_is_free_and_an_unreadable_one_is_taken(runs_dir: Path) -> None:
    (runs_dir / "r" / "checkpoints").mkdir(parents=True)
    assert finish(Publisher("r")) == ("r", 1)
    # An unreadable record is another run's.
    (runs_dir / "r" / "run.json").write_text("{")
    assert finish(Publisher("r")) == ("r-2", 1)
    assert (runs_dir / "r" / "run.json").read_text() == "{"


def test_a_long_name_is_shortened_to_make_room_for_the_number() -> None:
    names = list(itertools.islice(numbered_names("x" * 100), 3))
    assert names == ["x" * 100, "x" * 98 + "-2", "x" * 98 + "-3"]


def test_a_process_restarted_by_torchrun_continues_its_run(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for launch, expected in (("a-launch", "r"), ("none", "r-2")):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", launch)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
        assert finish(Publisher("r")) == (expected, 1)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        assert finish(Publisher("r")) == (expected, 2)
    assert json.loads((find_run("r").path / "run.json").read_text())["attempts"][1]["info"]["launch"] == "a-launch"
