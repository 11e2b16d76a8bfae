"""The index of a folder of runs: its entries, how it keeps up, and what it survives."""

import errno
import math
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from helpers import wait_for
from run_folders import WrittenRun, write_run

from offloop.bus import Event, Publisher
from offloop.bus.errors import ConfigurationError, RunDirectoryError
from offloop.bus.index import index as indexes
from offloop.bus.index.annotations import annotate, read_annotations
from offloop.bus.index.entry import STORED
from offloop.bus.index.index import RunIndex
from offloop.bus.index.table import RunTable
from offloop.bus.runs.directory import find_run
from offloop.bus.runs.writing import RunDirectory


def refreshed(runs_dir):
    with RunIndex(runs_dir) as index:
        assert index.refresh() == 0
        return dict(index.entries), index.problem


def forbid_reading(monkeypatch):
    """From now on the index reads no recording."""

    def refuse(*_):
        raise AssertionError("a recording was read")

    monkeypatch.setattr("offloop.bus.index.index.Summarizer.__init__", refuse)


def test_very_many_metrics_of_a_run_are_kept_as_numbers_and_stored(tmp_path, monkeypatch):
    values = {f"moe/expert_{part:05}/load": float(part) for part in range(20_000)}
    for name in ("a", "b"):
        run = WrittenRun(tmp_path, name, {})
        run.send(Event.BATCH_END, {"logged": [[0, values], [1, {**values, "moe/expert_00007/load": math.nan}]]})
        run.end()
    first, _ = refreshed(tmp_path)
    forbid_reading(monkeypatch)
    again, _ = refreshed(tmp_path)
    # What has ended is read once.
    assert again == first
    for entry in (*first.values(), *again.values()):
        assert list(entry.metrics) == list(values)
        usual, odd = (entry.metrics[f"moe/expert_{part:05}/load"] for part in (42, 7))
        assert (usual.last, usual.last_step, odd.high, odd.high_step) == (42.0, 1, 7.0, 0)
    assert sys.getsizeof(again["a"].metrics._rows._numbers) < 1.3e6
    assert again["a"].metrics._places is again["b"].metrics._places, "runs share the names"
    table = RunTable(again)
    assert table.column("expert_00042/load").value(again["b"]) == 42.0
    assert table.best(again.values(), "expert_00042/load", "max").run in again


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


def test_live_runs_move_and_are_read_where_the_last_look_ended(tmp_path, monkeypatch):
    run = WrittenRun(tmp_path, "r").train([1.0])
    with RunIndex(tmp_path) as index:
        index.refresh()
        assert (index.entries["r"].status, index.entries["r"].metrics["loss/train/total"].last) == ("live", 1.0)
        forbid_reading(monkeypatch)
        run.train([0.5, 0.25])
        index.refresh()
        assert index.entries["r"].metrics["loss/train/total"].last == 0.25
        assert (index.entries["r"].batch, index.entries["r"].planned) == (3, "9ep")
        run.end()
        index.refresh()
        assert index.entries["r"].status == "finished"


def test_a_live_run_that_was_deleted_and_begun_again_is_another_one(tmp_path):
    run = WrittenRun(tmp_path, "r").train([1.0, 2.0])
    with RunIndex(tmp_path) as index:
        index.refresh()
        run.abandon()
        shutil.rmtree(tmp_path / "r")
        again = WrittenRun(tmp_path, "r").train([5.0, 0.25, 0.125])
        index.refresh()
        loss = index.entries["r"].metrics["loss/train/total"]
        assert (index.entries["r"].batch, loss.last, loss.high) == (3, 0.125, 5.0)
        again.end()


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
    annotate(tmp_path / "c", remove=["good"])
    entries = refreshed(tmp_path)[0]
    assert (set(entries), entries["c"].tags) == ({"new", "c"}, ("best",))


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


def test_runs_are_read_although_it_takes_longer_to_find_them(tmp_path, monkeypatch):
    write_run(tmp_path, "r")
    stamp = indexes._stamp
    monkeypatch.setattr(indexes, "_stamp", lambda run: (time.sleep(0.2), stamp(run))[1])
    with RunIndex(tmp_path) as index:
        index.refresh(0.1)
        assert "r" in index.entries


def stored(runs_dir):
    return sorted(runs_dir.glob(f"*/{STORED}"))


def test_a_damaged_entry_of_the_index_is_made_again(tmp_path):
    write_run(tmp_path / "other", "s", [5.0])
    refreshed(tmp_path / "other")
    (of_another_run,) = stored(tmp_path / "other")
    write_run(tmp_path / "runs", "r", [1.0])
    expected, _ = refreshed(tmp_path / "runs")
    [path] = stored(tmp_path / "runs")
    content = path.read_bytes()
    for damaged, size in ((content, len(content) // 2), (of_another_run.read_bytes(), None), (content, 1 << 34)):
        path.write_bytes(damaged)
        if size is not None:
            os.truncate(path, size)
        assert refreshed(tmp_path / "runs") == (expected, None)
        assert path.read_bytes() == content


@pytest.mark.parametrize("what", ["fifo", "link", "directory"])
def test_a_file_planted_in_the_index_is_neither_waited_for_nor_followed(tmp_path, what):
    write_run(tmp_path, "r", [1.0])
    expected, _ = refreshed(tmp_path)
    [path] = stored(tmp_path)
    path.unlink()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("precious")
    {"fifo": os.mkfifo, "link": lambda path: path.symlink_to(elsewhere), "directory": os.mkdir}[what](path)
    entries, problem = refreshed(tmp_path)
    assert entries == expected
    # What is no folder is replaced.
    assert ("Is a directory" in str(problem)) == path.is_dir() == (what == "directory")
    assert not path.is_symlink()
    assert elsewhere.read_text() == "precious"


def test_on_a_full_disk_runs_are_known_all_the_same(tmp_path, monkeypatch):
    write_run(tmp_path, "r", [1.0])
    replace = os.replace

    def refuse(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("offloop.bus.files.os.replace", refuse)
    with RunIndex(tmp_path) as index:
        assert index.refresh() == 0
        assert "No space left" in index.problem
        assert stored(tmp_path) == []
        monkeypatch.setattr("offloop.bus.files.os.replace", replace)
        write_run(tmp_path, "later", [2.0])
        index.refresh()
        assert (set(index.entries), index.problem) == ({"r", "later"}, None)


WRITER = """
import sys
import time
from offloop.bus.index.index import RunIndex
for _ in range(8):
    with RunIndex(sys.argv[1]) as index:
        index.refresh()
        index._stamps.clear()
        for path in list(index.root.glob("*/entry.msgpack"))[::3]:
            path.unlink(missing_ok=True)
        index.refresh()
        assert index.problem is None, index.problem
        assert len(index.entries) == 30
print("done")
"""


@pytest.mark.slow
def test_several_processes_may_use_one_index_and_be_killed(tmp_path):
    for number in range(30):
        write_run(tmp_path, f"r{number}", [number])
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    writers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    wait_for(lambda: stored(tmp_path), "the first entry")
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
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "run.json").symlink_to("run.json")
    (tmp_path / "no-recording" / "recording-1.mcap").unlink()
    (tmp_path / "said" / "annotations.json").write_text('{"tags": 5}')
    (tmp_path / "a file").write_text("")
    (tmp_path / "a folder").mkdir()
    entries, _ = refreshed(tmp_path)
    assert set(entries) == {"good", "no-recording", "said", "bad-json", "linked"}
    assert "it is a symbolic link" in entries["linked"].problem
    assert (entries["bad-json"].status, entries["bad-json"].started) == ("unreadable", None)
    assert f"{tmp_path / 'bad-json' / 'run.json'} is damaged" in entries["bad-json"].problem
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
    wait_for(lambda: stored(runs_dir), "the stored entry")
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
    for tag in ("", "a,b", "line\nbreak", "\x1b[31m", "x" * 65):
        with pytest.raises(ConfigurationError, match="is not a tag"):
            annotate(run, add=[tag])
    for note in ("x" * 10_001, "\udcff"):
        with pytest.raises(ConfigurationError):
            annotate(run, note=note)
    with pytest.raises(RunDirectoryError, match="cannot be written"):
        annotate(tmp_path / "nothing", note="x")
    assert read_annotations(run) == found


TAGGER = """
import pathlib, sys
from offloop.bus.index import index as indexes
from offloop.bus.index.annotations import annotate
for number in range(10):
    annotate(pathlib.Path(sys.argv[1]), add=[f"{sys.argv[2]}-{number}"])
"""


def test_tags_that_several_processes_add_at_once_are_all_kept(tmp_path):
    run = write_run(tmp_path, "r")
    writers = [subprocess.Popen([sys.executable, "-c", TAGGER, run, name]) for name in "abc"]
    assert [writer.wait(200) for writer in writers] == [0, 0, 0]
    assert {*read_annotations(run).tags} == {f"{name}-{number}" for name in "abc" for number in range(10)}


@pytest.mark.parametrize("content", [b'{"tags": 5}', b"\xff", b"[" * 100_000, b'{"note": "' + b"x" * (1 << 20)])
def test_annotations_that_cannot_be_read_stay_as_they_are(tmp_path, content):
    run = write_run(tmp_path, "r")
    (run / "annotations.json").write_bytes(content)
    for change in ({"add": ["a"]}, {"note": "n"}, {"pinned": True}, {"remove": ["a"]}):
        with pytest.raises(RunDirectoryError, match=r"annotations\.json (is damaged|cannot be read): ") as raised:
            annotate(run, **change)
        assert str(raised.value).isprintable()
    assert (run / "annotations.json").read_bytes() == content
    assert refreshed(tmp_path)[0]["r"].tags == ()


def test_the_extremes_of_a_resumed_run_leave_out_what_a_later_attempt_trained_again(runs_dir):
    attempts = [
        {"acc": {0: 0.5, 3: 0.8, 9: 0.99}, "early": {0: 1.0}, "norm": {5: 3.0, 9: math.nan}},
        {"acc": {4: 0.01, 8: 0.95}, "norm": {4: 2.0}},
        {"acc": {6: 0.4}, "late": {6: 7.0}},
    ]
    for logged in attempts:
        with Publisher("r", resume=True) as publisher:
            for name, values in logged.items():
                for step, value in values.items():
                    publisher.log({name: value}, step)
            publisher.publish(Event.BATCH_END, batch=10)
        wait_for(lambda: not find_run("r").live, "the end of the attempt")
    entry = refreshed(runs_dir)[0]["r"]
    found = {
        name: (one.last, one.last_step, one.low, one.low_step, one.high, one.high_step)
        for name, one in entry.metrics.items()
    }
    assert found == {
        "acc": (0.4, 6, 0.01, 4, 0.8, 3),
        "early": (1.0, 0, 1.0, 0, 1.0, 0),
        "norm": (2.0, 4, 2.0, 4, 2.0, 4),
        "late": (7.0, 6, 7.0, 6, 7.0, 6),
    }


def test_it_counts_the_rows_of_tables_of_all_attempts(runs_dir):
    for _ in range(2):
        with Publisher("r", resume=True) as publisher:
            publisher.log_table("samples", [{"text": "a"}, {"text": "b"}])
            publisher.publish(Event.BATCH_END, batch=1)
            publisher.close()
        wait_for(lambda: not find_run("r").live, "the end of the attempt")
    entry = refreshed(runs_dir)[0]["r"]
    assert (entry.attempts, entry.tables) == (2, {"samples": 4})
    # Stored with the entry.
    assert refreshed(runs_dir)[0]["r"].tables == {"samples": 4}
