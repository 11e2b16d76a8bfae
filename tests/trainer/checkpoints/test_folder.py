"""The checkpoint folder: names, the link to the latest, what is kept, and what a killed process leaves behind."""

import contextlib
import datetime
import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from helpers import REFERENCE, wait_for

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.timestamp import Timestamp
from offloop.trainer.checkpoints.file import read_checkpoint, write_checkpoint
from offloop.trainer.checkpoints.folder import CheckpointFolder

BATCHES_PER_EPOCH = 4


def at(batch: int, epoch: int | None = None, **more: Any) -> Timestamp:
    """Return the time after a batch of the recorded job, before the epoch ends unless it is told."""
    epoch = (batch - 1) // BATCHES_PER_EPOCH if epoch is None else epoch
    in_epoch = batch - epoch * BATCHES_PER_EPOCH
    return Timestamp(
        epoch=epoch, batch=batch, sample=6 * batch, batch_in_epoch=in_epoch, sample_in_epoch=6 * in_epoch, **more
    )


def tree_of(batch: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((50,), float(batch))}, "batch": batch}


def listing(folder: Path) -> dict[str, str]:
    """Return the files below a folder, and where links lead, as the reference lists them."""
    return {
        path.relative_to(folder).as_posix(): f"-> {os.readlink(path)}" if path.is_symlink() else "file"
        for path in folder.rglob("*")
        if path.is_symlink() or not path.is_dir()
    }


# The reference

RUNS = json.loads((REFERENCE / "cb_checkpoint_saver.json").read_text())["runs"]
PT = {"filename": "ep{epoch}-ba{batch}-rank{rank}.pt", "latest_filename": "latest-rank{rank}.pt"}
LONG_NAME = (
    "e{epoch}_b{batch}_be{batch_in_epoch}_s{sample}_se{sample_in_epoch}_t{token}_te{token_in_epoch}_r{rank}"
    "_w{world_size}_lr{local_rank}_lw{local_world_size}_n{node_rank}.pt"
)
SETTINGS: dict[str, dict[str, Any]] = {
    "keep0": {"keep": 0},
    "keep2": {"keep": 2},
    "names_ok": {"folder": "{run_name}/ck", "filename": LONG_NAME, "latest_filename": "last-{run_name}.pt"},
    "names_wct_overwrite_true": {
        "filename": "b{batch}_{total_wct:.0f}_{epoch_wct:.0f}_{batch_wct:.0f}.pt",
        "overwrite": True,
    },
    "subdir_filename": {"filename": "sub/ep{epoch}.pt", "latest_filename": "links/latest.pt"},
    "same_name_overwritten": {"filename": "const.pt", "overwrite": True},
}


@pytest.mark.parametrize("name", RUNS)
def test_the_files_are_those_of_the_reference(tmp_path: Path, name: str) -> None:
    run = RUNS[name]
    settings = {"names": {"run_name": "myrun"}, **PT, **SETTINGS.get(name, {})}
    folder = CheckpointFolder(tmp_path / settings.pop("folder", ""), **settings)
    before, *snapshots = run["snapshots"]
    for file in before["files"]:
        (tmp_path / file).write_bytes(b"")
    if run["error"]:
        with pytest.raises(ConfigurationError, match=r"ep9-ba99-rank0\.pt is of a later time .*overwrite=True"):
            folder.check_conflicts(Timestamp())
    else:
        folder.check_conflicts(Timestamp())
    for snapshot in snapshots:
        folder.save(at(snapshot["batch"], snapshot["epoch"]), tree_of(snapshot["batch"]))
        assert listing(tmp_path) == snapshot["files"]
    seen = [snapshot["batch"] for snapshot in snapshots]
    for path, (epoch, batch) in run["all_saved_checkpoints_to_timestamp"].items():
        if batch not in seen:
            # What is gone at once, or replaced under the same name, is in no snapshot.
            saved = folder.save(at(batch, epoch), tree_of(batch))
            assert saved == tmp_path / path.removeprefix("<folder>/")
    assert listing(tmp_path) == run["files_at_end"]
    kept = [str(tmp_path / saved) for saved in folder.state_dict()["saved"]]
    if name not in ("names_ok", "same_name_overwritten"):
        assert kept == [path.replace("<folder>", str(tmp_path)) for path in run["saved_checkpoints"]]


# Names


def test_times_are_formatted_as_numbers_and_seconds(tmp_path: Path) -> None:
    folder = CheckpointFolder(
        tmp_path, filename="i{iteration}-b{batch:05d}-{total_wct:.1f}-{batch_wct}-t{token:,}.x", latest_filename=None
    )
    timestamp = at(
        3,
        iteration=2,
        token=12_345,
        total_wct=datetime.timedelta(hours=1),
        batch_wct=datetime.timedelta(seconds=0.25),
    )
    assert folder.save(timestamp, {}).name == "i2-b00003-3600.0-0.25-t12,345.x"
    assert folder.latest() == tmp_path / "i2-b00003-3600.0-0.25-t12,345.x"


@pytest.mark.parametrize(
    "settings",
    [
        {"filename": "ba{batches}"},
        {"filename": "ba{batch:x}"},
        {"filename": "../ba{batch}"},
        {"latest_filename": "latest-{batch}"},
        {"latest_filename": "ep1-ba1-rank0.safetensors"},
        {"folder": "s3://bucket/ck"},
        {"keep": -2},
    ],
)
def test_names_that_are_not_allowed_are_refused_at_once(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(settings))):
        CheckpointFolder(**{"folder": "ck", **settings})


# What is kept


def test_it_removes_only_what_it_saved_itself(tmp_path: Path) -> None:
    CheckpointFolder(tmp_path).save(at(1), tree_of(1))
    folder = CheckpointFolder(tmp_path, keep=1)
    for batch in (2, 3):
        folder.save(at(batch), tree_of(batch))
    assert sorted(listing(tmp_path)) == [
        "ep0-ba1-rank0.safetensors",
        "ep0-ba3-rank0.safetensors",
        "latest-rank0.safetensors",
    ]


def test_the_checkpoint_it_resumes_from_counts_as_its_own(tmp_path: Path) -> None:
    path = CheckpointFolder(tmp_path).save(at(1), tree_of(1))
    folder = CheckpointFolder(tmp_path, keep=1)
    folder.load_state_dict({})
    for other in (path, tmp_path / "other.safetensors", Path("/elsewhere/ep0-ba1-rank0.safetensors")):
        folder.adopt(other)
    assert folder.state_dict() == {"saved": [path.name]}
    folder.save(at(2), tree_of(2))
    assert not path.exists()


def test_it_never_removes_a_file_that_it_could_not_have_saved(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("")
    folder = CheckpointFolder(tmp_path / "ck", filename="{total_wct}/x", keep=0)
    folder.load_state_dict({"saved": ["../precious", "precious", str(precious), "../x", "1/../../x"]})
    assert folder.state_dict() == {"saved": []}
    folder.save(at(1), {})
    assert precious.exists()


def test_the_last_one_is_replaced_under_its_name(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    assert folder.replace_last(tree_of(1)) is None
    for batch in (1, 2):
        path = folder.save(at(batch), tree_of(batch))
    assert folder.replace_last(tree_of(7)) == path
    assert read_checkpoint(path)["batch"] == 7
    assert len(listing(tmp_path)) == 3


def test_removing_a_checkpoint_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = CheckpointFolder(tmp_path, keep=1)
    first = folder.save(at(1), tree_of(1))

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        folder.save(at(2), tree_of(2))
    folder.save(at(3), tree_of(3))
    assert not first.exists()
    assert len(folder.state_dict()["saved"]) == 1


# The latest


def test_the_latest_is_what_the_link_leads_to(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, filename="sub/b{batch}", latest_filename="links/last", overwrite=True)
    assert folder.latest() is None
    for batch in (9, 3):
        folder.save(at(batch), tree_of(batch))
    assert CheckpointFolder(tmp_path, "sub/b{batch}", "links/last", overwrite=True).latest() == tmp_path / "sub/b3"


def test_the_newest_intact_checkpoint_replaces_a_missing_or_damaged_latest(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, filename="b{batch}", overwrite=True)
    paths = [folder.save(at(batch), tree_of(batch)) for batch in (9, 10, 11, 12)]
    paths[3].unlink()
    assert folder.latest() == paths[2]
    os.truncate(paths[2], 300)
    content = bytearray(paths[1].read_bytes())
    content[-1] ^= 1
    paths[1].write_bytes(content)
    (tmp_path / "b13").write_text("no checkpoint")
    no_times: list[Any] = [None, [], [0, 1, 7], [True] * 14, ["7"] * 14]
    timeless = [tmp_path / f"b{batch}" for batch in range(14, 19)]
    for path, values in zip(timeless, no_times, strict=True):
        write_checkpoint(path, {} if values is None else {"timestamp": values})
    assert folder.latest() == paths[0]
    assert folder.unreadable.keys() == {paths[1], paths[2], tmp_path / "b13", *timeless}


def test_a_file_that_a_killed_process_had_no_time_to_link_is_the_latest(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save(at(1), tree_of(1))
    path = CheckpointFolder(tmp_path, latest_filename=None).save(at(2), tree_of(2))
    assert folder.latest() == path
    folder.check_conflicts(at(2))


def test_without_symbolic_links_the_latest_is_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "symlink", refuse)
    folder = CheckpointFolder(tmp_path, keep=1)
    for batch in (1, 2):
        folder.save(at(batch), tree_of(batch))
    latest = tmp_path / "latest-rank0.safetensors"
    assert not latest.is_symlink()
    assert read_checkpoint(latest)["batch"] == 2
    assert read_checkpoint(folder.latest() or "")["batch"] == 2
    (tmp_path / "ep0-ba2-rank0.safetensors").unlink()
    assert folder.latest() == latest


# Conflicts


def test_checkpoints_of_the_same_and_of_earlier_times_are_no_conflict(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for batch in (4, 5):
        folder.save(at(batch, total_wct=datetime.timedelta(seconds=batch)), tree_of(batch))
    folder.check_conflicts(at(5))
    folder.check_conflicts(at(6))
    with pytest.raises(ConfigurationError, match=r"ep1-ba5-rank0\.safetensors is of a later time"):
        folder.check_conflicts(at(4))
    CheckpointFolder(tmp_path, overwrite=True).check_conflicts(at(4))


@pytest.mark.parametrize("filename", ["e{epoch}-{batch_in_epoch}", "{total_wct:.0f}.safetensors", "s{sample:b}"])
def test_a_later_time_is_read_from_the_file_where_the_name_has_none(tmp_path: Path, filename: str) -> None:
    folder = CheckpointFolder(tmp_path, filename=filename)
    folder.save(at(7), tree_of(7))
    with pytest.raises(ConfigurationError, match="of a later time"):
        folder.check_conflicts(at(6))
    folder.check_conflicts(at(7))
    folder.check_conflicts(at(9))


# Killed processes

SAVE_UNTIL_KILLED = """
import os, sys
import torch
from offloop.bus.types.timestamp import Timestamp
from offloop.trainer.checkpoints.folder import CheckpointFolder

for line in sys.stdin:
    worker = os.fork()
    if worker == 0:
        folder = CheckpointFolder(sys.argv[1], keep=3)
        batch = int(line)
        while True:
            batch += 1
            tree = {"model": {"w": torch.full((20_000,), float(batch))}, "batch": batch}
            folder.save(Timestamp(batch=batch), tree)
    print(worker, flush=True)
    os.waitpid(worker, 0)
"""


def batches_in(folder: Path) -> set[int]:
    return {batch_of(path.name) for path in folder.glob("ep*")}


def batch_of(name: str) -> int:
    return int(name.removeprefix("ep0-ba").split("-")[0])


def linked_batch(folder: Path) -> int:
    link = folder / "latest-rank0.safetensors"
    return batch_of(os.readlink(link)) if link.is_symlink() else 0


@pytest.fixture
def savers(tmp_path: Path) -> Iterator[Callable[[int], int]]:
    """Return what starts a process that saves checkpoints from a batch on; the one before it has to be killed."""
    command = [sys.executable, "-c", SAVE_UNTIL_KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as nursery:
        worker = None

        def start(batch: int) -> int:
            nonlocal worker
            assert nursery.stdin
            assert nursery.stdout
            print(batch, file=nursery.stdin, flush=True)
            worker = int(nursery.stdout.readline())
            return worker

        yield start
        nursery.kill()
        if worker is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [8, pytest.param(200, marks=pytest.mark.soak)])
def test_a_process_that_is_killed_while_it_saves_leaves_whole_files(
    tmp_path: Path, savers: Callable[[int], int], kills: int
) -> None:
    dice = random.Random(3)
    newest, strays = 0, 0
    for _ in range(kills):
        worker = savers(newest)
        wait_for(lambda: linked_batch(tmp_path) > newest, "the first save")  # noqa: B023
        time.sleep(dice.uniform(0, 0.02))
        os.kill(worker, signal.SIGKILL)
        wait_for(lambda: not psutil.pid_exists(worker), "the process to end")  # noqa: B023

        for batch in batches_in(tmp_path):
            tree = read_checkpoint(tmp_path / f"ep0-ba{batch}-rank0.safetensors")
            assert tree["batch"] == batch
            assert (tree["model"]["w"] == batch).all()
        newest = max(batches_in(tmp_path))
        linked = read_checkpoint(tmp_path / "latest-rank0.safetensors")["batch"]
        assert newest - linked in (0, 1)

        folder = CheckpointFolder(tmp_path, keep=3)
        assert folder.latest() == tmp_path / f"ep0-ba{newest}-rank0.safetensors"
        folder.check_conflicts(Timestamp(batch=newest))
        strays += len(list(tmp_path.glob(".*")))
        folder.clean()
        assert not list(tmp_path.glob(".*"))
    assert strays


def test_cleaning_leaves_what_is_not_its_own(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, filename="sub/{epoch}/ba{batch}-{rank}", latest_filename="links/last")
    (tmp_path / "sub" / "0").mkdir(parents=True)
    (tmp_path / "links").mkdir()
    own = ["sub/0/.ba7-0.0123abcd.tmp", "links/.last.0123abcd.tmp"]
    others = ["sub/0/.ba7-1.0123abcd.tmp", "sub/0/.bax-0.0123abcd.tmp", "sub/0/.ba7-0.tmp", "links/.x.0123abcd.tmp"]
    for name in own + others:
        (tmp_path / name).mkdir()
    folder.clean()
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob(".*.tmp")} == set(others)
    CheckpointFolder(tmp_path / "missing").clean()


def test_unreadable_checkpoints_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = CheckpointFolder(tmp_path)
    cut, before, damaged = (folder.save(at(batch), tree_of(batch)) for batch in (1, 3, 5))
    os.truncate(cut, 300)
    for suffix in ("", "-2"):
        damaged.write_bytes(damaged.read_bytes()[:-9])
        content = damaged.read_bytes()
        again = CheckpointFolder(tmp_path, keep=2)
        assert again.latest() == before
        again.load_state_dict(folder.state_dict())
        again.check_conflicts(at(4))
        with pytest.raises(ConfigurationError, match="is of a later time"):
            CheckpointFolder(tmp_path).check_conflicts(at(4))
        for batch in (4, 5):
            again.save(at(batch), tree_of(batch))
        before = tmp_path / "ep0-ba4-rank0.safetensors"
        assert read_checkpoint(damaged)["batch"] == 5
        assert damaged.with_name(f"{damaged.name}.unreadable{suffix}").read_bytes() == content
        assert f"{damaged.name}.unreadable{suffix}" in caplog.text
    assert cut.stat().st_size == 300


@pytest.mark.parametrize("content", [b"", b"of the user", None])
def test_a_file_of_something_else_is_kept_wherever_a_checkpoint_or_a_link_comes(
    tmp_path: Path, content: bytes | None
) -> None:
    if content is None:
        write_checkpoint(tmp_path / "x", tree_of(9))
        # Of a later version.
        content = (tmp_path / "x").read_bytes().replace(b'{\\"version\\":1', b'{\\"version\\":2')
    for name in ("ep0-ba1-rank0.safetensors", "latest-rank0.safetensors"):
        (tmp_path / name).write_bytes(content)
        CheckpointFolder(tmp_path, keep=0).save(at(1), tree_of(1))
    assert (tmp_path / "ep0-ba1-rank0.safetensors.unreadable").read_bytes() == content
    assert (tmp_path / "latest-rank0.safetensors.unreadable").read_bytes() == content
