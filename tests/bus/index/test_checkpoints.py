"""The checkpoints of a run in the index: in its directory and elsewhere, with the metric that compares them."""

import json
import math
import os
import shutil

import pytest
from run_folders import STARTED, WrittenRun, write_run

from offloop.bus.checkpoints.announced import ANNOUNCED, FOLDERS, Score, announce_checkpoint, note_folder, read_folders
from offloop.bus.checkpoints.ratings import RATINGS, Ratings
from offloop.bus.errors import CheckpointError
from offloop.bus.index.index import RunIndex
from offloop.bus.index.manage import rename_run
from offloop.bus.index.table import RunTable

ACCURACY = "metrics/eval/Accuracy"


def save(path, run, batch, epoch=0):
    """Write what a reader of checkpoints looks at: the text in the metadata."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tree = {"timestamp": [0, epoch, batch, *[0] * 11], "run": {"name": run}}
    text = json.dumps({"version": 1, "tree": tree, "tensors": {}})
    header = json.dumps({"__metadata__": {"offloop": text}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    return path


def rate(folder, run, best, **values):
    """Write the ratings of checkpoints in a folder, as a consumer does."""
    rated = [
        {"file": f"{name}.safetensors", "batch": int(name[2:]), "metric": ACCURACY, "value": value}
        for name, value in values.items()
    ]
    (folder / RATINGS.name).write_text(json.dumps({"run": run, "best": f"{best}.safetensors", "checkpoints": rated}))


def checkpoints(runs_dir, run="r"):
    with RunIndex(runs_dir) as index:
        assert index.refresh() == 0
        return index.entries[run].checkpoints


def known(found):
    return [(os.path.basename(one.path), one.batch, one.value, one.is_best, one.is_latest, one.exists) for one in found]


def test_checkpoints_elsewhere_are_found_with_the_metric_that_they_are_compared_by(tmp_path):
    run, folder = write_run(tmp_path / "runs", "r"), tmp_path / "saved"
    for batch in (1, 2, 3):
        save(folder / f"ba{batch}.safetensors", "r", batch)
    (folder / "ba2.safetensors").unlink()
    (folder / "latest-rank0.safetensors").symlink_to("ba3.safetensors")
    (folder / "best-rank0.safetensors").symlink_to("ba1.safetensors")
    rate(folder, "r", "ba1", ba1=0.9, ba2=0.7, ba3=None)
    assert checkpoints(tmp_path / "runs") == ()
    note_folder(run, folder)
    found = checkpoints(tmp_path / "runs")
    assert known(found) == [
        ("ba1.safetensors", 1, 0.9, True, False, True),
        ("ba2.safetensors", 2, 0.7, False, False, False),
        ("ba3.safetensors", 3, None, False, True, True),
    ]
    assert {one.metric for one in found} == {ACCURACY}
    assert found[0].path == str(folder / "ba1.safetensors")


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


def test_what_is_saved_after_the_run_has_ended_is_noticed(tmp_path):
    run, folder = write_run(tmp_path / "runs", "r"), tmp_path / "saved"
    note_folder(run, folder)
    with RunIndex(tmp_path / "runs") as index:
        index.refresh()
        assert index.entries["r"].checkpoints == ()
        save(folder / "ba1.safetensors", "r", 1)
        note_folder(run, folder)
        index.refresh()
        assert [one.batch for one in index.entries["r"].checkpoints] == [1]
    assert read_folders(run) == [folder]


def test_a_trainer_says_where_it_writes_and_evaluations_what_they_gave_there(tmp_path):
    run, folder = WrittenRun(tmp_path / "runs", "r"), tmp_path / "saved"
    run.directory._record["attempts"][-1]["info"] = {"save_folder": str(folder)}
    run.train([1.0, 0.5], accuracy=0.75)
    save(folder / "ep1-ba2-rank0.safetensors", "r", 2, epoch=1)
    run.end()
    [found] = checkpoints(tmp_path / "runs")
    assert (found.epoch, found.batch, found.metric, found.metrics) == (1, 2, None, {ACCURACY: 0.75})


def test_checkpoints_of_other_runs_in_the_same_folder_are_left_out(tmp_path):
    run, folder = write_run(tmp_path / "runs", "r"), tmp_path / "saved"
    save(folder / "own.safetensors", "r", 1)
    save(folder / "other.safetensors", "another", 1)
    older = save(folder / "older.safetensors", "r", 1)
    os.utime(older, (STARTED - 100, STARTED - 100))
    rate(folder, "another", "other", ba1=0.5)
    note_folder(run, folder)
    assert known(checkpoints(tmp_path / "runs")) == [("own.safetensors", 1, None, False, False, True)]


def test_a_renamed_run_keeps_its_checkpoints_and_their_values(tmp_path):
    run, folder = write_run(tmp_path / "runs", "r"), tmp_path / "saved"
    save(folder / "ba1.safetensors", "r", 1)
    save(run / "inside" / "ba2.safetensors", "r", 2)
    rate(folder, "r", "ba1", ba1=0.9)
    note_folder(run, folder)
    rename_run(run, "new")
    found = checkpoints(tmp_path / "runs", "new")
    assert [(one.batch, one.value) for one in found] == [(1, 0.9), (2, None)]
    assert found[1].path == "inside/ba2.safetensors"


def test_a_folder_of_shards_is_one_checkpoint(tmp_path):
    run = write_run(tmp_path, "r")
    save(run / "saved" / "ep1-ba5" / "training.safetensors", "r", 5, epoch=1)
    save(run / "saved" / "ep1-ba5" / "shards" / "rank0.safetensors", "r", 5)
    (run / "saved" / "latest").symlink_to("ep1-ba5")
    write_run(tmp_path, "other")
    [found] = checkpoints(tmp_path)
    assert (found.path, found.epoch, found.batch, found.is_latest) == ("saved/ep1-ba5", 1, 5, True)
    with RunIndex(tmp_path) as index:
        index.refresh()
        table = RunTable(index.entries)
        for expression in ("checkpoints", "checkpoints ~ ep1", "checkpoints == saved/ep1-ba5"):
            assert [entry.run for entry in table.where(table.newest_first, expression)] == ["r"], expression


@pytest.mark.timeout(30)
def test_what_is_no_checkpoint_and_no_list_is_passed_over(tmp_path):
    run = write_run(tmp_path, "r")
    os.mkfifo(run / "ba1.safetensors")
    os.mkfifo(run / RATINGS.name)
    save(run / "deep" / "ba3.safetensors", "r", 3)
    (run / "deep" / RATINGS.name).write_text('{"run": "r", "checkpoints": [{"file": "../../ba9.safetensors"')
    (run / "loop").symlink_to(run)
    (run / os.fsdecode(b"ba\xff.safetensors")).write_bytes(b"")
    (run / "torn.ckpt").write_bytes(b"\0" * 5)
    (run / FOLDERS.name).write_text('["relative", "/nowhere/at/all", "/\\u0000"]')
    assert sorted(os.path.basename(one.path) for one in checkpoints(tmp_path)) == ["ba3.safetensors", "torn.ckpt"]


@pytest.mark.parametrize(
    "content", [b"[damaged", b"\xff", b'{"tags": []}', b"[" * 100_000, b'["' + b"x" * (8 << 20) + b'"]']
)
def test_lists_that_cannot_be_read_stay_as_they_are(tmp_path, content, caplog):
    run = write_run(tmp_path / "runs", "r")
    (run / FOLDERS.name).write_bytes(content)
    (run / ANNOUNCED.name).write_bytes(content)
    (tmp_path / RATINGS.name).write_bytes(content)
    with caplog.at_level("INFO"):
        note_folder(run, tmp_path / "out")
        announce_checkpoint(run, tmp_path / "out", 0, 1, None)
    assert str(run / FOLDERS.name) in caplog.text
    assert (run / FOLDERS.name).read_bytes() == (run / ANNOUNCED.name).read_bytes() == content
    assert read_folders(run) == []
    with pytest.raises(CheckpointError, match=r"checkpoints\.json"):
        Ratings(tmp_path, "r", None)
