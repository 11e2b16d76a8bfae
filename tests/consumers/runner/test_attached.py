"""The process that runs a trainer's callbacks: how it is told, and what it does."""

import io
import json
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from consumers_stream import record_run, snapshots_of_training

from offloop import consumers
from offloop.bus.errors import ConfigurationError
from offloop.consumers import Callback, JsonlLogger, LRMonitor, SpeedMonitor, TrainerMetrics
from offloop.consumers.cli.attached import read_order, run_attached

LOGGER_NAMES = ["ConsoleLogger", "JsonlLogger", "CsvLogger"]
USER_MODULE = """
from offloop.consumers import Callback, LoggerDestination

class Mine(Callback):
    def batch_end(self, state, logger):
        logger.log_metrics({"doubled": 2 * state.loss})
"""


def order(run: Path, callbacks: list[Any], loggers: list[Any], sys_path: list[str]) -> bytes:
    """What a trainer writes to the process."""
    head = json.dumps({"sys_path": sys_path, "run": str(run)}).encode() + b"\n"
    return head + pickle.dumps({"callbacks": callbacks, "loggers": loggers})


def attached(payload: bytes) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "offloop.consumers.cli.attached"]
    return subprocess.run(command, input=payload, capture_output=True, timeout=100, check=False)


def test_classes_of_the_user_s_own_modules_arrive_through_the_pipe(
    runs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "user_module_under_test.py").write_text(USER_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    import user_module_under_test  # type: ignore[import-not-found]

    run = record_run(runs_dir, "r", snapshots_of_training())
    done = attached(order(run, [user_module_under_test.Mine()], [], [str(tmp_path), *sys.path]))
    assert done.returncode == 0, done.stderr.decode()
    assert b"doubled" in done.stdout
    assert b"loss/train/total" not in done.stdout


@pytest.mark.parametrize("name", ["SpeedMonitor", "LRMonitor", "TrainerMetrics", *LOGGER_NAMES])
def test_what_comes_with_offloop_can_be_sent(name: str) -> None:
    made = getattr(consumers, name)()
    assert type(pickle.loads(pickle.dumps(made))) is type(made)


def test_loggers_get_what_the_trainer_says_too(runs_dir: Path) -> None:
    run = record_run(runs_dir, "r", snapshots_of_training())
    assert run_attached(str(run), [SpeedMonitor(), LRMonitor()], [JsonlLogger()]) == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert any("loss/train/total" in row for row in rows)
    assert any("lr-SGD/group0" in row for row in rows)
    assert any(row.get("metrics/eval/accuracy") == 0.75 for row in rows)


def test_what_the_trainer_says_is_not_logged_twice(runs_dir: Path) -> None:
    run = record_run(runs_dir, "r", snapshots_of_training())
    assert run_attached(str(run), [LRMonitor(), TrainerMetrics()], [JsonlLogger()]) == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    # The user's own stands where the user put it, after the learning rate; one put in by default would come before.
    assert [list(row)[2] for row in rows[:3]] == ["time/epoch", "lr-SGD/group0", "time/batch"]


def test_a_callback_that_raises_is_told_and_changes_the_exit_code(
    runs_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Fragile(Callback):
        def batch_end(self, state: Any, logger: Any) -> None:
            raise ValueError("not today")

    run = record_run(runs_dir, "r", snapshots_of_training())
    assert run_attached(str(run), [Fragile()], []) == 1
    assert "callback Fragile raised 8 times" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"", "does not begin with a line of JSON"),
        (b"[]\n", "does not begin with a line of JSON"),
        (b'{"sys_path": [], "run": "r"}\nno pickle', "cannot be made in their own process: UnpicklingError"),
        (b'{"sys_path": [], "run": "r"}\ncno_such_module\nThing\n.', "No module named 'no_such_module'"),
    ],
)
def test_an_order_that_cannot_be_read_is_refused(payload: bytes, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ConfigurationError, match=message):
        read_order(io.BytesIO(payload))


def test_an_error_is_one_line() -> None:
    done = attached(b"nonsense")
    assert done.returncode == 1
    [line] = done.stderr.decode().splitlines()
    assert line.startswith("error: standard input does not begin")


def test_ctrl_c_in_the_terminal_does_not_cost_it_the_end_of_the_run(runs_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "interrupting_callback.py").write_text(
        "import os, signal\n"
        "from offloop.consumers import Callback\n"
        "class Interrupts(Callback):\n"
        "    def batch_end(self, state, logger):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    def fit_end(self, state, logger):\n"
        "        print('saw the end')\n"
    )
    run = record_run(runs_dir, "r", snapshots_of_training())
    # Pickled by hand: the class is to be imported there and not here.
    head = json.dumps({"sys_path": [str(tmp_path), *sys.path], "run": str(run)}).encode()
    made = b"cinterrupting_callback\nInterrupts\n)\x81"
    done = attached(head + b"\n(Vcallbacks\n(" + made + b"lVloggers\n(ld.")
    assert (done.returncode, done.stdout) == (0, b"saw the end\n"), done.stderr.decode()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
