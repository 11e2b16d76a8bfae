"""Checkpoints that a consumer writes: the names and moments of the reference, the bytes of the trainer's own."""

import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gold import GoldMLP, gold_loader
from helpers import wait_for
from saved_runs import DURATIONS, PT, RUNS, SAVERS, contents, listing
from tensor_stream import TensorStream, Wide
from training import Act, gold_trainer

from bus import Recording, find_run
from bus.errors import ConfigurationError
from bus.protocol.snapshot import Snapshot
from bus.tensors.segments import SegmentPool
from bus.types.event import Event
from consumers.api.callback import view_for
from consumers.api.logger import Logger, Upload
from consumers.callbacks.checkpoint_saver import CheckpointSaver
from trainer import State
from trainer.checkpoints.file import read_checkpoint
from trainer.stream.run_stream import TrainingStream

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
    train(stream, monkeypatch, **arguments)
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


def both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interval: str, **arguments: Any) -> TensorStream:
    """Saves in process and out of it; returns the stream."""
    weights_only = arguments.pop("weights_only", False)
    stream = TensorStream(CheckpointSaver(str(tmp_path / "out"), save_interval=interval, weights_only=weights_only))
    own = {"save_folder": tmp_path / "in", "save_interval": interval, "save_weights_only": weights_only}
    train(stream, monkeypatch, **(own | arguments))
    return stream


@pytest.mark.slow
@pytest.mark.parametrize(
    ("interval", "arguments"),
    [
        ("1ep", {}),
        ("3ba", {"eval_interval": "5ba"}),
        ("3ba", {"weights_only": True}),
        ("5sp", {"max_duration": "50sp", "device_train_microbatch_size": 2}),
        ("1iter", {"iteration_length": "1ep", "eval_interval": "1ep"}),
        ("0.3dur", {"max_duration": "7ba", "eval_interval": "2ba"}),
        ("2ep", {"optimizers": lambda model: torch.optim.Adam(model.parameters())}),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_they_are_those_of_the_trainer_byte_for_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interval: str, arguments: dict[str, Any]
) -> None:
    both(tmp_path, monkeypatch, interval, eval_dataloader=gold_loader("eval_a", 12, 5), **arguments)
    inside = contents(tmp_path / "in")
    assert len(inside) >= 2
    assert contents(tmp_path / "out") == inside


@pytest.mark.parametrize("event", [Event.AFTER_LOSS, Event.BATCH_END, Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT])
def test_a_training_that_is_stopped_is_saved_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, event: Event
) -> None:
    def stop(event: Event, state: State, logger: object) -> None:
        if state.timestamp.values[2] in (4, 5):
            state.stop_training()

    both(tmp_path, monkeypatch, "3ba", algorithms=[Act(stop, event)], max_duration="9ep")
    inside = contents(tmp_path / "in")
    assert len(inside) == 3
    assert contents(tmp_path / "out") == inside


@pytest.mark.parametrize("load", [False, True], ids=["new", "resumed"])
def test_a_training_that_is_stopped_before_its_first_batch_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: bool
) -> None:
    arguments: dict[str, Any] = {}
    if load:
        with gold_trainer(max_duration="3ba") as first:
            first.fit()
            arguments["load_path"] = first.save_checkpoint(tmp_path / "first.safetensors")
    stop = Act(lambda event, state, logger: state.stop_training(), Event.FIT_START)
    both(tmp_path, monkeypatch, "3ba", algorithms=[stop], eval_dataloader=gold_loader("eval_a", 12, 5), **arguments)
    assert contents(tmp_path / "in") == {}
    assert contents(tmp_path / "out") == {}


def test_the_latest_remote_name_is_uploaded_without_a_link_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = TensorStream(CheckpointSaver(str(tmp_path), save_interval="1ep", latest_filename=None), run_name="r")
    uploads: list[tuple[str, str]] = []
    stream.on_upload = lambda upload: uploads.append(
        (upload.remote_file_name, upload.file_path.read_text() if upload.file_path.suffix == ".symlink" else "")
    )
    train(stream, monkeypatch, max_duration="1ep")
    assert [path.name for path in tmp_path.iterdir()] == ["ep1-ba4-rank0.safetensors"]
    assert uploads == [
        ("r/checkpoints/ep1-ba4-rank0.safetensors", ""),
        ("r/checkpoints/latest-rank0.safetensors.symlink", "r/checkpoints/ep1-ba4-rank0.safetensors"),
    ]


def test_a_large_state_goes_through_shared_memory_and_loads_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = both(tmp_path, monkeypatch, "3ba", model=Wide())
    sent = [fields["checkpoint"] for _, _, fields in stream.sent if "checkpoint" in fields]
    assert all("segment" in value and value["bytes"] > 1_600_000 for value in sent)
    assert contents(tmp_path / "out") == contents(tmp_path / "in")
    whole = GoldMLP.state_dict(Wide())
    for load in ("ep0-ba3-rank0.safetensors", "latest-rank0.safetensors"):
        with gold_trainer(model=Wide(), load_path=tmp_path / "out" / load, max_duration="3ep") as trainer:
            trainer.fit()
            assert trainer.state.model.state_dict().keys() == whole.keys()


def test_a_training_goes_on_from_it_as_if_it_had_not_been_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gold_trainer(max_duration="3ep") as whole:
        whole.fit()
    both(tmp_path, monkeypatch, "3ba", max_duration="6ba")
    with gold_trainer(max_duration="3ep", load_path=tmp_path / "out") as resumed:
        resumed.fit()
    for name, value in whole.state.model.state_dict().items():
        assert torch.equal(value, resumed.state.model.state_dict()[name])
    assert resumed.state.timestamp.batch == whole.state.timestamp.batch


def test_when_no_memory_is_free_it_comes_after_the_next_batch_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saver = CheckpointSaver(str(tmp_path), save_interval="3ba", latest_filename=None)
    stream = TensorStream(saver)
    reserve = SegmentPool.reserve

    def refuse(pool: SegmentPool, nbytes: int, field: str) -> Any:
        batch = stream.snapshots[-1].timestamp.batch
        return None if batch in (6, 7) else reserve(pool, nbytes, field)

    monkeypatch.setattr(SegmentPool, "reserve", refuse)
    with caplog.at_level(logging.WARNING):
        train(stream, monkeypatch, model=Wide(), max_duration="11ba")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "ep0-ba3-rank0.safetensors",
        "ep1-ba8-rank0.safetensors",
        "ep2-ba11-rank0.safetensors",
        "ep2-ba9-rank0.safetensors",
    ]
    refused = [snapshot for snapshot in stream.snapshots if "not_sent" in snapshot.fields]
    assert [(one.event, one.timestamp.batch) for one in refused] == [
        (Event.BATCH_CHECKPOINT, 6),
        (Event.BATCH_CHECKPOINT, 7),
    ]
    assert "it comes with the next event" in refused[0].fields["not_sent"]
    assert [record.message.count("is left out, checkpoint") for record in caplog.records] == [1]
    assert read_checkpoint(tmp_path / "ep1-ba8-rank0.safetensors")["timestamp"][2] == 8


def test_several_ranks_are_told_what_to_do_instead() -> None:
    from trainer.fields.tensors import TENSOR_FIELDS

    with gold_trainer() as trainer:
        with pytest.raises(ConfigurationError, match=r"within fit\(\) only"):
            TENSOR_FIELDS["checkpoint"].compute(trainer.state)
        trainer.state.world_size = 2
        with pytest.raises(ConfigurationError, match=r"takes all 2 ranks at once.*save_folder"):
            TENSOR_FIELDS["checkpoint"].compute(trainer.state)


# -- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"filename": "same.safetensors"}, "the same for all checkpoints"),
        ({"filename": "{batches}"}, "filename '{batches}' has an unknown {batches}"),
        ({"remote_file_name": "{nothing}"}, "remote_file_name '{nothing}' has an unknown {nothing}"),
        ({"save_interval": "2"}, "invalid duration"),
        ({"save_interval": "-1ep"}, "'-1ep', which is not an interval"),
        ({"num_checkpoints_to_keep": -2}, "keep=-2"),
        ({"folder": "s3://bucket"}, "not on a file system"),
    ],
)
def test_what_is_not_allowed_is_refused_before_the_run(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigurationError, ValueError), match=re.escape(message)):
        CheckpointSaver(**arguments)


def test_an_interval_of_zero_asks_for_nothing() -> None:
    assert CheckpointSaver(save_interval=0).demand().events == {Event.FIT_START}


# -- live, replayed and killed ----------------------------------------------------------------------------------------

TRAINING = """
import os, sys, time
sys.path.insert(0, "tests/support")
from gold import GoldMLP
from tensor_stream import Wide
from training import Act, gold_trainer
from bus import Event
folder, size, enough = sys.argv[1:]

def watch(event, state, logger):
    time.sleep(0.01)
    if os.path.exists(enough):
        state.stop_training()

with gold_trainer(model=Wide() if size == "wide" else GoldMLP(), max_duration="100000ba", publish=True, run_name="r",
                  save_folder=folder, save_interval="3ba", algorithms=[Act(watch, Event.BATCH_START)]) as trainer:
    trainer.fit()
"""


@pytest.fixture
def start(runs_dir: Path) -> Iterator[Any]:
    processes: list[subprocess.Popen[str]] = []

    def run(*arguments: str) -> subprocess.Popen[str]:
        processes.append(subprocess.Popen([sys.executable, *arguments], text=True, stderr=subprocess.PIPE))
        return processes[-1]

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def consume(start: Any, folder: Path) -> "subprocess.Popen[str]":
    options = ["-o", f"checkpoint.folder={folder}", "-o", "checkpoint.save_interval=3ba"]
    arguments = ["--run", "r", "--wait", "--name", "saver", "--callbacks", "checkpoint", *options]
    process: subprocess.Popen[str] = start("-m", "consumers", *arguments)
    return process


def wait_for_more(folder: Path, count: int = 2) -> None:
    """Waits until there are so many more checkpoints in a folder."""
    before = len(list(folder.glob("ep*")))
    wait_for(lambda: len(list(folder.glob("ep*"))) >= before + count, "further checkpoints", 90)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("size", ["small", "wide"])
def test_live_it_writes_what_the_trainer_writes_and_a_small_one_again_in_a_replay(
    start: Any, tmp_path: Path, size: str
) -> None:
    training = start("-c", TRAINING, str(tmp_path / "in"), size, str(tmp_path / "enough"))
    consumer = consume(start, tmp_path / "out")
    wait_for_more(tmp_path / "out", 4)
    (tmp_path / "enough").touch()
    assert training.wait(60) == 0, training.stderr.read()
    assert consumer.wait(60) == 0, consumer.stderr.read()
    inside, outside = contents(tmp_path / "in"), contents(tmp_path / "out")
    # It may have missed the first ones, and knows only of those before that it has saved itself.
    both = set(outside) & set(inside) - {LATEST}
    assert both
    assert all(_tensors(outside[name]) == _tensors(inside[name]) for name in both)
    # Where no shared memory was free, the checkpoint came later, in the place of the one that was due: after a later
    # batch, or after the epoch that this batch ended.
    late = set(outside) - set(inside)
    assert size == "wide" or not late
    for name in late:
        batch = int(name.partition("-ba")[2].partition("-")[0])
        assert {one for one in outside if f"-ba{batch - batch % 3}-" in one} <= {name}
    assert os.readlink(tmp_path / "in" / LATEST) == os.readlink(tmp_path / "out" / LATEST)
    if size == "small":
        saver = CheckpointSaver(str(tmp_path / "again"), save_interval="3ba")
        for snapshot in Recording(find_run("r").recording):
            seen = view_for(saver.demand(), snapshot)
            if seen is not None:
                saver.run_event(seen.event, seen, Logger())
        saver.post_close()
        assert contents(tmp_path / "again") == outside


def _tensors(image: bytes) -> bytes:
    """A file but for its header, in which those that were saved before are named."""
    return image[8 + int.from_bytes(image[:8], "little") :]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_after_a_kill_no_half_file_is_there_and_it_goes_on(start: Any, tmp_path: Path) -> None:
    training = start("-c", TRAINING, str(tmp_path / "in"), "wide", str(tmp_path / "enough"))
    out = tmp_path / "out"
    for _ in range(2):
        consumer = consume(start, out)
        wait_for_more(out)
        consumer.send_signal(signal.SIGKILL)
        consumer.wait()
        for path in out.glob("ep*"):
            read_checkpoint(path, device="meta")
    consumer = consume(start, out)
    wait_for_more(out)
    (tmp_path / "enough").touch()
    assert training.wait(60) == 0, training.stderr.read()
    assert consumer.wait(60) == 0, consumer.stderr.read()
    assert os.readlink(out / LATEST) == os.readlink(tmp_path / "in" / LATEST)
    assert read_checkpoint(out / LATEST)["timestamp"] == read_checkpoint(tmp_path / "in" / LATEST)["timestamp"]
    saved = read_checkpoint(out / LATEST)["checkpoints"]["saved"]
    assert {*saved, os.readlink(out / LATEST)} == {path.name for path in out.glob("ep*")}
    assert not list(out.glob(".*"))
