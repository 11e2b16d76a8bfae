"""What is known of a training that was stopped: how long it was to be, how far it got, and why it ended."""

import getpass
import io
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from attached_callbacks import Impatient
from gold import gold_loader
from training import Act, FakeClock, gold_trainer

from offloop.bus import find_run
from offloop.bus.protocol.order import Ending, worst_of
from offloop.bus.recording.recording import Recording
from offloop.bus.types.event import Event
from offloop.bus.types.timestamp import Time
from offloop.consumers.callbacks.stoppers import EarlyStopper
from offloop.consumers.dashboard.view.run_view import RunView
from offloop.trainer import AlgorithmLogger, State, Trainer
from offloop.trainer.loop.progress import ProgressDisplay


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


def command(*words: object) -> tuple[int, str, str]:
    """Runs a command of this environment to its end: exit code, standard output, standard error."""
    with started(*words) as process:
        out, err = process.communicate(timeout=100)
        return process.returncode, out, err


@contextmanager
def started(*words: object) -> Iterator["subprocess.Popen[str]"]:
    """A command of this environment as a process, which is gone afterwards."""
    program = str(Path(sys.executable).with_name(str(words[0])))
    pipe: Any = subprocess.PIPE
    with subprocess.Popen([program, *map(str, words[1:])], stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_line(process: "subprocess.Popen[str]", text: str) -> None:
    """Reads standard error up to a line with that text."""
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            return
    raise AssertionError(f"no line with {text!r}")


def stopping(at_batch: int, reason: str | None = None) -> Act:
    """An algorithm that stops the training with that batch."""

    def act(event: Event, state: State, logger: AlgorithmLogger) -> None:
        if int(state.timestamp.batch) == at_batch:
            state.stop_training(reason)

    return Act(act, Event.BATCH_END)


def stopped_run(tmp_path: Path, **arguments: object) -> Trainer:
    """A training of 9 epochs, of 4 batches each, that stops after 3 batches."""
    settings = {"algorithms": stopping(3), "max_duration": "9ep", "publish": True, "runs_dir": tmp_path}
    with gold_trainer(**(settings | arguments)) as trainer:
        trainer.fit()
    return trainer


def test_planned_and_reached_are_two_things_in_the_stream_and_on_dashboards(runs_dir: Path) -> None:
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


def test_a_training_that_goes_on_after_a_stop_has_its_own_length(runs_dir: Path) -> None:
    trainer = gold_trainer(algorithms=stopping(3), max_duration="9ep", publish=True, runs_dir=runs_dir)
    trainer.fit()
    trainer.fit("2ba")
    assert trainer.state.planned_duration == trainer.state.max_duration == Time.from_timestring("5ba")
    trainer.close()
    assert trainer.recording is not None
    assert "planned_duration" not in list(Recording(trainer.recording))[-1].fields


def test_an_algorithm_says_why_it_stops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = stopped_run(tmp_path, algorithms=stopping(3, "loss above 100"), run_name="r", progress_bar=True)
    *_, counts, why = capsys.readouterr().err.splitlines()
    assert counts.startswith("stopped: 0 ep, 3 ba, 18 sp of 9ep in ")
    assert why == "run r was stopped: loss above 100"
    assert trainer.recording is not None
    recording = Recording(trainer.recording)
    assert list(recording)
    assert recording.ending == Ending("stopped", reason="loss above 100")
    attempt = find_run("r", tmp_path).last
    assert (attempt.status, attempt.reason, attempt.error) == ("stopped", "loss above 100", None)
    code, out, _ = command("offloop", "show", "r", "--details", "--runs-dir", tmp_path)
    assert code == 0
    assert re.search(r"^reason +loss above 100$", out, re.MULTILINE)
    assert re.search(r"^  reached +0ep 3ba 18sp of 9ep$", out, re.MULTILINE)
    code, out, _ = command("offloop", "runs", "--runs-dir", tmp_path)
    assert re.search(r"^r +stopped .* epoch 0 of 9  ", out, re.MULTILINE), out
    code, _, err = command("consumer", "--callbacks", "speed", "--replay", trainer.recording)
    assert re.search(r"^run r stopped \(loss above 100\): \d+ events handled$", err, re.MULTILINE), err


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


def test_a_signal_and_a_person_are_named(tmp_path: Path) -> None:
    options = ("--max-duration", "100000ep", "--runs-dir", tmp_path)
    with started("trainer", "digits", "--run-name", "a", *options) as process:
        wait_for_line(process, "epoch   0")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert "run a was stopped: signal SIGINT" in err.splitlines()
    assert find_run("a", tmp_path).last.reason == "signal SIGINT"

    with started("trainer", "digits", "--run-name", "b", *options) as process:
        wait_for_line(process, "epoch   0")
        code, out, err = command("offloop", "send", "b", "stop", "--reason", "enough seen", "--runs-dir", tmp_path)
        assert code == 0, err
        _, err = process.communicate(timeout=60)
    by = f"offloop send by {getpass.getuser()}@{socket.gethostname()}: enough seen"
    assert "'stop' took effect at batch" in out, "who sends it knows why"
    assert f"'stop' ({by}) took effect at batch" in err
    assert f"run b was stopped: {by}" in err.splitlines()
    assert find_run("b", tmp_path).last.reason == by


def test_ranks_stop_for_the_reason_of_the_one_that_asked() -> None:
    ends = [Ending("stopped"), Ending("stopped", reason="why"), Ending("finished")]
    assert worst_of(ends) == Ending("stopped", reason="why")


def test_a_bar_shows_how_much_of_what_was_planned_is_done(tmp_path: Path) -> None:
    state = stopped_run(tmp_path, publish=False).state
    terminal = Terminal()
    progress = ProgressDisplay(state, FakeClock(0), terminal)
    progress.draw()
    assert "[==..................]    8%" in terminal.getvalue()
