"""What is known of a training that was stopped: how long it was to be, how far it got, and why it ended."""

import getpass
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from attached_callbacks import Impatient
from gold import gold_loader
from training import Act, fitted, gold_trainer

from offloop.bus import find_run
from offloop.bus.cli.describe import describe_run, lines
from offloop.bus.protocol.order import Ending, worst_of
from offloop.bus.recording.recording import Recording
from offloop.bus.types.event import Event
from offloop.bus.types.timestamp import Time
from offloop.consumers.callbacks.stoppers import EarlyStopper
from offloop.consumers.dashboard.view.run_view import RunView
from offloop.trainer import AlgorithmLogger, State, Trainer


def stopping(at_batch: int, reason: str | None = None) -> Act:
    """Return an algorithm that stops the training with that batch."""

    def act(event: Event, state: State, logger: AlgorithmLogger) -> None:
        if int(state.timestamp.batch) == at_batch:
            state.stop_training(reason)

    return Act(act, Event.BATCH_END)


def stopped_run(tmp_path: Path, **arguments: object) -> Trainer:
    """Return a training of 9 epochs, of 4 batches each, that stops after 3 batches."""
    settings = {"algorithms": stopping(3), "max_duration": "9ep", "publish": True, "runs_dir": tmp_path}
    return fitted(**(settings | arguments))


def test_planned_and_reached_duration_are_published_and_shown(runs_dir: Path) -> None:
    trainer = stopped_run(runs_dir)
    assert trainer.state.max_duration == Time.from_timestring("3ba"), "as in the reference"
    assert trainer.state.planned_duration == Time.from_timestring("9ep")
    view = RunView("run")
    assert trainer.recording is not None
    for snapshot in Recording(trainer.recording):
        assert str(snapshot.planned_duration) == "9ep" or snapshot.event is Event.INIT
        view.see(snapshot)
    last = snapshot
    assert str(last.max_duration) == "3ba"
    progress = view.progress()
    assert (progress.max_duration, progress.batch) == ("9ep", 3)
    assert progress.fraction == 3 / 36
    assert progress.seconds_left == 0


def test_a_training_continued_after_a_stop_has_its_own_duration(runs_dir: Path) -> None:
    trainer = gold_trainer(algorithms=stopping(3), max_duration="9ep", publish=True, runs_dir=runs_dir)
    trainer.fit()
    trainer.fit("2ba")
    assert trainer.state.planned_duration == trainer.state.max_duration == Time.from_timestring("5ba")
    trainer.close()
    assert trainer.recording is not None
    assert "planned_duration" not in list(Recording(trainer.recording))[-1].fields


def test_an_algorithm_says_why_it_stops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = stopped_run(tmp_path, algorithms=stopping(3, "loss above 100"), run_name="r", progress_bar=True)
    assert capsys.readouterr().err.splitlines()[-1] == "run r was stopped: loss above 100"
    assert trainer.recording is not None
    recording = Recording(trainer.recording)
    list(recording)
    assert recording.ending == Ending("stopped", reason="loss above 100")
    attempt = find_run("r", tmp_path).last
    assert (attempt.status, attempt.reason, attempt.error) == ("stopped", "loss above 100", None)
    shown = lines(describe_run(find_run("r", tmp_path)))
    assert ("reason", "loss above 100") in shown
    assert ("reached", "0ep 3ba 18sp of 9ep") in shown


def test_a_callback_s_reason_names_the_metric_and_for_how_long(tmp_path: Path) -> None:
    trainer = gold_trainer(
        max_duration="90ep",
        publish=True,
        run_name="r",
        runs_dir=tmp_path,
        eval_dataloader=gold_loader("eval_a", 12, 5),
        callbacks=EarlyStopper("MulticlassAccuracy", "eval", patience=1, min_delta=10.0),
        wait_for="callbacks",
    )
    with trainer:
        trainer.fit()
    attempt = find_run("r", tmp_path).last
    assert attempt.reason is not None
    assert re.fullmatch(r"early-stop: MulticlassAccuracy not better than 0\.\d+ for 2 epochs", attempt.reason), (
        attempt.reason
    )
    assert trainer.state.stop_reason == attempt.reason


def test_a_callback_without_a_reason_is_named(tmp_path: Path) -> None:
    trainer = gold_trainer(
        max_duration="100000ba", publish=True, run_name="r", runs_dir=tmp_path, callbacks=Impatient()
    )
    with trainer:
        trainer.fit()
    assert find_run("r", tmp_path).last.reason == "callback Impatient"


def test_the_person_who_stops_it_is_named(tmp_path: Path) -> None:
    def send(event: Event, state: State, logger: AlgorithmLogger) -> None:
        if state.timestamp.batch == 1:
            arguments = ["send", "b", "stop", "--reason", "enough seen", "--runs-dir", str(tmp_path)]
            sender.append(subprocess.Popen([Path(sys.executable).with_name("offloop"), *arguments]))

    sender: list[subprocess.Popen[bytes]] = []
    settings = {"algorithms": Act(send, Event.BATCH_END), "max_duration": "10000000ba", "max_delay": 0}
    trainer = stopped_run(tmp_path, run_name="b", **settings)
    assert sender[0].wait(60) == 0
    by = f"offloop send by {getpass.getuser()}@{socket.gethostname()}: enough seen"
    assert trainer.state.stop_reason == find_run("b", tmp_path).last.reason == by


def test_ranks_stop_for_the_reason_of_the_requesting_rank() -> None:
    ends = [Ending("stopped"), Ending("stopped", reason="why"), Ending("finished")]
    assert worst_of(ends) == Ending("stopped", reason="why")
