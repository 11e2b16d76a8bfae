"""Results of runs, and changes to runs: ``offloop runs``, ``show``, ``compare``, ``edit`` and ``rm``."""

import csv
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from helpers import strict_json, wait_for
from run_folders import STARTED, WrittenRun
from terminals import Terminal

from offloop.bus import (
    ConfigurationError,
    Event,
    Publisher,
    Recording,
    RunIsLiveError,
    RunNotFoundError,
    Subscriber,
    find_run,
)
from offloop.bus.cli.main import bus
from offloop.bus.errors import InvalidRunNameError, RunDirectoryError
from offloop.bus.runs.directory import is_locked

LOSSES = {"a": (1.0, 0.5, 0.75), "b": (1.0, 0.625, 0.25), "c": (1.0, float("nan"), 2.0)}
RATES = {"a": 0.1, "b": 0.01, "c": 0.001}
ACCURACIES = {"a": 0.5, "b": 0.75, "c": 0.25}


@pytest.fixture
def three(runs_dir: Path) -> Path:
    """Three finished runs, of which ``c`` is the newest."""
    for number, (name, losses) in enumerate(LOSSES.items()):
        hyperparameters = {"optimizer": {"lr": RATES[name]}, "seed": 17, "version": {"torch": f"of {name}"}}
        run = WrittenRun(runs_dir, name, hyperparameters, STARTED + number).train(losses, ACCURACIES[name])
        if name == "b":
            run.send(Event.EVAL_END, {"dataloader_label": "eval", "eval_metrics": {"eval": {"Extra": 1.0}}})
        run.end()
    return runs_dir


def run_command(*arguments: object) -> Result:
    return CliRunner().invoke(bus, [str(argument) for argument in arguments], catch_exceptions=True)


def invoke(*arguments: object) -> str:
    result = run_command(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def refusal(*arguments: object) -> BaseException:
    result = run_command(*arguments)
    assert result.exit_code != 0
    assert result.exception is not None
    return result.exception


def names(*arguments: object) -> list[str]:
    return [line.split()[0] for line in invoke("runs", *arguments).splitlines()[1:]]


def described(*arguments: object) -> Any:
    return strict_json(invoke(*arguments, "--json"))


def test_runs_are_chosen_sorted_and_shown_by_hyperparameters_and_metrics(three: Path) -> None:
    shown = invoke(
        *("runs", "--where", "lr < 0.05 and status == finished", "--sort", "-Accuracy"),
        *("--columns", "lr,Accuracy.best,loss.min, loss/train/total"),
    )
    assert [line.split() for line in shown.splitlines()] == [
        ["RUN", "optimizer/lr", "Accuracy.best", "loss.min", "loss"],
        ["b", "0.01", "0.75", "0.25", "0.25"],
        ["c", "0.001", "0.25", "1", "2"],
    ]
    assert names("--sort", "optimizer/lr") == ["c", "b", "a"]
    assert names("--sort", "-lr") == ["a", "b", "c"]
    # One run alone has it, also when that one is not shown.
    assert names("--sort", "Extra") == ["b", "c", "a"]
    assert names("--sort", "Extra", "--where", "lr != 0.01") == ["c", "a"]
    assert [line.split()[1:] for line in invoke("runs", "--columns", "status,batch").splitlines()] == [
        ["STATUS", "BATCH"],
        *[["finished", "3"]] * 3,
    ]
    invoke("edit", "b", "--tag", "one,two", "--note", 'a "note"')
    assert list(csv.reader(invoke("runs", "--csv", "--sort", "lr", "--columns", "lr,loss,tags,note").splitlines())) == [
        ["run", "optimizer/lr", "loss/train/total", "tags", "note"],
        ["c", "0.001", "2.0", "", ""],
        ["b", "0.01", "0.25", "one, two", 'a "note"'],
        ["a", "0.1", "0.75", "", ""],
    ]
    assert invoke("runs", "--where", "lr > 1") == f"no runs in {three} of which 'lr > 1' is true\n"


def test_pinned_runs_come_first_and_archived_ones_are_left_out(three: Path) -> None:
    assert names() == ["c", "b", "a"]
    assert invoke("edit", "a", "--pin") == "run a: pinned\n"
    assert invoke("edit", "c", "--archive") == "run c: archived\n"
    assert names() == ["a", "b"]
    assert names("--archived") == ["a", "c", "b"]
    assert names("--archived", "--where", "archived") == ["c"]
    assert names("--sort", "lr") == ["b", "a"]
    invoke("edit", "--no-pin", "a")
    invoke("edit", "--no-archive", "--where", "archived")
    assert names() == ["c", "b", "a"]
    invoke("edit", "a", "b", "c", "--archive")
    assert "--archived" in invoke("runs")


def test_an_invalid_request_is_refused_by_name(three: Path) -> None:
    for line, named in {
        "runs --where lr>": "'lr>'",
        "runs --sort nothing": "'nothing'",
        "runs --columns lr,nothing": "'nothing'",
        "runs --columns lr --json": "--json",
        "runs --csv --json": "--csv",
        "show nothing": "'nothing'",
        "edit a --pin --where lr>0": "--where",
        "rm a --archived": "--where",
        "edit a": "--tag",
        "edit a b --rename d": "--rename",
    }.items():
        result = run_command(*line.split())
        assert result.exit_code != 0
        assert named in f"{result.output}{result.exception}"
    assert sorted(path.name for path in three.glob("[!.]*") if path.is_dir()) == ["a", "b", "c"]


def test_runs_that_cannot_be_read_hide_no_other(three: Path, caplog: pytest.LogCaptureFixture) -> None:
    (three / "a" / "recording-1.mcap").write_bytes(b"something else")
    record = json.loads((three / "b" / "run.json").read_text())
    record["attempts"][0]["error"] = "\udcff"
    (three / "b" / "run.json").write_text(json.dumps(record))
    odd = os.fsdecode(bytes(three) + b"/c\xff")
    (three / "c").rename(odd)
    assert names() == ["a", "b"]
    assert "not UTF-8" in caplog.text
    assert re.search(rf"^b +unreadable .*{three}/b/run.json is damaged", invoke("runs"), re.MULTILINE)
    assert re.search(r"^trouble +.*a/recording-1.mcap", invoke("show", "a"), re.MULTILINE)
    invoke("edit", odd, "--rename", "c")
    assert names() == ["c", "a", "b"]


def test_show_has_the_results_of_a_run(three: Path) -> None:
    invoke("edit", "b", "--tag", "baseline,good")
    invoke("edit", "b", "--note", "the first line\nand \x1b[2J another")
    lines = invoke("show", "b").splitlines()
    facts = dict(line.split(maxsplit=1) for line in lines[: lines.index("metrics")])
    assert (facts["run"], facts["status"], facts["tags"]) == ("b", "finished", "baseline, good")
    assert facts["note"] == "the first line"
    assert facts["and"] == "\\x1b[2J another"
    assert facts["size"].endswith(f" in {three / 'b'}")
    rows = [line.split() for line in lines]
    assert ["loss", "0.25", "2", "min", "0.25", "2", "loss/train/total"] in rows
    assert ["Accuracy", "0.75", "2", "max", "0.75", "2", "metrics/eval/Accuracy"] in rows
    assert ["optimizer/lr", "0.01"] in rows
    # No rate is better than another one.
    assert [row for row in rows if row and row[0] == "lr"] == [["lr", "0.1", "3", "lr-SGD/group0"]]
    # How it was started is among the details.
    assert not [row for row in rows if row and row[0].startswith("version")]
    found = described("show", three / "b")
    assert found.pop("details")["events"] == {"init": 1, "fit_start": 1, "batch_end": 3, "eval_end": 2}
    assert found == next(run for run in described("runs") if run["run"] == "b")


def test_the_longest_name_of_a_metric_makes_no_other_line_long(three: Path) -> None:
    long = f"first/{'x' * 500}/last"
    run = WrittenRun(three, "long", {})
    run.send(Event.BATCH_END, {"loss": 1.0, "logged": [[0, {long: 2.0}]]})
    run.end()
    shown = {line.split()[-1]: line for line in invoke("show", "long").splitlines()}
    assert len(shown["loss/train/total"]) < 160
    assert shown[long].split()[:2] == [f"first/{'x' * 23}...{'x' * 23}/last", "2"]
    assert described("show", "long")["metrics"][long]["last"] == 2.0


def test_compare_shows_what_was_different(three: Path) -> None:
    rows = [line.split() for line in invoke("compare", "a", "b").splitlines()]
    assert rows[:3] == [["a", "b"], ["hyperparameters"], ["optimizer/lr", "0.1", "0.01"]]
    assert ["loss", "last", "0.75", "0.25"] in rows
    assert ["min", "0.5", "at", "1", "0.25", "at", "2", "*"] in rows
    assert ["max", "0.5", "at", "2", "0.75", "at", "2", "*"] in rows
    assert ["version/torch", "of", "a", "of", "b"] in [
        line.split() for line in invoke("compare", "a", "b", "--all").splitlines()
    ]
    shutil.copytree(three / "a", three / "copy")
    same = invoke("compare", "a", "copy")
    assert ("the same hyperparameters" in same, "*" in same) == (True, False)
    found = described("compare", "a", "b", "c")
    assert found["runs"] == ["a", "b", "c"]
    assert found["hyperparameters"] == {"optimizer/lr": [0.1, 0.01, 0.001]}
    assert found["metrics"]["loss/train/total"]["best"] == [0.5, 0.25, 1.0]
    assert found["metrics"]["loss/train/total"]["is_best"] == [False, True, False]


def test_compare_takes_recordings_for_their_events_alone(three: Path) -> None:
    recording = three / "a" / "recording-1.mcap"
    assert "add --events to compare its events" in run_command("compare", recording, "b").output
    result = run_command("compare", recording, "b", "--events")
    assert "first difference: batch_end at 0ep 2ba of rank 0" in result.output
    assert run_command("compare", "a", "b", "--events").output == result.output
    assert "version/torch" not in result.output


def test_tags_and_notes_are_added_shown_and_removed(three: Path) -> None:
    assert invoke("edit", "--where", "lr > 0.005", "--tag", "fast, good") == "run b: fast, good\nrun a: fast, good\n"
    assert invoke("edit", "a", "--untag", "fast", "--tag", "best") == "run a: good, best\n"
    assert invoke("edit", "a", "c", "--untag", "x") == "run a: good, best\nrun c: no tags\n"
    header, *rows = invoke("runs", "--where", "tags == good").splitlines()
    assert "TAGS" in header
    assert [("fast, good" in row, "good, best" in row) for row in rows] == [(True, False), (False, True)]
    assert run_command("edit", "--where", "lr > 1", "--tag", "x").stderr == "'lr > 1' is true of no run\n"
    invoke("edit", "a", "--note", "is it \x07 the seed?")
    assert re.search(r"^note +is it \\x07 the seed\?$", invoke("show", "a"), re.MULTILINE)
    assert names("--where", "note ~ SEED") == ["a"]
    assert invoke("edit", "a", "--note", "") == "run a: the note is removed\n"
    assert described("show", "a")["note"] == ""
    assert (
        invoke("edit", "a", "--tag", "x", "--pin", "--no-archive")
        == "run a: good, best, x; pinned; no longer archived\n"
    )


def test_a_renamed_run_is_found_and_replayed_under_its_new_name(three: Path) -> None:
    invoke("edit", "a", "--tag", "baseline")
    assert names() == ["c", "b", "a"]
    assert invoke("edit", "a", "--rename", "best") == f"run a is now best, in {three.resolve() / 'best'}\n"
    assert names("--where", "tags == baseline") == ["best"]
    assert described("show", "best")["metrics"]["loss/train/total"]["min"] == 0.5
    about = described("show", "best")["details"]
    assert about["metrics"]["loss/train/total"]["min"] is not None
    assert (about["run"], about["recorded_as"], about["events"]["batch_end"]) == ("best", "a", 3)
    assert re.search(r"^  recorded as +a$", invoke("show", "best", "--details"), re.MULTILINE)
    assert "recorded as" not in invoke("show", "b", "--details")
    with Subscriber("best") as subscriber:
        assert [snapshot.loss for snapshot in subscriber if snapshot.event is Event.BATCH_END] == list(LOSSES["a"])
    assert isinstance(refusal("show", "a"), RunNotFoundError)
    assert "did you mean best? there are c, b, best; " in str(refusal("show", "bets"))
    # It is resumed under its new name, and what was recorded under the one before counts too.
    with Publisher("best", resume=True) as publisher:
        publisher.publish(Event.BATCH_END, batch=4, loss=0.875)
    wait_for(lambda: not is_locked(three / "best"), "the end of its broker")
    assert [recording.run_name for recording in map(Recording, sorted((three / "best").glob("*.mcap")))] == [
        *("a", "best")
    ]
    of_both = described("show", "best")["metrics"]["loss/train/total"]
    assert (of_both["min"], of_both["max"], of_both["last"]) == (0.5, 1.0, 0.875)
    assert described("runs", "--where", "run == best")[0]["metrics"]["loss/train/total"] == of_both


def test_a_name_that_is_taken_or_not_allowed_is_refused(three: Path) -> None:
    (three / "empty").mkdir()
    (three / "link").symlink_to(three / "nowhere")
    for name in ("b", "empty", "link"):
        assert f"{three.resolve() / name} exists" in str(refusal("edit", "a", "--rename", name))
    for name in ("", "../a", "x y"):
        assert isinstance(refusal("edit", "a", "--rename", name), InvalidRunNameError)
    assert names() == ["c", "b", "a"]


def test_runs_are_deleted_by_name_and_by_what_is_true_of_them(three: Path) -> None:
    invoke("edit", "c", "--archive")
    assert run_command("rm", "--where", "lr > 1", "--yes").stderr == "'lr > 1' is true of no run\n"
    told = invoke("rm", "--where", "lr < 0.05", "--yes")
    assert re.fullmatch(r"run b is deleted: [\d.]+ KiB freed\n", told)
    assert names("--archived") == ["c", "a"]
    invoke("rm", "--where", "lr < 0.05", "--archived", "--yes")
    invoke("rm", three / "a", "a", "--yes")
    assert not [path for path in three.glob("[!.]*") if path.is_dir()]


def test_in_a_terminal_it_asks_before_it_deletes_and_elsewhere_it_takes_yes(three: Path) -> None:
    assert isinstance(refusal("rm", "a", "b"), ConfigurationError)
    assert names() == ["c", "b", "a"]
    for answer, code, text in (("n", 1, "nothing was deleted"), ("y", 0, "run a is deleted")):
        terminal = Terminal(sys.executable, "-m", "offloop.bus", "rm", "a", "b", columns=150)
        try:
            screen = terminal.wait_for("Delete 2 runs, ")
            assert str(three / "a") in screen
            assert (three / "a" / "run.json").exists()
            terminal.press(f"{answer}\n")
            terminal.wait_for(text)
            assert terminal.wait_for_end() == code
        finally:
            terminal.close()
        assert (three / "a").exists() is (three / "b").exists() is bool(code)


def test_programs_get_results_as_json(three: Path, tmp_path: Path) -> None:
    (edited,) = described("edit", "a", "--tag", "good", "--pin")
    assert (edited["run"], edited["tags"], edited["pinned"]) == ("a", ["good"], True)
    assert described("edit", "b", "--rename", "d") == [{"run": "b", "renamed": "d"}]
    (exported,) = described("export", "a", "--to", "csv", "-o", tmp_path / "a.csv")
    assert exported["path"] == str(tmp_path / "a.csv")
    assert exported["lost"] is False
    (written,) = described("convert", three / "a" / "recording-1.mcap", "-o", tmp_path / "a.mcap")
    assert written["events"] == exported["events"]
    (tmp_path / "metrics.csv").write_text("step,loss\n1,0.5\n")
    (imported,) = described("import", "--from", "csv", tmp_path / "metrics.csv", "--run-name", "e")
    assert (imported["run"], imported["values"]) == ("e", 1)
    (removed,) = described("rm", "d", "--yes")
    assert removed["run"] == "d"
    assert removed["freed"] > 0
    assert described("rm", "--where", "lr > 9", "--yes") == []
    refused = run_command("export", "no", "--to", "csv", "--json")
    assert (refused.exit_code, strict_json(refused.stdout)) == (1, [])


def test_a_live_run_is_neither_renamed_nor_deleted_and_nothing_beside_it(three: Path) -> None:
    with Publisher("live") as publisher:
        publisher.publish(Event.BATCH_END, batch=1, loss=1.0)
        wait_for(lambda: publisher.poll() or publisher.recorded_all, "the event to be recorded")
        for arguments in (
            ("edit", "live", "--rename", "new"),
            ("rm", "a", "live", "--yes"),
            ("rm", "--where", "batch", "--yes"),
        ):
            told = refusal(*arguments)
            assert isinstance(told, RunIsLiveError)
        assert (three / "a").exists()
        # What people say of it can be changed at any time.
        invoke("edit", "live", "--tag", "now")
        publisher.publish(Event.BATCH_END, batch=2, loss=0.5)
    wait_for(lambda: not is_locked(three / "live"), "the end of its broker")
    assert described("show", "live")["metrics"]["loss/train/total"]["last"] == 0.5
    assert described("show", "live")["tags"] == ["now"]
    invoke("rm", "live", "--yes")
    with pytest.raises(RunNotFoundError):
        find_run("live")


def test_a_link_to_a_run_is_not_followed(three: Path, tmp_path: Path) -> None:
    shutil.move(three / "a", tmp_path / "a")
    (three / "a").symlink_to(tmp_path / "a")
    for arguments in (("rm", "a", "--yes"), ("edit", "a", "--rename", "new"), ("edit", "a", "--tag", "x")):
        told = refusal(*arguments)
        assert isinstance(told, RunDirectoryError)
    invoke("rm", "--where", "status == finished", "--yes")
    assert sorted(path.name for path in (tmp_path / "a").iterdir() if path.suffix == ".mcap") == ["recording-1.mcap"]


def test_metrics_beyond_the_limit_are_counted(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("recording.summary", "cli.describe"):
        monkeypatch.setattr(f"offloop.bus.{module}.MAX_METRICS", 3)
    run = WrittenRun(runs_dir, "many", {})
    run.send(Event.BATCH_END, {"logged": [[0, {f"part{number}": 1.0 for number in range(10)}]]})
    run.end()
    shown = invoke("show", "many")
    assert "part2" in shown
    assert "part3" not in shown
    assert "and 7 beyond the limit of 3" in shown
    assert described("show", "many")["left_out"] == 7
