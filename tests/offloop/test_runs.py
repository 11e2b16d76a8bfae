"""The runs of a folder in Python: ``offloop.runs``."""

import json
import math
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from commands import command
from documents import blocks
from helpers import wait_for
from paths import RECORDINGS
from run_folders import write_run

import offloop
from offloop.bus import ConfigurationError, Event, Publisher, Recording, RunDirectoryError, RunNotFoundError, find_run
from offloop.bus.index.annotations import read_annotations
from offloop.bus.runs.directory import is_locked
from offloop.consumers.cli.main import main as consumer_main

LOSS = "loss/train/total"
ACCURACY = "metrics/eval/Accuracy"


def train(
    name: str,
    rate: float = 0.1,
    losses: Sequence[float] = (3.0, 2.0, 1.0),
    accuracy: float | None = None,
    first: int = 1,
    **config: Any,
) -> None:
    with Publisher(name, resume=first > 1) as publisher:
        config |= {"lr": rate}
        publisher.publish("init", hyperparameters={"config": config, "machine": {"host": "here"}})
        publisher.publish("fit_start", batch=first - 1)
        for batch, loss in enumerate(losses, first):
            publisher.publish("batch_end", batch=batch, sample=8 * batch, loss=loss, lr=[rate / batch])
            norm = batch / 3
            publisher.log({"own/norm": norm, "metrics/own/norm": norm, "step": 100 * batch, "time": norm})
        if accuracy is not None:
            evaluated = {"eval": {"Accuracy": accuracy}}
            publisher.publish("eval_end", batch=batch, dataloader_label="eval", eval_metrics=evaluated)
        publisher.publish("fit_end", batch=batch)
    wait_for_end(name)


def wait_for_end(name: str) -> None:
    def has_ended() -> bool:
        run = find_run(name)
        return run.status == "finished" and not is_locked(run.path)

    wait_for(has_ended, f"the end of {name}")


@pytest.fixture
def three(runs_dir: Path) -> "offloop.folder.Runs":
    for name, rate, accuracy in (("slow", 0.001, 0.7), ("good", 0.01, 0.9), ("fast", 0.1, 0.8)):
        train(name, rate, accuracy=accuracy)
    return offloop.runs()


def names(runs: Any) -> list[str]:
    return [run.name for run in runs]


def install(runs_dir: Path, recording: Path) -> None:
    name = Recording(recording).run_name
    (runs_dir / name).mkdir()
    shutil.copy(recording, runs_dir / name / "recording-1.mcap")
    attempt = {"attempt": 1, "recording": "recording-1.mcap", "started": 1.0, "ended": 2.0, "status": "finished"}
    (runs_dir / name / "run.json").write_text(json.dumps({"name": name, "attempts": [attempt]}))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> Callable[[Path], dict[str, dict[int, Any]]]:
    consumer = command("consumer", consumer_main, monkeypatch, capsys)

    def write(recording: Path) -> dict[str, dict[int, Any]]:
        path = tmp_path / "logged.jsonl"
        options = ("--log", "jsonl", "-o", f"jsonl.path={path}", "-o", "jsonl.overwrite=true")
        done = consumer("--replay", recording, "--callbacks", "metrics,lr,speed", *options)
        # 3 is for a recording that is cut off.
        assert done.code in (0, 3), done.err
        found: dict[str, dict[int, Any]] = {}
        for row in map(json.loads, path.read_text().splitlines()):
            step, _ = row.pop("step", None), row.pop("time")
            for name, value in row.items():
                if step is None or name.startswith(("time/", "throughput/device/")):
                    continue
                found.setdefault(name, {})[step] = value
        return found

    return write


def by_step(table: dict[str, list[Any]]) -> dict[str, dict[int, Any]]:
    steps = table["step"]
    return {
        name: {step: value for step, value in zip(steps, values, strict=True) if value is not None}
        for name, values in table.items()
        if name != "step"
    }


def exact(values: dict[str, dict[int, Any]]) -> str:
    return "\n".join(
        f"{name} {[(step, float(value)) for step, value in sorted(steps.items())]}"
        for name, steps in sorted(values.items())
    )


# Many runs


def test_runs_are_found_compared_and_sorted(three: Any) -> None:
    assert names(three) == ["fast", "good", "slow"], "the newest first"
    assert three["good"].config["lr"] == 0.01
    assert names(three[1:]) == ["good", "slow"]
    assert names(three.where("lr >= 0.01 and status == finished")) == ["fast", "good"]
    assert names(three.sort("lr")) == ["slow", "good", "fast"]
    assert names(three.where("lr < 0.05").sort("-metrics/eval/Accuracy")) == ["good", "slow"]
    assert three.best("Accuracy").name == "good"
    assert three.best("Accuracy", mode="min").name == "slow"
    assert three.where("lr > 0.05").best(ACCURACY) == three["fast"]
    assert "good" in three
    assert three["good"] not in three.where("lr > 0.05")


def test_what_does_not_exist_is_refused(three: Any) -> None:
    good = three["good"]
    for ask in (
        lambda: three.best("Akkuracy"),
        lambda: three.where("lr >"),
        lambda: three.sort("-rate"),
        lambda: good.config["rate"],
        lambda: good.metrics("Loss"),
        lambda: good.events("batch_and"),
        lambda: good.metrics(to="excel"),
        lambda: good.annotate(add="a,b"),
    ):
        with pytest.raises(ConfigurationError):
            ask()
    for missing in (
        lambda: three["bad"],
        lambda: three.where("lr > 1").best("Accuracy"),
        lambda: good.metrics(attempt=7),
    ):
        with pytest.raises(RunNotFoundError):
            missing()


def test_a_named_folder_that_is_none_is_refused(
    runs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFLOOP_RUNS_DIR", str(tmp_path / "later"))
    assert len(offloop.runs()) == 0
    with pytest.raises(RunDirectoryError, match=r"^no such folder: \S+/later; name an existing folder of runs$"):
        offloop.runs(tmp_path / "later")
    (tmp_path / "nb.py").touch()
    with pytest.raises(RunDirectoryError, match=r"nb\.py is a file; runs live in a folder: name another one$"):
        offloop.runs(tmp_path / "nb.py")


def test_a_choice_of_runs_is_made_again_from_what_is_new(three: Any) -> None:
    good = three.where("Accuracy > 0.75").sort("-Accuracy")
    train("better", 0.02, accuracy=0.95)
    shutil.rmtree(three["fast"].path)
    assert names(good.refresh()) == ["better", "good"]
    assert three["fast"].config["lr"] == 0.1, "what was known last"


def test_tags_and_notes_are_there_at_once_and_for_everybody(three: Any) -> None:
    three["slow"].annotate(add=["baseline", "first"])
    three["slow"].annotate(remove="first", note="from Monday", pinned=True)
    three["good"].annotate(archived=True)
    assert names(three.where("tags == baseline and note ~ monday")) == ["slow"]
    assert read_annotations(three["slow"].path).tags == three["slow"].tags == ("baseline",)
    assert names(offloop.runs()) == ["slow", "fast"]
    assert names(offloop.runs(archived=True)) == ["slow", "fast", "good"]


def test_a_run_that_cannot_be_read_says_why_and_hides_no_other(three: Any, runs_dir: Path) -> None:
    (runs_dir / "slow" / "run.json").write_text("{")
    runs = three.refresh()
    assert [run.name for run in runs] == ["fast", "good", "slow"]
    slow = runs["slow"]
    assert (slow.status, slow.started, slow.ended, dict(slow.config)) == ("unreadable", None, None, {})
    assert slow.problem.startswith(f"{runs_dir / 'slow' / 'run.json'} is damaged: ")
    assert runs.frame(to="dict")["started"][2] is None
    assert [run.name for run in runs.sort("started")][-1] == "slow"
    slow.annotate(note="damaged", archived=True)
    assert (slow.note, read_annotations(slow.path).archived) == ("damaged", True)


def test_all_runs_are_a_table(three: Any) -> None:
    three["fast"].annotate(add=["a", "b"])
    table = three.frame(to="dict")
    assert table["run"] == ["fast", "good", "slow"]
    assert table["config/lr"] == [0.1, 0.01, 0.001]
    assert table["tags"] == ["a, b", "", ""]
    assert table[ACCURACY] == [0.8, 0.9, 0.7]
    assert table["started"][0].utcoffset().total_seconds() == 0
    chosen = three.sort("lr").frame(["name", "lr", f"{LOSS}.max"], to="dict")
    assert chosen == {"name": ["slow", "good", "fast"], "lr": [0.001, 0.01, 0.1], f"{LOSS}.max": [3.0, 3.0, 3.0]}


# One run


def beside_batches(logged: dict[str, dict[int, Any]]) -> dict[str, dict[int, Any]]:
    others = ("metrics/train/", "metrics/own/")  # of a batch, not of an evaluation
    return {
        name: {
            step - (name.startswith("metrics/") and not name.startswith(others)): one for step, one in values.items()
        }
        for name, values in logged.items()
    }


@pytest.mark.parametrize("recorded", ["ranks", "cut"])
def test_the_metrics_of_a_recording_are_those_that_a_consumer_logs(
    recorded: str, runs_dir: Path, log: Any, caplog: pytest.LogCaptureFixture
) -> None:
    install(runs_dir, RECORDINGS / f"{recorded}.mcap")
    [run] = offloop.runs()
    logged = log(RECORDINGS / f"{recorded}.mcap")
    assert len(logged[LOSS]) > 3
    caplog.clear()
    assert exact(by_step(run.metrics(to="dict"))) == exact(beside_batches(logged))
    assert ("ends within a record" in caplog.text) == (recorded == "cut")


def test_the_metrics_of_a_loop_of_ones_own_are_those_that_a_consumer_logs(runs_dir: Path, log: Any) -> None:
    losses = (0.1 + 0.2, math.nan, 1e-300, -math.inf, 2.0, *(1 / step for step in range(3, 120)))
    train("odd", losses=losses, accuracy=1 / 3)
    run = offloop.runs()["odd"]
    logged = log(run.path / "recording-1.mcap")
    assert [logged[LOSS][step] for step in range(5)] == [0.1 + 0.2, "NaN", 1e-300, "-Infinity", 2.0]
    assert logged["own/norm"][5] == logged["metrics/own/norm"][5] == logged["log/time"][5] == 5 / 3
    assert logged["log/step"][5] == 500
    assert len(logged["throughput/batches_per_sec"]) == 22
    assert exact(by_step(run.metrics(to="dict"))) == exact(beside_batches(logged))
    assert run.metrics("total", to="dict")["step"] == [*range(122)]
    assert run.summary["total"].low == 1e-300
    assert run.summary["total"].last == 1 / 119


def test_a_resumed_run_has_the_later_values_of_steps_that_were_trained_twice(runs_dir: Path, log: Any) -> None:
    train("twice", losses=(9.0, 8.0, 7.0, 6.0, 5.0))
    train("twice", losses=(1.0, 0.5), first=3)
    run = offloop.runs()["twice"]
    newest = log(run.path / "recording-2.mcap")[LOSS]
    assert newest == by_step(run.metrics(LOSS, attempt=-1, to="dict"))[LOSS] == {2: 1.0, 3: 0.5}
    assert run.metrics(LOSS, attempt=1, to="dict")[LOSS] == [9.0, 8.0, 7.0, 6.0, 5.0]
    # What the first attempt trained beyond the checkpoint that the second one began with is no part of the training.
    assert by_step(run.metrics(LOSS, to="dict"))[LOSS] == {0: 9.0, 1: 8.0, **newest}
    assert [state.loss for state in run.events("batch_end")] == [9.0, 8.0, 7.0, 6.0, 5.0, 1.0, 0.5]
    assert [state.loss for state in run.events(Event.BATCH_END, attempt=-1)] == [1.0, 0.5]
    assert {state.event for state in run.events()} >= {Event.INIT, Event.BATCH_END, Event.FIT_END}


def test_a_live_run_is_read_as_far_as_it_has_come(runs_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Publisher("live") as publisher:
        runs = offloop.runs()

        def has_come_to(batch: int) -> bool:
            publisher.publish("batch_end", batch=batch, loss=1 / batch)
            publisher.poll()
            return "live" in runs.refresh() and LOSS in runs["live"].summary

        batches = iter(range(1, 100_000))
        wait_for(lambda: has_come_to(next(batches)), "a loss of the live run")
        run = runs["live"]
        assert run.status == "live"
        assert run.metrics(LOSS, to="dict")[LOSS][0] == 1.0
    assert not caplog.records


# Libraries


def without(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """As on a machine where these are not installed."""

    class Absent:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name.partition(".")[0] in packages:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])


def test_without_pandas_and_polars_tables_are_lists(three: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "pandas", "polars")
    run = three["good"]
    assert run.metrics(LOSS) == {"step": [0, 1, 2], LOSS: [3.0, 2.0, 1.0]}
    assert three.frame(["run"]) == {"run": ["fast", "good", "slow"]}
    asked = {
        "pandas": [lambda: run.metrics(to="pandas"), lambda: three.frame(to="pandas")],
        "polars": [lambda: run.metrics(to="polars")],
    }
    for package, calls in asked.items():
        for ask in calls:
            with pytest.raises(ConfigurationError, match=f"pip install {package}"):
                ask()
    without(monkeypatch, "numpy")
    with pytest.raises(ConfigurationError, match="pip install numpy"):
        run.metrics()
    assert three.frame(["run"]) == {"run": ["fast", "good", "slow"]}


@pytest.mark.slow
def test_tables_are_those_of_pandas_and_polars(three: Any) -> None:
    import pandas
    import polars

    frame = three["good"].metrics()
    assert isinstance(frame, pandas.DataFrame)
    assert frame.index.name == "step"
    assert frame[LOSS].dropna().to_dict() == {0: 3.0, 1: 2.0, 2: 1.0}
    assert [*frame.columns] == sorted(frame.columns)
    assert frame["metrics/eval/Accuracy"].dropna().to_dict() == {2: 0.9}
    table = three.frame()
    assert table.sort_values(ACCURACY)["run"].tolist() == ["slow", "fast", "good"]
    assert isinstance(table["started"].dtype, pandas.DatetimeTZDtype)
    train("text", depth="deep", accuracy=0.1)
    train("number", depth=3)
    other = three["good"].metrics([LOSS, "Accuracy"], to="polars")
    assert isinstance(other, polars.DataFrame)
    assert other.columns == ["step", LOSS, ACCURACY]
    assert other[ACCURACY].to_list() == [None, None, 0.9]
    assert three.refresh().frame(to="polars")["run"].to_list() == ["number", "text", "fast", "good", "slow"]


# The page


def test_the_page_s_blocks_run_one_after_the_other(
    runs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPLBACKEND", "agg")
    for number, rate in enumerate((0.001, 0.1), 1):
        with Publisher(f"digits-{number}") as publisher:
            publisher.publish("init", hyperparameters={"config": {"lr": rate}})
            for batch in (1, 2, 3):
                publisher.publish("batch_end", batch=batch, loss=1 / batch, lr={"AdamW": [rate]})
            evaluated = {"eval": {"MulticlassAccuracy": 0.5}}
            publisher.publish("eval_end", batch=3, dataloader_label="eval", eval_metrics=evaluated)
        wait_for_end(f"digits-{number}")
    (tmp_path / "runs").symlink_to(runs_dir)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in blocks("docs/notebooks.md", "python"):
        exec(compile(block.text, str(block), "exec"), names)
    assert names["table"]["lr"].tolist() == [0.1, 0.001]
    assert len(names["axes"].lines) == 2
    assert offloop.runs()["digits-1"].tags == ("baseline",)


def test_a_run_that_was_deleted_does_not_become_another_one_of_its_name(runs_dir: Path) -> None:
    write_run(runs_dir, "r", (1.0, 0.25))
    runs = offloop.runs()
    kept = runs["r"]
    shutil.rmtree(runs_dir / "r")
    write_run(runs_dir, "r", (9.0, 8.0))
    runs.refresh()
    assert (kept.summary["loss"].last, runs["r"].summary["loss"].last) == (0.25, 8.0)
    for read in (kept.metrics, lambda: kept.annotate(note="the best")):
        with pytest.raises(RunNotFoundError, match="another one has its name"):
            read()
    assert runs["r"].note == ""
