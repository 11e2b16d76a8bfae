"""The checkpoints of a run in the index: in its directory and elsewhere, with the metric that compares them."""

import math
import os
import shutil

import pytest
from run_folders import write_run

from offloop.bus.checkpoints.announced import ANNOUNCED, Score, announce_checkpoint
from offloop.bus.checkpoints.ratings import RATINGS, Ratings
from offloop.bus.errors import CheckpointError
from offloop.bus.index.index import RunIndex
from offloop.bus.index.manage import rename_run
from offloop.bus.index.table import RunTable

ACCURACY = "metrics/eval/Accuracy"


def save(run, path, batch, epoch=0, score=None):
    """Write a checkpoint, and announce it as its writer does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"weights")
    announce_checkpoint(run, path, epoch, batch, score)
    return path


def checkpoints(runs_dir, run="r"):
    with RunIndex(runs_dir) as index:
        assert index.refresh() == 0
        return index.entries[run].checkpoints


def known(found):
    return [(os.path.basename(one.path), one.batch, one.value, one.is_best, one.is_latest, one.exists) for one in found]


def test_what_a_framework_has_written_is_found_until_it_is_gone_or_another_one_has_its_place(tmp_path):
    run, folder = write_run(tmp_path / "runs", "r"), tmp_path / "saved"
    paths = [folder / f"step-{batch}" for batch in (1, 2, 3, 4)]
    scores = [Score("metrics/val/loss", value, "min") for value in (0.5, 0.3, math.nan)]
    for path in paths:
        path.mkdir(parents=True)
        (path / "model.bin").write_bytes(b"weights")
    for batch, (path, score) in enumerate(zip(paths, [*scores, None], strict=True), 1):
        announce_checkpoint(run, path, 0, batch, score)
    assert known(checkpoints(tmp_path / "runs")) == [
        ("step-1", 1, 0.5, False, False, True),
        ("step-2", 2, 0.3, True, False, True),
        ("step-3", 3, None, False, False, True),
        ("step-4", 4, None, False, True, True),
    ]
    shutil.rmtree(paths[1])
    os.utime(paths[3], ns=(0, 0))
    announce_checkpoint(run, paths[2], 0, 30, None)
    # Those that are gone are left out when the next one comes.
    assert known(checkpoints(tmp_path / "runs")) == [
        ("step-1", 1, 0.5, True, False, True),
        ("step-3", 30, None, False, True, True),
    ]
    shutil.rmtree(paths[0])
    os.utime(run / ANNOUNCED.name)
    assert known(checkpoints(tmp_path / "runs"))[0] == ("step-1", 1, 0.5, False, False, False)


def test_of_what_is_announced_only_so_many_files_are_looked_at(tmp_path, monkeypatch):
    run, folder = write_run(tmp_path / "runs", "r"), tmp_path / "everything"
    for number in range(10):
        (folder / f"{number}").mkdir(parents=True)
        (folder / f"{number}" / "file").write_bytes(b"x" * 1000)
    for batch, path in enumerate([folder, *sorted(folder.iterdir())], 1):
        announce_checkpoint(run, path, 0, batch, None)
    monkeypatch.setattr("offloop.bus.index.checkpoints._MOST_LOOKED_AT", 12)
    found = checkpoints(tmp_path / "runs")
    assert [one.size for one in found[:3]] == [10_000, 1000, 1000]
    assert all(one.exists and one.size != 1000 for one in found[3:])


def test_a_renamed_run_keeps_its_checkpoints_and_their_values(tmp_path):
    run, folder = write_run(tmp_path / "runs", "r"), tmp_path / "saved"
    save(run, folder / "ba1.safetensors", 1, score=Score(ACCURACY, 0.9, "max"))
    save(run, run / "inside" / "ba2.safetensors", 2)
    rename_run(run, "new")
    found = checkpoints(tmp_path / "runs", "new")
    assert [(one.batch, one.value, one.exists) for one in found] == [(1, 0.9, True), (2, None, True)]
    assert found[1].path == "inside/ba2.safetensors"


def test_what_is_saved_late_is_noticed_with_what_evaluations_gave_and_runs_are_filtered_by_it(tmp_path):
    run = write_run(tmp_path, "r", [1.0, 0.5], accuracy=0.75)
    write_run(tmp_path, "other")
    with RunIndex(tmp_path) as index:
        index.refresh()
        assert index.entries["r"].checkpoints == ()
        save(run, run / "saved" / "ep1-ba2", 2, epoch=1)
        index.refresh()
        [found] = index.entries["r"].checkpoints
        assert (found.path, found.epoch, found.batch, found.is_latest) == ("saved/ep1-ba2", 1, 2, True)
        assert (found.metric, found.metrics) == (None, {ACCURACY: 0.75})
        table = RunTable(index.entries)
        for expression in ("checkpoints", "checkpoints ~ ep1", "checkpoints == saved/ep1-ba2"):
            assert [entry.run for entry in table.where(table.newest_first, expression)] == ["r"], expression


@pytest.mark.parametrize(
    "content", [b"[damaged", b"\xff", b'{"tags": []}', b"[" * 100_000, b'["' + b"x" * (8 << 20) + b'"]']
)
def test_lists_that_cannot_be_read_stay_as_they_are(tmp_path, content, caplog):
    run = write_run(tmp_path / "runs", "r")
    (run / ANNOUNCED.name).write_bytes(content)
    (tmp_path / RATINGS.name).write_bytes(content)
    with caplog.at_level("INFO"):
        announce_checkpoint(run, tmp_path / "out", 0, 1, None)
    assert str(run / ANNOUNCED.name) in caplog.text
    assert (run / ANNOUNCED.name).read_bytes() == content
    assert checkpoints(tmp_path / "runs") == ()
    with pytest.raises(CheckpointError, match=r"checkpoints\.json"):
        Ratings(tmp_path, "r", None)
