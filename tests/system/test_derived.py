"""Results that return into their run: from live consumers, replays, and consumers that were killed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from brokers import broker_pid
from helpers import wait_for

import offloop
from offloop.bus import ConfigurationError, Event, Publisher, Recording, find_run
from offloop.bus.index.index import read_entry
from offloop.bus.recording.derived import derived_recordings
from offloop.bus.recording.tables import read_rows
from offloop.bus.runs.directory import is_over
from offloop.bus.types.actor import DERIVED, actor_in, is_actor
from offloop.bus.types.commands import Command, Outcome
from offloop.bus.types.event import ANY_TABLE
from offloop.consumers import Callback, Logger
from offloop.consumers.api.logger import Row, RunContext
from offloop.consumers.callbacks import EarlyStopper, ThresholdStopper, TrainerMetrics
from offloop.consumers.dashboard.view.own_events import OwnEvents
from offloop.consumers.dashboard.view.run_view import RunView
from offloop.consumers.loggers import RunLogger
from offloop.consumers.testing import MemoryStream, replay

JUDGE = """
import time
from offloop import Callback

class Judge(Callback):
    keeps = ("_seen",)
    _seen = 0

    def batch_end(self, state, logger):
        self._seen += 1
        logger.log_metrics({"score": state.loss / 2, "seen": self._seen})
        logger.log_table(["batch", "text"], [[int(state.timestamp.batch), "ok"]], name="verdicts")
        time.sleep(0.002)
"""


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOOP_RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judge.py").write_text(JUDGE)


def consumer(*more: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "offloop", "consume", "--callbacks", "judge.py:Judge", "--log", "run"]
    return subprocess.Popen([*command, "-o", "run.name=judge", *more], stderr=subprocess.PIPE, text=True)


def finish(process: "subprocess.Popen[str]", seconds: float = 100) -> tuple[int, str]:
    try:
        _, said = process.communicate(timeout=seconds)
    finally:
        process.kill()
        process.communicate()
    return process.returncode, said


def train(publisher: Publisher, batches: range, seconds: float = 0.005) -> None:
    for batch in batches:
        publisher.publish("batch_end", batch=batch, loss=float(batch))
        time.sleep(seconds)


def finished_run(batches: int = 20) -> Path:
    with Publisher("r") as publisher:
        train(publisher, range(1, batches + 1), 0)
    return find_run("r").path


def logged() -> list[tuple[int, dict[str, float]]]:
    """The judge's values in the recording and beside it, in order."""
    run = find_run("r").path
    found = []
    for recording in (Recording(run), *derived_recordings(run)):
        for one in recording:
            if is_actor(one.rank) and "logged" in one.fields:
                found += [(step, values) for step, values in one.logged]
    return found


def verdicts() -> list[int]:
    run = find_run("r").path
    parts = read_rows([Recording(run), *derived_recordings(run)], "verdicts")
    return [row[0] for part in parts for row in part.rows]


def test_each_result_comes_once_though_its_consumer_is_killed_again_and_again() -> None:
    with Publisher("r") as publisher:
        batch = 1
        for _ in range(3):
            judge = consumer("--run", "r", "--name", "j", "--commit-every", "10")
            known = len(_published())
            train(publisher, range(batch, batch + 60))
            batch += 60
            wait_for(lambda: publisher.wait() or len(_published()) > known + 10, "results")  # noqa: B023
            judge.kill()
            judge.communicate()
        last = consumer("--run", "r", "--name", "j")
        train(publisher, range(batch, batch + 20))
    code, said = finish(last)
    assert code == 0, said
    end = batch + 20
    assert logged() == [(number, {"judge/score": number / 2, "judge/seen": number}) for number in range(1, end)]
    assert verdicts() == list(range(1, end))
    names = [actor_in(one.fields) for one in Recording(find_run("r").path) if one.event is Event.INIT]
    assert {(one.name, one.role) for one in names if one} == {("judge", DERIVED)}
    run = offloop.runs()["r"]
    assert run.metrics("judge/score", to="dict")["judge/score"][-1] == (end - 1) / 2
    assert run.summary["judge/score"].high == (end - 1) / 2
    assert run.tables() == {"verdicts": end - 1}


def _published() -> list[object]:
    run = find_run("r").path
    return [one for one in Recording(run) if is_actor(one.rank)]


def test_results_after_the_end_lie_beside_the_recording_once_and_change_nothing_else() -> None:
    run = finished_run()
    before = (run / "recording-1.mcap").read_bytes()
    alone = replay(TrainerMetrics(), Recording(run)).rows
    judge = consumer("--replay", "r")
    assert finish(judge)[0] == 0
    assert (run / "recording-1.mcap").read_bytes() == before
    assert replay(TrainerMetrics(), Recording(run)).rows == alone
    assert logged() == [(batch, {"judge/score": batch / 2, "judge/seen": batch}) for batch in range(1, 21)]
    assert verdicts() == list(range(1, 21))
    frame = offloop.runs()["r"]
    assert frame.metrics("judge/score", to="dict")["judge/score"][:2] == [0.5, 1.0]
    assert frame.tables() == {"verdicts": 20}
    assert read_entry(find_run("r")).metrics["judge/seen"].last == 20
    view, shown = RunView("r", 1), []
    view.stream = Recording(run)
    tables = OwnEvents(view, ANY_TABLE, shown.append)
    tables.look()
    wait_for(lambda: not tables.is_behind, "the table")
    assert [one.event.value for one in shown] == ["#verdicts"] * 20
    code, said = finish(consumer("--replay", "r"))
    assert code != 0
    assert "run 'r' has results of 'judge' already" in said
    assert len(logged()) == 20


def _open(results: RunLogger) -> Path:
    run = find_run("r").path
    results.open(RunContext("r", 1, run, lambda *_, **__: Outcome(Command("dump"), "batch_end", 0)))
    return run


def _add(results: RunLogger, batches: range) -> None:
    for one in Recording(find_run("r").path):
        if one.event is Event.BATCH_END and int(one.timestamp.batch) in batches:
            batch = int(one.timestamp.batch)
            results.log_rows([Row(batch, one.time, {"score": batch / 2, "seen": batch})], one)


PROGRAM = """
from offloop import Publisher
publisher = Publisher("r")
for batch in range(1, 7):
    publisher.publish("batch_end", batch=batch)
while publisher.statistics().lag:
    publisher.wait()
print("recorded", flush=True)
input()
publisher.close()
"""


@pytest.mark.parametrize("end", ["finished", "killed"])
def test_results_after_the_end_of_the_broker_lie_beside_the_recording(
    end: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    results = RunLogger("judge")
    with subprocess.Popen([sys.executable, "-c", PROGRAM], **pipes) as training:
        assert training.stdout is not None
        training.stdout.readline()
        run = _open(results)
        _add(results, range(1, 4))
        results.state_dict()
        if end == "finished":
            training.communicate(b"\n")
            wait_for(lambda: is_over(run), "the end")
            _add(results, range(4, 7))  # the consumer has not heard of the end
        else:
            serving = broker_pid(run)
            os.kill(serving, signal.SIGSTOP)
            training.kill()
            training.communicate()
            _add(results, range(4, 7))
            os.kill(serving, signal.SIGKILL)
    results.close()
    assert logged() == [(batch, {"judge/score": batch / 2, "judge/seen": batch}) for batch in range(1, 7)]
    said = capsys.readouterr().err
    assert end == "killed" or re.search(r"the run has ended: [123] results of judge are in ", said)


def test_a_replay_that_was_killed_continues() -> None:
    finished_run(500)
    for _ in range(2):
        judge = consumer("--replay", "r", "--name", "j", "--commit-every", "50")
        size = _size()
        wait_for(lambda: _size() > size, "results")  # noqa: B023
        judge.kill()
        judge.communicate()
    last = consumer("--replay", "r", "--name", "j")
    assert finish(last)[0] == 0
    assert [step for step, _ in logged()] == list(range(1, 501))
    assert verdicts() == list(range(1, 501))


def _size() -> int:
    path = find_run("r").path / "derived-1-judge.mcap"
    return path.stat().st_size if path.exists() else 0


def test_other_values_than_numbers_and_bad_names_are_left_out() -> None:
    with pytest.raises(ConfigurationError, match="cannot be the name"):
        RunLogger("a b")

    class Texts(Callback):
        def batch_end(self, state: object, logger: Logger) -> None:
            logger.log_metrics({"verdict": "good"})
            logger.log_table(["a"], [[1]], name="my table / 1")

    run = finished_run(2)
    replay(Texts(), Recording(run), loggers=[RunLogger()])
    assert logged() == []
    assert offloop.runs()["r"].tables() == {"my_table___1": 2}


@pytest.mark.parametrize(
    ("stopper", "at"),
    [
        (ThresholdStopper("judge/score", "logged", 0.8), 2),
        (EarlyStopper("judge/score", "logged", patience="2ba"), 5),
    ],
    ids=["threshold", "no improvement"],
)
def test_results_stop_a_training(stopper: Callback, at: int) -> None:
    stream = MemoryStream()
    for score in (0.5, 0.9, 0.8, 0.7, 0.6):
        stream.batch(loss=1.0)
        stream.emit("iteration_checkpoint", logged=[[1, {"judge/score": score}]])
    commands = replay(stopper, stream).commands
    assert commands[0].decided_at == at


def test_results_of_an_actor_raise_alerts() -> None:
    with Publisher("r") as publisher:
        train(publisher, range(1, 3))
        command = [sys.executable, "-m", "offloop", "consume", "--callbacks", "alert", "--run", "r"]
        rule = ["-o", "alert.rules=judge/score > 0.8"]
        alert = subprocess.Popen([*command, *rule], stderr=subprocess.PIPE, text=True)
        with offloop.join(role="judge", name="judge") as judge:
            judge.log(score=0.9)
        wait_for(lambda: publisher.wait() or (publisher.run_dir / "alerts.json").exists(), "the alert")
        os.kill(alert.pid, signal.SIGINT)
        _, said = alert.communicate(timeout=100)
    assert re.search(r"ALERT: run r, .*: judge/score > 0.8 \(judge/score is 0.9", said)
    assert json.loads((publisher.run_dir / "alerts.json").read_text())[0]["status"] == "firing"
