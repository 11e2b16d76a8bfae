"""The whole path, trainer to broker to consumer and back from the record, with the real processes."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attached_callbacks import Echo
from gold import GoldMLP
from helpers import REFERENCE, wait_for
from paths import SUPPORT
from training import Act, gold_evaluators, gold_trainer

from offloop import commands
from offloop.bus import Event, Recording, find_run, list_runs
from offloop.consumers import SpeedMonitor

TRACES = [
    "01_plain_2ep",
    "03a_eval_1ep",
    "03b_eval_2ba",
    "04_max_duration_1ep",
    "04_max_duration_24sp",
    "04_max_duration_3ba",
    "05_short_last_batch_2ep",
]


def start(*command, **options):
    """A command of this environment as a process."""
    return subprocess.Popen(
        [str(Path(sys.executable).with_name(command[0])), *map(str, command[1:])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def run(*command, timeout=100, **options):
    """Runs a command to its end: exit code, standard output, standard error."""
    process = start(*command, **options)
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def wait_for_line(process, text):
    """Reads standard error up to a line with that text."""
    for line in process.stderr:
        if text in line:
            return
    raise AssertionError(f"no line with {text!r}")


def row(snapshot):
    """A snapshot as the reference's traces write one down."""
    now, previous = snapshot.timestamp, snapshot.previous_timestamp
    counters = ("epoch", "batch", "batch_in_epoch", "sample", "sample_in_epoch", "iteration", "epoch_in_iteration")
    return [
        snapshot.event.name,
        *(int(getattr(now, name)) for name in counters),
        int(snapshot.eval_timestamp.batch),
        int(snapshot.eval_timestamp.sample),
        int(snapshot.predict_timestamp.batch),
        int(snapshot.predict_timestamp.sample),
        None if previous is None else int(previous.batch),
        snapshot.dataloader_label,
        snapshot.dataloader_len,
        snapshot.batch_size,
        None if snapshot.max_duration is None else str(snapshot.max_duration),
    ]


@pytest.mark.parametrize("name", TRACES)
def test_the_recording_holds_the_reference_trace_row_for_row(runs_dir, name):
    reference = json.loads((REFERENCE / f"trace_{name}.json").read_text())
    config = reference["config"]
    trainer = gold_trainer(
        config["n_train"],
        config["batch_size"],
        max_duration=config["max_duration"],
        eval_interval=config.get("eval_interval", 1),
        eval_dataloader=gold_evaluators(config.get("evaluators", {})) or None,
        publish=True,
        record="all",
        run_name="r",
    )
    trainer.fit()
    trainer.close()
    rows = [row(snapshot) for snapshot in Recording(runs_dir / "r")]
    assert rows == [expected for expected in reference["trace"] if not expected[0].endswith("close()")]


def test_attached_before_in_the_middle_and_after_the_files_are_the_same_to_the_byte(runs_dir, tmp_path):
    def follow(name, *options):
        path = tmp_path / f"{name}.jsonl"
        command = (
            "consumer",
            "--callbacks",
            "speed,lr,metrics",
            "--log",
            "jsonl",
            "-o",
            f"jsonl.path={path}",
            *options,
        )
        return start(*command, "-o", "speed.window_size=10")

    def attach_in_the_middle(event, state, logger):
        if int(state.timestamp.batch) == 60:
            processes.append(follow("middle"))
            wait_for_line(processes[-1], "attached")

    processes = [follow("before")]
    wait_for_line(processes[0], "waiting for a run")
    trainer = gold_trainer(
        60,
        6,
        max_duration="12ep",
        eval_dataloader=gold_evaluators({"eval_a": {"n": 12, "batch_size": 5}}),
        algorithms=[Act(attach_in_the_middle, Event.BATCH_END)],
        publish=True,
        run_name="r",
    )
    wait_for_line(processes[0], "attached")
    trainer.fit()
    trainer.close()
    processes += [follow("after", "--last"), follow("replay", "--replay", runs_dir / "r")]
    for process in processes:
        _, err = process.communicate(timeout=100)
        assert process.returncode == 0, err
    contents = [(tmp_path / f"{name}.jsonl").read_bytes() for name in ("before", "middle", "after", "replay")]
    assert len(set(contents)) == 1
    told, *rows = [json.loads(line) for line in contents[0].splitlines()]
    assert told["hyperparameters"]["model/name"] == "GoldMLP"
    assert max(row["step"] for row in rows) == 120
    assert any("throughput/samples_per_sec" in row for row in rows)
    assert any("metrics/eval_a/MulticlassAccuracy" in row for row in rows)


def weights(trainer):
    digest = hashlib.sha256()
    for name, tensor in trainer.state.model.state_dict().items():
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


class Dropout(GoldMLP):
    """The recorded model with random numbers in its forward pass."""

    def forward(self, batch):
        return super().forward((torch.nn.functional.dropout(batch[0], 0.2, self.training), batch[1]))


def train(publish, at_batch_20=None, callbacks=None):
    losses = []

    def watch(event, state, logger):
        losses.append(float(state.total_loss))
        if at_batch_20 is not None and int(state.timestamp.batch) == 20:
            at_batch_20()

    trainer = gold_trainer(
        48, 6, model=Dropout(), max_duration="6ep", seed=3, publish=publish, run_name="r" if publish else None,
        algorithms=[Act(watch, Event.BATCH_END)], callbacks=callbacks,
    )  # fmt: skip
    trainer.fit()
    trainer.close()
    return weights(trainer), losses


def test_the_stream_changes_nothing_not_even_when_its_broker_is_killed(runs_dir, monkeypatch):
    def kill():
        os.kill(json.loads((runs_dir / "killed" / "r" / "broker.json").read_text())["pid"], signal.SIGKILL)

    off = train(publish=False)
    on = train(publish=True)
    observed = (monkeypatch.setenv("OFFLOOP_RUNS_DIR", str(runs_dir / "o")), train(True, callbacks=[SpeedMonitor()]))[1]
    monkeypatch.setenv("OFFLOOP_RUNS_DIR", str(runs_dir / "killed"))
    killed = train(publish=True, at_batch_20=kill)
    assert off == on == observed == killed
    assert len(set(off[1])) > 40
    assert find_run("r").status == "finished"
    recordings = [Recording(runs_dir / where / "r") for where in (".", "killed")]
    undisturbed, interrupted = ([(one.event, one.seq, one.loss) for one in recording] for recording in recordings)
    assert undisturbed == interrupted


SCRIPT = """
import torch
from offloop.consumers import Callback, JsonlLogger, LRMonitor
from offloop.trainer import Classifier, Trainer

class EpochMonitor(Callback):
    "Defined in the script itself, as people do."
    def __init__(self, word):
        self.word = word
    def epoch_start(self, state, logger):
        print(self.word, int(state.timestamp.epoch), flush=True)
    async def batch_start(self, state, logger):
        logger.log_metrics({"rows": state.batch_size})

data = torch.utils.data.TensorDataset(torch.randn(40, 8), torch.randint(0, 4, (40,)))
model = Classifier(torch.nn.Linear(8, 4))
trainer = Trainer(
    model=model,
    train_dataloader=torch.utils.data.DataLoader(data, batch_size=10),
    optimizers=torch.optim.SGD(model.parameters(), lr=0.5),
    max_duration="3ep",
    callbacks=[EpochMonitor("epoch"), LRMonitor()],
    loggers=[JsonlLogger()],
    run_name="r",
)
trainer.fit()
trainer.close()
"""


@pytest.mark.slow
def test_callbacks_of_the_users_own_script_run_in_their_own_process(runs_dir, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("epoch")] == ["epoch 0", "epoch 1", "epoch 2"]
    rows = [json.loads(line) for line in (runs_dir / "r" / "metrics.jsonl").read_text().splitlines()]
    assert sum(row.get("rows") == 10 for row in rows) == 12
    assert [row["lr-SGD/group0"] for row in rows if "lr-SGD/group0" in row] == [0.5] * 12
    assert sum("loss/train/total" in row for row in rows) == 12


def test_an_event_that_is_run_by_hand_reaches_the_callbacks(runs_dir, tmp_path):
    trainer = gold_trainer(publish=True, callbacks=[Echo(tmp_path / "seen")])
    trainer.engine.run_event(Event.EPOCH_START)
    trainer.close()
    seen = (tmp_path / "seen").read_text().splitlines()
    assert seen[0] == "init"
    assert seen[-1] == "epoch_start"


@pytest.mark.slow
def test_two_terminals_in_either_order(runs_dir):
    waiting = start("consumer", "--callbacks", "speed,lr", "-o", "speed.window_size=5", "-o", "console.every=0")
    wait_for_line(waiting, "waiting for a run")
    code, _, err = run("trainer", "digits", "--max-duration", "1ep")
    assert code == 0, err
    out, err = waiting.communicate(timeout=100)
    assert waiting.returncode == 0
    assert "samples_per_sec" in out
    assert "  lr  " in out
    code, again, err = run(
        "consumer", "--last", "--callbacks", "speed,lr", "-o", "speed.window_size=5", "-o", "console.every=0"
    )
    assert (code, again) == (0, out)
    (found,) = list_runs()
    assert found.status == "finished"
    code, replayed, _ = run(
        *("consumer", "--replay", found.path, "--callbacks", "speed,lr"),
        *("-o", "speed.window_size=5", "-o", "console.every=0"),
    )
    assert (code, replayed) == (0, out)


SLOW = """
import time
from offloop.consumers import Callback

class Sleeper(Callback):
    "Sleeps at the end of every batch."
    def batch_end(self, state, logger):
        time.sleep(60)
"""


@pytest.mark.slow
def test_a_callback_that_hangs_is_not_noticed_by_the_training(runs_dir, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    trainer = gold_trainer(48, 6, publish=True, run_name="r", max_duration="20ep")
    hanging = start("consumer", "--callbacks", f"{tmp_path / 'slow.py'}:Sleeper")
    wait_for_line(hanging, "attached")
    trainer.fit()
    trainer.close()
    assert len(list(Recording(runs_dir / "r").snapshots([Event.BATCH_END]))) == 160
    assert hanging.poll() is None
    hanging.kill()
    hanging.communicate()


@pytest.fixture
def finished(runs_dir):
    trainer = gold_trainer(publish=True, run_name="done")
    trainer.fit()
    trainer.close()
    return runs_dir / "done"


def one_line(result):
    """The error of a command that failed as it should: exit code not 0, one line, no traceback."""
    code, _, err = result
    assert code not in (0, None)
    lines = [line for line in err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1
    assert "Traceback" not in err
    return lines[0]


@pytest.fixture
def run_here(monkeypatch, capsys):
    """Runs a command to its end in this process: exit code, standard output, standard error."""

    def run_command(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            getattr(commands, name)()
        return ended.value.code, *capsys.readouterr()

    return run_command


BAD = [
    (("consumer", "--run", "nope"), "no run 'nope'.*done"),
    (("consumer", "--replay", "nope.mcap"), "no recording nope.mcap"),
    (("consumer", "--callbacks", "sped"), "sped.*speed"),
    (("consumer", "--callbacks", "speed", "-o", "speed.window=3"), "window.*window_size"),
    (("offloop", "show", "nope"), "no run 'nope'.*done"),
    (("trainer", "digts"), "digts.*digits"),
    (("trainer", "digits", "--max-duration", "5"), "'5'.*2ep"),
    (("trainer", "digits", "--max-duration", "5 parsecs"), "parsecs"),
    (("trainer", "digits", "--runs-dir", "/proc/nowhere"), "/proc/nowhere"),
    (("trainer", "digits", "--run-name", "a/b"), "run name"),
]


@pytest.mark.parametrize(("command", "expected"), BAD, ids=[" ".join(command) for command, _ in BAD])
def test_mistakes_get_one_line_that_says_what_to_do(finished, run_here, command, expected):
    assert re.search(expected, one_line(run_here(*command)))


@pytest.mark.parametrize(
    ("command", "code"),
    [(("consumer", "--run", "nope"), 1), (("offloop", "show", "nope"), 1), (("trainer", "digts"), 2)],
)
def test_each_command_by_itself_ends_with_one_line_and_its_code(finished, command, code):
    result = run(*command)
    one_line(result)
    assert result[0] == code


def test_files_that_are_no_recording_and_truncated_ones(finished, run_here, tmp_path):
    (tmp_path / "text.mcap").write_text("hello")
    assert "not a recording" in one_line(run_here("consumer", "--replay", tmp_path / "text.mcap"))
    whole = (finished / "recording-1.mcap").read_bytes()
    (tmp_path / "cut.mcap").write_bytes(whole[: len(whole) // 4])
    code, _, err = run_here("consumer", "--replay", tmp_path / "cut.mcap", "--callbacks", "lr")
    assert code == 4
    assert "lost" in err
    assert "offset" in err
    assert "Traceback" not in err


def test_a_run_that_died_is_read_to_its_last_event_and_called_lost(runs_dir):
    script = """
import os, sys
sys.path.insert(0, sys.argv[1])
from training import Act, gold_trainer
from offloop.bus import Event
def die(event, state, logger):
    if int(state.timestamp.batch) == 7:
        os.kill(os.getpid(), 9)
gold_trainer(publish=True, run_name="r", algorithms=[Act(die, Event.BATCH_START)]).fit()
"""
    watching = start("consumer", "--callbacks", "lr", "-o", "console.every=0")
    wait_for_line(watching, "waiting for a run")
    done = subprocess.run([sys.executable, "-c", script, str(SUPPORT)], timeout=100, check=False)
    assert done.returncode == -signal.SIGKILL
    out, err = watching.communicate(timeout=100)
    assert watching.returncode == 4
    assert "lost" in err
    assert len(out.splitlines()) >= 1
    wait_for(lambda: find_run("r").status == "lost", "the broker to note it")


def test_a_failing_training_tells_its_consumers_why(runs_dir):
    def fail(event, state, logger):
        raise ValueError("boom in an algorithm")

    trainer = gold_trainer(publish=True, run_name="r", algorithms=[Act(fail, Event.BATCH_END)])
    watching = start("consumer", "--callbacks", "lr")
    wait_for_line(watching, "attached")
    with pytest.raises(ValueError, match="boom in an algorithm"):
        trainer.fit()
    _, err = watching.communicate(timeout=100)
    assert watching.returncode == 0
    assert "failed: ValueError: boom in an algorithm" in err
    trainer.close()
