"""``offloop backfill``: what a callback would have logged, and where a stopper would have acted, in old runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from commands import command
from run_folders import write_run

import offloop
from offloop.bus import Publisher, find_run
from offloop.commands import offloop as main

JUDGE = """
from offloop import Callback

class Judge(Callback):
    def batch_end(self, state, logger):
        logger.log_metrics({"half": state.loss / 2})

class Fails(Callback):
    def batch_end(self, state, logger):
        raise RuntimeError("boom")
"""


@pytest.fixture(autouse=True)
def _runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOOP_RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judge.py").write_text(JUDGE)
    for name in ("one", "two", "three"):
        losses = [float(batch) if name == "two" else 10.0 / batch for batch in range(1, 11)]
        write_run(tmp_path / "runs", name, losses)


def backfill(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "offloop", "backfill", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_metric_is_added_to_the_chosen_runs_and_only_once() -> None:
    before = {name: (find_run(name).path / "recording-1.mcap").read_bytes() for name in ("one", "two", "three")}
    done = backfill("judge.py:Judge", "--where", "run != 'three'", "--name", "judge", "--jobs", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert "[2 of 2]" in done.stderr
    assert json.loads(done.stdout) == [
        {"run": run, "attempt": 1, "failed": False, "results": ["10 events"]} for run in ("one", "two")
    ]
    found = {run.name: run.summary.get("judge/half") for run in offloop.runs()}
    assert found["three"] is None
    assert found["one"].last == 0.5
    assert offloop.runs().where("judge/half > 1")[0].name == "two"
    assert offloop.runs()["two"].metrics("judge/half", to="dict")["judge/half"] == [batch / 2 for batch in range(1, 11)]
    again = backfill("judge.py:Judge", "one", "--name", "judge")
    assert "one: has results of 'judge' already" in again.stderr
    for name, recording in before.items():
        assert (find_run(name).path / "recording-1.mcap").read_bytes() == recording


def test_a_run_that_fails_keeps_nothing_and_is_named() -> None:
    done = backfill("judge.py:Fails", "one")
    assert done.returncode == 1
    assert "one: failed: callback Fails raised RuntimeError" in done.stderr
    assert not list(find_run("one").path.glob("derived-*"))


def test_what_if_says_where_it_would_have_acted_and_changes_nothing() -> None:
    offloop.runs()  # stores what is known of them
    files = {path: path.stat().st_mtime_ns for path in Path("runs").rglob("*")}
    stoppers = ("-o", "alert.rules=loss > 7.5", "-o", "judge.py:Stops.limit=4")
    Path("judge.py").write_text(
        JUDGE
        + """
class Stops(Callback):
    def __init__(self, limit: float = 4):
        self.limit = limit

    def batch_end(self, state, logger):
        if state.loss > self.limit:
            state.stop_training("too much")
"""
    )
    done = backfill("alert,judge.py:Stops", "--where", "run != 'three'", "--what-if", *stoppers)
    assert done.returncode == 0, done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines == [
        "one alert at batch 1 of 10: loss > 7.5 (loss is 10)",
        "one stop at batch 1 of 10, 90% of it left: too much",
        "two alert at batch 8 of 10: loss > 7.5 (loss is 8)",
        "two stop at batch 5 of 10, 50% of it left: too much",
    ]
    assert {path: path.stat().st_mtime_ns for path in Path("runs").rglob("*")} == files
    done = backfill("alert", "two", "-o", "alert.rules=loss > 7.5", "--what-if", "--json")
    assert json.loads(done.stdout)[0]["results"] == ["alert at batch 8 of 10: loss > 7.5 (loss is 8)"]


def test_live_runs_are_left_out_and_mistakes_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = command("offloop", main, monkeypatch, capsys)
    with Publisher("live"):
        done = here("backfill", "judge.py:Judge", "live", "--json")
    assert (done.code, done.out) == (0, "[]\n")
    assert "run live is live, and left out" in done.err
    assert here("backfill", "alert", "--where", "run == 'no'", "-o", "alert.rules=nan", "--json").out == "[]\n"
    for arguments, text in (
        (("nothing", "one"), "nothing"),
        (("judge.py:Judge",), "--where"),
        (("judge.py:Judge", "one", "--name", "a b"), "cannot be the name"),
        (("judge.py:Judge", "unknown"), "no run 'unknown'"),
    ):
        done = here("backfill", *arguments)
        assert done.code in (1, 2)
        assert text in done.err
        assert "Traceback" not in done.err
