"""Callbacks and loggers given to a trainer: they run in a process of their own."""

import json
import os
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from gold import gold_loader
from training import fitted, gold_trainer

from offloop.bus.errors import ConfigurationError
from offloop.bus.index.index import read_entry
from offloop.bus.recording.recording import Recording
from offloop.bus.runs.directory import find_run, list_runs
from offloop.bus.types.event import Event
from offloop.consumers import Callback, CheckpointSaver, JsonlLogger, LRMonitor
from offloop.trainer.stream.attached import AttachedConsumers, NamedCallbacks


def process(code: str, run: Path, callbacks: list[Any] | None = None) -> AttachedConsumers:
    return AttachedConsumers(callbacks or [], [], {"run": str(run)}, [sys.executable, "-c", code])


def test_callbacks_and_loggers_run_in_a_process_that_the_trainer_waits_for(
    runs_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Mine(Callback):
        """Defined in a function of a test: nobody could import it."""

        def eval_end(self, state: Any, logger: Any) -> None:
            logger.log_metrics({"mine": state.eval_metrics["eval"]["CrossEntropy"], "pid": os.getpid()})

        def batch_start(self, state: Any, logger: Any) -> None:
            logger.log_metrics({"starting": state.timestamp.batch.value})

    saver = CheckpointSaver(str(tmp_path / "best"), monitor="CrossEntropy")
    trainer = gold_trainer(
        publish=True,
        run_name="attached",
        max_duration="1ep",
        save_folder=tmp_path / "saved",
        eval_dataloader=gold_loader("eval_a", 12, 5),
        callbacks=[Mine(), LRMonitor(), saver],
        loggers=[JsonlLogger(tmp_path / "log.jsonl")],
    )
    assert trainer.metrics == {}
    with trainer:
        trainer.fit()
    # The index finds the checkpoints of both, wherever they are.
    checkpoints = {Path(one.path).parent: one for one in read_entry(find_run("attached")).checkpoints}
    assert checkpoints.keys() == {tmp_path / "saved", tmp_path / "best"}
    value = trainer.state.eval_metric_values["eval"]["CrossEntropy"]
    best, saved = checkpoints[tmp_path / "best"], checkpoints[tmp_path / "saved"]
    assert (best.batch, best.metric, best.is_best) == (4, "metrics/eval/CrossEntropy", True)
    assert best.value == saved.metrics["metrics/eval/CrossEntropy"] == pytest.approx(value)
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    [mine] = [row for row in rows if "mine" in row]
    assert mine["mine"] == trainer.state.eval_metric_values["eval"]["CrossEntropy"]
    assert mine["pid"] != os.getpid()
    assert [row["starting"] for row in rows if "starting" in row] == [0, 1, 2, 3]
    assert sum("lr-SGD/group0" in row for row in rows) == 4
    # The trainer has the last of these numbers under the same names.
    logged = {name: value for row in rows for name, value in row.items() if name.startswith(("loss/", "metrics/"))}
    assert trainer.metrics == logged
    assert {"loss/train/total", "metrics/train/CrossEntropy", "metrics/eval/MulticlassAccuracy"} <= logged.keys()
    computed = trainer.state.eval_metrics["eval"]["MulticlassAccuracy"].compute()
    assert trainer.metrics["metrics/eval/MulticlassAccuracy"] == computed.item()
    assert trainer.metrics["MulticlassAccuracy"] == computed.item()
    with pytest.raises(KeyError, match="Accuracy"):
        trainer.metrics["Accuracy"]
    # What its callbacks want is recorded from the first event on, as if it had been in the base set.
    recorded = Recording(runs_dir / "attached").snapshots([Event.BATCH_START])
    assert len(list(recorded)) == 4
    assert capfd.readouterr().err == ""


def test_callbacks_and_loggers_are_given_by_their_names_too(runs_dir: Path, tmp_path: Path) -> None:
    class Mine(Callback):
        def fit_end(self, state: Any, logger: Any) -> None:
            logger.log_metrics({"mine": 1})

    (tmp_path / "theirs.py").write_text(
        "print('imported')\n"
        "from offloop.consumers import Callback\n"
        "class Theirs(Callback):\n"
        "    fields = ('gradient_norm',)\n"
        "    def batch_end(self, state, logger):\n"
        "        logger.log_metrics({'theirs': state.gradient_norm})\n"
    )
    names = ["lr", Mine(), f"{tmp_path}/theirs.py:Theirs", "lr"]
    fitted(publish=True, run_name="r", max_duration="1ep", callbacks=names, loggers="jsonl")
    rows = [json.loads(line) for line in (runs_dir / "r" / "metrics.jsonl").read_text().splitlines()]
    assert sum("lr-SGD/group0" in row for row in rows) == 4
    assert sum("mine" in row for row in rows) == 1
    # What they want is there from the first batch on.
    assert sum("theirs" in row for row in rows) == 4


class HoldsALock(Callback):
    def __init__(self) -> None:
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"callbacks": "sped"}, "speed"),
        ({"callbacks": [LRMonitor(), "speed"], "loggers": ["jsonnl"]}, "jsonnl"),
        ({"callbacks": ["early-stop"]}, "early-stop.monitor"),
        ({"callbacks": ["speed"], "wait_for": "callbacks"}, "barrier_events"),
        ({"callbacks": [LRMonitor()], "publish": False}, "callbacks"),
        ({"loggers": [HoldsALock()]}, "HoldsALock"),
        ({"callbacks": LRMonitor}, "callbacks has the class LRMonitor: give objects"),
        ({"loggers": JsonlLogger}, "loggers has the class JsonlLogger: give objects"),
        ({"loggers": ["jsonl", LRMonitor()]}, "loggers has a LRMonitor: give objects"),
        ({"config": {"a": {"b": object()}}}, "config.a.b of the run's description cannot be stored"),
    ],
)
def test_invalid_callbacks_are_refused_before_the_run(arguments: dict[str, Any], word: str, runs_dir: Path) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(word)):
        gold_trainer(**{"publish": True, **arguments})
    assert list_runs(runs_dir) == []


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; sys.exit(3)", "failed with exit code 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "was killed by signal 9"),
    ],
)
def test_a_process_that_fails_is_reported_in_one_line(
    code: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # More than fits into a pipe: also a process that never reads must not break the trainer.
    attached = process(code, tmp_path, ["x" * 1_000_000])
    attached.wait()
    [line] = capsys.readouterr().err.splitlines()
    assert re.search(r"the callbacks' process \d+ " + message, line)


def test_a_process_that_takes_too_long_continues_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    release = tmp_path / "release"
    code = f"import pathlib, time\nwhile not pathlib.Path({str(release)!r}).exists(): time.sleep(0.01)"
    attached = process(code, tmp_path)
    attached.wait(patience=0.1)
    release.touch()
    assert "continues" in capsys.readouterr().err


def test_ctrl_c_reaches_no_process_that_is_asked_about_callbacks() -> None:
    code = "import json, os; print(json.dumps({'error': f'alone: {os.getsid(0) == os.getpid()}'}))"
    with pytest.raises(ConfigurationError, match="alone: True"):
        NamedCallbacks(["speed"], [], [sys.executable, "-c", code])
