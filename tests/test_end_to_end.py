"""The whole path, trainer to broker to consumer and back from the record, with the real processes."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch
from brokers import broker_pid
from gold import GoldMLP
from helpers import REFERENCE
from training import Act, gold_evaluators, gold_trainer

from offloop.bus import Event, Recording, find_run
from offloop.consumers import SpeedMonitor


def start(*command, **options):
    """A command of this environment as a process."""
    return subprocess.Popen(
        [str(Path(sys.executable).with_name(command[0])), *map(str, command[1:])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


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


def test_the_recording_holds_the_reference_trace_row_for_row(runs_dir):
    # All others are compared in trainer/loop/test_traces.py, without a stream.
    reference = json.loads((REFERENCE / "trace_03b_eval_2ba.json").read_text())
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


def test_consumers_attached_before_during_and_after_write_equal_bytes(runs_dir, tmp_path):
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


def test_weights_are_equal_with_the_stream_off_on_and_its_broker_killed(runs_dir, monkeypatch):
    def kill():
        os.kill(broker_pid(runs_dir / "killed" / "r"), signal.SIGKILL)

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
