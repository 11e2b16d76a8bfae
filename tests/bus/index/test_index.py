"""The index of a folder of runs: what it knows, how it keeps up, and what it survives."""

import math
import os
import shutil
import signal
import sqlite3
import subprocess
import sys

import pytest
from helpers import wait_for
from run_folders import WrittenRun, write_run

from bus import Event, Publisher
from bus.errors import ConfigurationError, RunDirectoryError
from bus.index.annotations import annotate, read_annotations
from bus.index.database import Database
from bus.index.index import INDEX_FILE, RunIndex
from bus.runs.directory import RunDirectory, find_run


def refreshed(runs_dir):
    with RunIndex(runs_dir) as index:
        assert index.refresh() == 0
        return dict(index.entries), index.problem


def series(runs_dir, run, metric):
    with RunIndex(runs_dir) as index:
        index.refresh()
        return index.series(run, metric)


def forbid_reading(monkeypatch):
    """From now on the index reads no recording."""

    def refuse(*_):
        raise AssertionError("a recording was read")

    monkeypatch.setattr("bus.index.index.Summarizer.__init__", refuse)


def test_it_knows_what_a_run_was_started_with_and_what_came_out_of_it(tmp_path):
    write_run(tmp_path, "r", [2.0, 0.5, math.nan, 0.75], accuracy=0.9, status="failed", config={"lr": 0.1})
    entries, problem = refreshed(tmp_path)
    assert problem is None
    entry = entries["r"]
    assert (entry.status, entry.batch, entry.planned, entry.attempts, entry.duration) == ("failed", 4, "9ep", 1, 60)
    assert entry.hyperparameters == {"config/lr": 0.1}
    loss = entry.metrics["loss/train/total"]
    assert (loss.last, loss.last_step, loss.low, loss.low_step, loss.high, loss.high_step) == (0.75, 3, 0.5, 1, 2.0, 0)
    assert entry.metrics["metrics/eval/Accuracy"].last == 0.9
    assert entry.metrics["lr-SGD/group0"].last == 0.1
    assert entry.size >= os.path.getsize(tmp_path / "r" / "recording-1.mcap")
    points = series(tmp_path, "r", "loss/train/total")
    assert [point for point in points if not math.isnan(point[1])] == [(0, 2.0), (1, 0.5), (3, 0.75)]
    assert any(math.isnan(value) for _, value in points)
    assert series(tmp_path, "r", "unknown") == series(tmp_path, "unknown", "loss/train/total") == []


def test_a_resumed_run_has_the_extremes_of_all_attempts_and_the_last_value_of_the_newest(tmp_path):
    write_run(tmp_path, "r", [3.0, 0.1, 2.0])
    second = WrittenRun(tmp_path, "r", {"seed": 2})
    second.batch = 1
    second.train([1.0, 0.8]).end("stopped")
    entry = refreshed(tmp_path)[0]["r"]
    loss = entry.metrics["loss/train/total"]
    assert (loss.last, loss.low, loss.high) == (0.8, 0.1, 3.0)
    assert (entry.attempts, entry.status, entry.hyperparameters) == (2, "stopped", {"seed": 2})
    assert series(tmp_path, "r", "loss/train/total") == [(0, 3.0), (1, 1.0), (2, 0.8)]


def test_what_has_ended_is_read_once(tmp_path, monkeypatch):
    for number in range(3):
        write_run(tmp_path, f"r{number}", [number])
    before = refreshed(tmp_path)[0]
    forbid_reading(monkeypatch)
    assert refreshed(tmp_path)[0] == before
    assert series(tmp_path, "r2", "loss/train/total") == [(0, 2.0)]


def test_live_runs_move_and_are_read_where_the_last_look_ended(tmp_path, monkeypatch):
    run = WrittenRun(tmp_path, "r").train([1.0])
    with RunIndex(tmp_path) as index:
        index.refresh()
        assert (index.entries["r"].status, index.entries["r"].metrics["loss/train/total"].last) == ("live", 1.0)
        forbid_reading(monkeypatch)
        run.train([0.5, 0.25])
        index.refresh()
        assert index.entries["r"].metrics["loss/train/total"].last == 0.25
        assert index.series("r", "loss/train/total") == [(0, 1.0), (1, 0.5), (2, 0.25)]
        run.end()
        index.refresh()
        assert index.entries["r"].status == "finished"
        # From the database by now.
        assert index.series("r", "loss/train/total") == [(0, 1.0), (1, 0.5), (2, 0.25)]


def test_a_run_whose_broker_was_killed_is_lost_until_another_takes_it_up(tmp_path):
    run = WrittenRun(tmp_path, "r").train([1.0])
    run.abandon()
    with RunIndex(tmp_path) as index:
        index.refresh()
        assert index.entries["r"].status == "lost"
        taken_up = RunDirectory(tmp_path, "r")
        taken_up.resume_attempt(1)
        taken_up.announce(1, "ipc://control", "ipc://stream")
        index.refresh()
        assert index.entries["r"].status == "live"
        taken_up.release()


def test_runs_that_are_deleted_renamed_or_annotated_are_followed(tmp_path):
    for name in ("a", "b", "c"):
        write_run(tmp_path, name)
    with RunIndex(tmp_path) as index:
        index.refresh()
        shutil.rmtree(tmp_path / "a")
        os.rename(tmp_path / "b", tmp_path / "new")
        annotate(tmp_path / "c", add=["good", " best "], note="why", pinned=True)
        index.refresh()
        assert set(index.entries) == {"new", "c"}
        entry = index.entries["c"]
        assert (entry.tags, entry.note, entry.pinned, entry.archived) == (("good", "best"), "why", True, False)
    assert set(refreshed(tmp_path)[0]) == {"new", "c"}


def test_what_people_say_is_taken_in_without_reading_the_recording_again(tmp_path, monkeypatch):
    run = write_run(tmp_path, "r", [1.0])
    refreshed(tmp_path)
    forbid_reading(monkeypatch)
    annotate(run, add=["good"])
    assert refreshed(tmp_path)[0]["r"].tags == ("good",)
    assert series(tmp_path, "r", "loss/train/total") == [(0, 1.0)]
    annotate(run, remove=["good"])
    assert refreshed(tmp_path)[0]["r"].tags == ()


def test_a_limit_of_time_is_kept_and_the_rest_comes_later(tmp_path):
    for number in range(20):
        write_run(tmp_path, f"r{number}", started=1_700_000_000.0 + number)
    with RunIndex(tmp_path) as index:
        left = [index.refresh(0.0)]
        assert 0 < left[0] <= 20
        while left[-1]:
            left.append(index.refresh(0.01))
        assert left == sorted(left, reverse=True)
        assert len(index.entries) == 20


@pytest.mark.parametrize("damage", ["text", "cut", "page", "entry", "another version", "deleted", "directory"])
def test_a_database_that_is_lost_is_made_again(tmp_path, damage):
    write_run(tmp_path, "r", [1.0])
    expected, _ = refreshed(tmp_path)
    path = tmp_path / INDEX_FILE
    if damage == "text":
        path.write_text("not a database " * 1000)
    elif damage == "cut":
        os.truncate(path, path.stat().st_size // 2)
    elif damage == "page":
        content = bytearray(path.read_bytes())
        # Behind the first page, which is all that is read when it is opened.
        content[4096:] = b"x" * len(content[4096:])
        path.write_bytes(content)
    elif damage == "entry":
        with sqlite3.connect(path) as database:
            database.execute("UPDATE runs SET entry = x'91'")
        database.close()
    elif damage == "another version":
        with sqlite3.connect(path) as database:
            database.execute("PRAGMA user_version = 99")
        database.close()
    else:
        path.unlink()
        if damage == "directory":
            path.mkdir()
    entries, problem = refreshed(tmp_path)
    assert entries == expected
    assert (problem is None) == (damage != "directory")
    assert series(tmp_path, "r", "loss/train/total") == [(0, 1.0)]
    assert refreshed(tmp_path)[0] == expected


def test_a_database_that_is_deleted_or_damaged_while_it_is_used_is_made_again(tmp_path):
    write_run(tmp_path, "r", [1.0])
    path = tmp_path / INDEX_FILE
    with RunIndex(tmp_path) as index:
        index.refresh()
        for name in (INDEX_FILE, f"{INDEX_FILE}-wal", f"{INDEX_FILE}-shm"):
            (tmp_path / name).unlink(missing_ok=True)
        write_run(tmp_path, "later", [2.0])
        index.refresh()
        assert path.exists()
        assert index.series("later", "loss/train/total") == [(0, 2.0)]
        assert index.series("r", "loss/train/total") == [(0, 1.0)]
        path.write_bytes(b"x" * path.stat().st_size)
        write_run(tmp_path, "last", [3.0])
        index.refresh()
        assert set(index.entries) == {"r", "later", "last"}
        index.refresh()
        assert index.series("last", "loss/train/total") == [(0, 3.0)]


def test_a_lock_that_is_not_given_back_leaves_the_index_in_memory(tmp_path, monkeypatch):
    write_run(tmp_path, "r", [1.0])
    refreshed(tmp_path)
    monkeypatch.setattr("bus.index.database.Database.__init__.__defaults__", (0.0, None))
    holder = sqlite3.connect(tmp_path / INDEX_FILE, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    try:
        entries, problem = refreshed(tmp_path)
    finally:
        holder.close()
    assert set(entries) == {"r"}
    assert "locked" in problem


def test_on_a_full_disk_the_index_is_kept_in_memory(tmp_path, monkeypatch):
    write_run(tmp_path, "r", [1.0])
    store = Database.store

    def store_or_fail(self, *values):
        if self.problem is None:
            raise sqlite3.OperationalError("database or disk is full")
        store(self, *values)

    monkeypatch.setattr(Database, "store", store_or_fail)
    with RunIndex(tmp_path) as index:
        assert index.refresh() == 0
        assert "disk is full" in index.problem
        assert index.series("r", "loss/train/total") == [(0, 1.0)]
        write_run(tmp_path, "later", [2.0])
        index.refresh()
        assert set(index.entries) == {"r", "later"}


WRITER = """
import sys
from bus.index.index import RunIndex
for _ in range(20):
    with RunIndex(sys.argv[1]) as index:
        index._opened()
        index._stamps.clear()
        index.refresh()
        assert index.problem is None, index.problem
        assert len(index.entries) == 30
print("done")
"""


def test_several_processes_may_use_one_index_and_be_killed(tmp_path):
    for number in range(30):
        write_run(tmp_path, f"r{number}", [number])
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    writers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    wait_for(lambda: (tmp_path / INDEX_FILE).exists(), "the database")
    os.kill(writers[0].pid, signal.SIGKILL)
    said = [writer.communicate(timeout=120)[0] for writer in writers]
    assert said[1:] == ["done\n", "done\n"]
    entries, problem = refreshed(tmp_path)
    assert (len(entries), problem) == (30, None)


def test_damaged_runs_hide_no_others(tmp_path):
    write_run(tmp_path, "good", [1.0])
    write_run(tmp_path, "bad-json")
    write_run(tmp_path, "no-recording", [1.0], seed=1)
    write_run(tmp_path, "said", [1.0])
    (tmp_path / "bad-json" / "run.json").write_text("{")
    (tmp_path / "no-recording" / "recording-1.mcap").unlink()
    (tmp_path / "said" / "annotations.json").write_text('{"tags": 5}')
    (tmp_path / "a file").write_text("")
    (tmp_path / "a folder").mkdir()
    entries, _ = refreshed(tmp_path)
    assert set(entries) == {"good", "no-recording", "said"}
    assert entries["no-recording"].metrics == {}
    assert "there is no recording" in entries["no-recording"].problem
    assert entries["said"].tags == ()
    assert set(refreshed(tmp_path)[0]) == set(entries)


def test_a_folder_that_is_not_there_has_no_runs_and_a_file_is_refused(tmp_path):
    assert refreshed(tmp_path / "nothing") == ({}, None)
    assert not (tmp_path / "nothing").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match="is a file"):
        refreshed(tmp_path / "file")


def test_a_broker_adds_its_run_when_that_ends(runs_dir, monkeypatch):
    with Publisher("r") as publisher:
        publisher.publish(Event.FIT_START, hyperparameters={"lr": 0.5})
        publisher.publish(Event.BATCH_END, loss=0.25)
    assert find_run("r").status == "finished"
    path = runs_dir / INDEX_FILE

    def is_there():
        if not path.exists():
            return False
        with sqlite3.connect(path) as database:
            try:
                return database.execute("SELECT count(*) FROM runs").fetchone() == (1,)
            except sqlite3.OperationalError:
                return False

    wait_for(is_there, "the run in the index")
    forbid_reading(monkeypatch)
    entry = refreshed(runs_dir)[0]["r"]
    assert (entry.status, entry.hyperparameters) == ("finished", {"lr": 0.5})
    assert entry.metrics["loss/train/total"].last == 0.25


def test_annotations_keep_what_is_not_changed_and_refuse_what_cannot_be_shown(tmp_path):
    run = write_run(tmp_path, "r")
    annotate(run, add=["a", "b"], note="text")
    annotate(run, add=["a", "c"], remove=["b"], archived=True)
    found = read_annotations(run)
    assert (found.tags, found.note, found.pinned, found.archived) == (("a", "c"), "text", False, True)
    for tag in ("", "  ", "a,b", "line\nbreak", "\x1b[31m", "x" * 65):
        with pytest.raises(ConfigurationError, match="is not a tag"):
            annotate(run, add=[tag])
    with pytest.raises(ConfigurationError, match="too long"):
        annotate(run, note="x" * 10_001)
    with pytest.raises(RunDirectoryError, match="cannot be written"):
        annotate(tmp_path / "nothing", note="x")
    assert read_annotations(run) == found
