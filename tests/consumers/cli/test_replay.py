"""``consumer --replay`` with a pace, a part, and again and again."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import Run, command
from replay_streams import record

from offloop.consumers.cli import main as cli

CALLBACKS = """


from offloop.consumers import Callback


class Passes(Callback):
    made = 0

    def __init__(self):
        Passes.made += 1
        self.batches = 0

    def batch_end(self, state, logger):
        self.batches += 1
        logger.log_metrics({"batches": self.batches})

    def fit_end(self, state, logger):
        print(f"pass {Passes.made}: {self.batches} batches", flush=True)

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state):
        self.batches = state["batches"]


class Tell(Callback):
    def run_event(self, event, state, logger):
        print(f"event {state.seq} {event.value}", flush=True)

    def close(self, state, logger):
        print("closed", flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(CALLBACKS)
    record(tmp_path / "r.mcap")
    return tmp_path


@pytest.fixture
def consumer(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(folder)
    return command("consumer", cli.main, monkeypatch, capsys)


def last_line(text: str) -> str:
    return text.splitlines()[-1]


def test_the_pace_does_not_change_logged_values(consumer: Run, folder: Path) -> None:
    record(folder / "ranks.mcap", ranks=2, inner=True)
    written = []
    ways = (["--replay", "ranks.mcap"], *(["--replay", "ranks.mcap", "--rate", rate] for rate in ("max", "10")))
    for number, way in enumerate([*ways, ["--run", "ranks.mcap", "--rate", "1e5"]]):
        done = consumer(*way, "-c", "metrics,speed,lr", "-l", "jsonl", "-o", f"jsonl.path={number}")
        assert done.code == 0
        assert last_line(done.err).startswith("run r finished: ")
        written.append((folder / str(number)).read_text())
    assert len(written[0].splitlines()) > 12
    assert set(written) == {written[0]}


def test_a_range_is_replayed(consumer: Run) -> None:
    done = consumer("--replay", "r.mcap", "-c", "mine.py:Tell", "--start", "10ba", "--until", "10ba")
    assert done.code == 0
    assert done.out.splitlines() == [*("event 1 init", "event 2 fit_start", "event 21 batch_end", "closed")]
    assert done.err == "run r was replayed until 10ba: 3 events handled\n"


def test_a_named_consumer_resumes_in_a_replay(consumer: Run, folder: Path) -> None:
    arguments = ["--replay", "r.mcap", "-c", "mine.py:Passes", "--rate", "1e6", "-l", "jsonl", "--name", "mine"]
    first = consumer(*arguments, "--until", "5ba")
    assert last_line(first.err) == "run r was replayed until 5ba: 5 events handled"
    second = consumer(*arguments)
    assert "consumer mine resumes after 5 events" in second.err
    assert second.out == "pass 2: 12 batches\n"
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 12
    third = consumer(*arguments)
    assert "has handled this run to its end already" in third.err
    assert third.code == 0


def test_a_replay_that_waits_ends_at_once_on_a_signal(folder: Path) -> None:
    command = [sys.executable, "-P", "-m", "offloop.consumers", "--replay", "r.mcap"]
    command += ["-c", "mine.py:Tell", "--rate", "1e-9"]
    with subprocess.Popen(
        command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "event 1 init\n"
        process.send_signal(signal.SIGTERM)
        shown, _ = process.communicate(timeout=100)
    assert process.returncode == 0
    assert shown.endswith("closed\ndetached from run r: 1 events handled\n")
