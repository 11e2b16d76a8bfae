"""Checkpoints that a consumer writes: the names and moments of the reference, the bytes of the trainer's own."""

import itertools
import json
import logging
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from gold import gold_loader
from helpers import wait_for
from logged import contents
from saved_runs import DURATIONS, PT, RUNS, SAVERS, listing
from tensor_stream import TensorStream, Wide
from training import Act, gold_trainer

from offloop.bus import Recording, find_run
from offloop.bus.checkpoints.announced import best_of, read_announced
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.tensors.segments import SegmentPool
from offloop.bus.types.event import Event
from offloop.consumers.api.logger import Upload
from offloop.consumers.callbacks.checkpoint_saver import CheckpointSaver
from offloop.consumers.runner.runner import Runner
from offloop.trainer import State
from offloop.trainer.checkpoints.file import read_checkpoint
from offloop.trainer.stream.run_stream import TrainingStream

LATEST = "latest-rank0.safetensors"


def train(stream: TensorStream, monkeypatch: pytest.MonkeyPatch, n_train: int = 24, **arguments: Any) -> None:
    monkeypatch.setattr(TrainingStream, "_start_publisher", lambda *_: stream)
    with gold_trainer(n_train, publish=True, run_name=stream.run_name, **arguments) as trainer:
        trainer.fit()


@pytest.mark.parametrize("name", RUNS)
def test_files_and_uploads_are_those_of_the_reference(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RUNS[name]
    settings = {**PT, **SAVERS.get(name, {})}
    saver = CheckpointSaver(**{**settings, "folder": str(tmp_path / settings["folder"])})
    stream = TensorStream(saver, run_name="myrun")
    seen: list[dict[str, Any]] = []
    uploads: list[dict[str, Any]] = []

    def look(snapshot: Snapshot) -> None:
        files = listing(tmp_path)
        if not seen or seen[-1]["files"] != files:
            epoch, batch, sample = snapshot.timestamp.values[1:4]
            event = snapshot.event.name
            seen.append({"first_seen_at": event, "epoch": epoch, "batch": batch, "sample": sample, "files": files})

    def take(upload: Upload) -> None:
        path, is_link = upload.file_path, upload.remote_file_name.endswith(".symlink")
        shown = f"<TEMPDIR>/{path.name}" if is_link else f"<TMP>/ck_{name}/{path.relative_to(tmp_path)}"
        exists = path.is_file() and path.stat().st_size > 0
        uploads.append(
            {
                "remote_file_name": upload.remote_file_name,
                "file_path": shown,
                "overwrite": upload.overwrite,
                "exists": exists,
            }
        )

    stream.after_event, stream.on_upload = look, take
    for file in run["snapshots"][0]["files"]:
        (tmp_path / file).write_bytes(b"")
    arguments = {"n_train": 20 if name == "10sp" else 24, "max_duration": DURATIONS.get(name, "2ep")}
    # Names may have seconds of training time, which no machine is to be slow enough to change.
    train(stream, monkeypatch, clock=itertools.count(10**18, 1000).__next__, **arguments)
    if run["error"]:
        [error] = stream.errors
        assert re.search(r"ep9-ba99-rank0\.pt is of a later time .*overwrite=True", str(error))
    else:
        assert not stream.errors
    # What is not kept at all stays until it has been uploaded.
    if name != "keep0":
        assert seen == run["snapshots"]
    assert listing(tmp_path) == run["files_at_end"]
    assert uploads == run["upload_file_calls"]
    assert list(dict.fromkeys(str(path) for path in saver.saved_checkpoints)) == list(
        dict.fromkeys(path.replace("<folder>", str(tmp_path)) for path in run["saved_checkpoints"])
    )


# -- the same files as in process -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("interval", "arguments"),
    [
        ("3ba", {"eval_interval": "5ba", "weights_only": True}),
        ("1iter", {"iteration_length": "1ep", "eval_interval": "1ep"}),
        ("2ep", {"optimizers": lambda model: torch.optim.Adam(model.parameters())}),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_they_are_those_of_the_trainer_byte_for_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interval: str, arguments: dict[str, Any]
) -> None:
    settings = dict(arguments)
    weights_only = settings.pop("weights_only", False)
    options = {"save_interval": interval, "weights_only": weights_only, "num_checkpoints_to_keep": -1}
    own = {"save_folder": tmp_path / "in", "save_interval": interval, "save_weights_only": weights_only}
    stream = TensorStream(CheckpointSaver(str(tmp_path / "out"), **options))
    train(stream, monkeypatch, eval_dataloader=gold_loader("eval_a", 12, 5), **own, **settings)
    inside = contents(tmp_path / "in")
    assert len(inside) >= 2
    assert contents(tmp_path / "out") == inside


def test_when_no_memory_is_free_it_comes_after_the_next_batch_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saver = CheckpointSaver(str(tmp_path), save_interval="3ba", latest_filename=None, num_checkpoints_to_keep=-1)
    stream = TensorStream(saver)
    reserve = SegmentPool.reserve

    def refuse(pool: SegmentPool, nbytes: int, field: str, *, defer: bool = False) -> Any:
        last = stream.snapshots[-1]
        is_in_use = last.timestamp.batch in (6, 7) or (last.timestamp.batch == 12 and last.event is Event.BATCH_END)
        return None if is_in_use else reserve(pool, nbytes, field)

    monkeypatch.setattr(SegmentPool, "reserve", refuse)
    with caplog.at_level(logging.WARNING):
        train(stream, monkeypatch, model=Wide(), max_duration="12ba")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "ep0-ba3-rank0.safetensors",
        "ep1-ba8-rank0.safetensors",
        "ep2-ba9-rank0.safetensors",
        # Of the last batch, after the epoch that it ended: a Trainer's own is ep2-ba12.
        "ep3-ba12-rank0.safetensors",
    ]
    refused = [snapshot for snapshot in stream.snapshots if "not_sent" in snapshot.fields]
    assert [(one.event, one.timestamp.batch) for one in refused] == [
        (Event.BATCH_CHECKPOINT, 6),
        (Event.BATCH_CHECKPOINT, 7),
        (Event.BATCH_CHECKPOINT, 12),
    ]
    assert len(caplog.records) == 1
    assert read_checkpoint(tmp_path / "ep1-ba8-rank0.safetensors")["timestamp"][2] == 8


@pytest.mark.parametrize("evaluated", [True, False])
def test_unless_it_is_told_otherwise_the_newest_three_and_the_best_stay_in_the_run_s_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evaluated: bool
) -> None:
    saver, run = CheckpointSaver(), tmp_path / "{a} run"
    if evaluated:
        train_with_scores([0.5, 0.9, 0.7, 0.6, 0.8], saver, monkeypatch, metric="Accuracy", run_dir=run)
        kept = [2, 3, 4, 5]
        assert read_checkpoint(run / "checkpoints" / BEST)["timestamp"][1] == 2
    else:
        train(TensorStream(saver, run_dir=run), monkeypatch, max_duration="5ep")
        kept = [3, 4, 5]
        assert not [path for path in (run / "checkpoints").iterdir() if path.name in (BEST, "checkpoints.json")]
    assert epochs(run / "checkpoints") == kept
    announced = read_announced(run)
    assert sorted(one.epoch for one in announced if one.is_there) == kept
    assert (None if (best := best_of(announced)) is None else best.epoch) == (2 if evaluated else None)


# -- the best by a metric ---------------------------------------------------------------------------------------------

BEST = "best-rank0.safetensors"
NAN = math.nan


def train_with_scores(
    scores: list[float],
    saver: CheckpointSaver,
    monkeypatch: pytest.MonkeyPatch,
    look: Callable[[Snapshot], object] = lambda snapshot: None,
    metric: str = "Score",
    run_dir: Path | None = None,
    stream: TensorStream | None = None,
    **arguments: Any,
) -> None:
    """Trains an epoch of 4 batches for each score, which its evaluation gives."""
    stream, rest = stream or TensorStream(saver, run_dir=run_dir), iter(scores)
    stream.after_event = look

    def score(event: Event, state: State, logger: object) -> None:
        state.eval_metric_values = {state.dataloader_label: {metric: next(rest), "Other": 1.0}}

    settings = {"max_duration": f"{len(scores)}ep", "eval_dataloader": gold_loader("eval_a", 12, 5)}
    train(stream, monkeypatch, algorithms=[Act(score, Event.EVAL_END)], **(settings | arguments))


def epochs(folder: Path) -> list[int]:
    return sorted(int(path.name[2:].partition("-")[0]) for path in folder.glob("ep*"))


@pytest.mark.parametrize(
    ("scores", "options", "kept", "bests"),
    [
        ([0.5, 0.9, 0.7, 0.8, 0.6], {"keep": 2}, [2, 4, 5], [1, 2, 2, 2, 2]),
        ([0.5, 0.9, 0.7, 0.8, 0.6], {"keep": 2, "mode": "min"}, [1, 5], [1, 1, 1, 1, 1]),
        ([0.5, NAN, 0.4, math.inf, 0.6], {"keep": 1}, [5], [1, 1, 1, 1, 5]),
        ([NAN, NAN], {"keep": 1}, [2], [None, None]),
        ([0.9, 0.5, 0.6], {"num_checkpoints_to_keep": 0}, [1], [1, 1, 1]),
    ],
)
def test_the_best_stay_and_a_link_leads_to_the_very_best_also_after_a_restart_of_the_consumer(
    scores: list[float],
    options: dict[str, Any],
    kept: list[int],
    bests: list[int | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def make() -> CheckpointSaver:
        return CheckpointSaver(str(tmp_path), monitor="Score", **{"mode": "max", **options})

    saver = make()
    stream = TensorStream(saver)
    seen: list[int | None] = []

    def look(snapshot: Snapshot) -> None:
        link = tmp_path / BEST
        # At no time does it lead to where nothing is.
        assert link.exists() or not link.is_symlink()
        if snapshot.event is Event.EPOCH_CHECKPOINT:
            seen.append(read_checkpoint(link)["timestamp"][1] if link.exists() else None)
        if snapshot.event is Event.EPOCH_START:
            [killed], stream.callbacks = stream.callbacks, (again := make(),)
            again.load_state_dict(msgpack.unpackb(msgpack.packb(killed.state_dict())))
            killed.post_close()

    train_with_scores(scores, saver, monkeypatch, look, stream=stream)
    assert seen == bests
    assert epochs(tmp_path) == kept
    if options.get("num_checkpoints_to_keep") != 0:
        assert read_checkpoint(tmp_path / LATEST)["timestamp"][1] == len(scores)
    written = json.loads((tmp_path / "checkpoints.json").read_text())
    assert written["best"] == (None if bests[-1] is None else f"ep{bests[-1]}-ba{4 * bests[-1]}-rank0.safetensors")
    assert written["checkpoints"] == [
        {
            "file": f"ep{epoch}-ba{4 * epoch}-rank0.safetensors",
            "batch": 4 * epoch,
            "metric": "metrics/eval/Score",
            "value": score if math.isfinite(score := scores[epoch - 1]) else None,
        }
        for epoch in kept
    ]


def test_the_next_attempt_knows_those_from_before_it_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for scores, resumed in ([0.5, 0.9, 0.7], {}), ([0.8, 0.6], {"load_path": tmp_path, "max_duration": "5ep"}):
        train_with_scores(
            scores, CheckpointSaver(str(tmp_path), monitor="Score", mode="max", keep=2), monkeypatch, **resumed
        )
    assert epochs(tmp_path) == [2, 4, 5]
    assert read_checkpoint(tmp_path / BEST)["timestamp"][1] == 2
    # Another training under the same name begins anew.
    train_with_scores([0.1], CheckpointSaver(str(tmp_path), monitor="Score", mode="max", overwrite=True), monkeypatch)
    assert read_checkpoint(tmp_path / BEST)["timestamp"][1] == 1
    assert epochs(tmp_path) == [1, 2, 4, 5]


def test_an_evaluation_after_the_training_rates_the_last_checkpoint_and_one_without_a_value_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saver = CheckpointSaver(str(tmp_path), monitor="Score", mode="max", weights_only=True)
    with caplog.at_level(logging.WARNING):
        train_with_scores([0.5], saver, monkeypatch, max_duration="3ep", eval_interval="5ep")
    assert os.readlink(tmp_path / BEST) == "ep3-ba12-rank0.safetensors"
    [message] = [record.getMessage() for record in caplog.records if "compared" in record.getMessage()]
    assert "checkpoint ep1-ba4-rank0.safetensors is not compared: no value of 'Score' came with its batch" in message


# -- arguments --------------------------------------------------------------------------------------------------------


def test_a_metric_of_the_training_is_found_too_and_a_loss_is_best_when_it_is_least(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = TensorStream(CheckpointSaver(str(tmp_path), save_interval="1ba", monitor="total", mode="min", keep=1))
    train(stream, monkeypatch)
    losses = {one.timestamp.batch.value: one.loss for one in stream.snapshots if one.event is Event.BATCH_END}
    best = min(losses, key=losses.__getitem__)
    assert best not in (1, 8)
    assert read_checkpoint(tmp_path / BEST)["timestamp"][2] == best
    assert sorted(read_checkpoint(path)["timestamp"][2] for path in tmp_path.glob("ep*")) == [best, 8]


# -- live, replayed and killed ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_live_it_writes_what_the_trainer_writes_and_again_in_a_replay(runs_dir: Path, tmp_path: Path) -> None:
    def saver(folder: str) -> CheckpointSaver:
        return CheckpointSaver(str(tmp_path / folder), save_interval="3ba", num_checkpoints_to_keep=-1)

    def is_requested() -> bool:
        trainer._publisher.poll()
        return bool(trainer._publisher.demand_version)

    await_saver = Act(lambda *_: wait_for(is_requested, "the saver's demand", 90), Event.FIT_START)
    own: dict[str, Any] = {"save_folder": tmp_path / "in", "save_interval": "3ba"}
    with gold_trainer(publish=True, run_name="r", callbacks=[saver("out")], algorithms=[await_saver], **own) as trainer:
        trainer.fit()
    assert len(contents(tmp_path / "in")) > 2
    assert contents(tmp_path / "out") == contents(tmp_path / "in")
    announced = {Path(one.path) for one in read_announced(find_run("r").path)}
    for folder in ("in", "out"):
        assert announced >= {path for path in (tmp_path / folder).iterdir() if not path.is_symlink()}
    Runner(Recording(find_run("r").recording), [saver("again")]).run()
    assert contents(tmp_path / "again") == contents(tmp_path / "out")


@pytest.mark.slow
def test_after_kills_no_half_file_is_there_and_it_goes_on(runs_dir: Path, tmp_path: Path) -> None:
    out, consumers = tmp_path / "out", list[subprocess.Popen[bytes]]()
    command = [sys.executable, "-m", "offloop.consumers", "--run", "r", "--name", "saver", "--callbacks", "checkpoint"]
    for option in (f"folder={out}", "save_interval=3ba", "num_checkpoints_to_keep=-1"):
        command += ["-o", f"checkpoint.{option}"]

    def kill(event: Event, state: State, logger: object) -> None:
        time.sleep(0.01)
        if len(list(out.glob("ep*"))) < 2 * len(consumers):
            return
        if len(consumers) == 3:
            state.stop_training()
            return
        for killed in consumers[-1:]:
            killed.kill()
            killed.wait()
        for path in out.glob("ep*"):
            read_checkpoint(path, device="meta")
        consumers.append(subprocess.Popen(command))

    own: dict[str, Any] = {"save_folder": tmp_path / "in", "save_interval": "3ba", "max_duration": "100000ba"}
    algorithms = [Act(kill, Event.BATCH_START)]
    with gold_trainer(model=Wide(), publish=True, run_name="r", algorithms=algorithms, **own) as trainer:
        trainer.fit()
    assert consumers[-1].wait(60) == 0
    # Where the machine is busy, single ones come too late, also the last.
    ours, theirs = (
        {one["timestamp"][2]: one["model"] for one in map(read_checkpoint, folder.glob("ep*"))}
        for folder in (out, tmp_path / "in")
    )
    shared = ours.keys() & theirs.keys()
    assert shared
    for batch in shared:
        assert ours[batch].keys() == theirs[batch].keys()
        assert all(ours[batch][name].equal(theirs[batch][name]) for name in ours[batch])
    latest = read_checkpoint(out / LATEST)
    assert {*latest["checkpoints"]["saved"], os.readlink(out / LATEST)} == {path.name for path in out.glob("ep*")}
    assert not list(out.glob(".*"))
