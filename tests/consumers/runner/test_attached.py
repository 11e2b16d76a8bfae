"""The process that runs a trainer's callbacks: how it is told, and what it does."""

import io
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from consumers_stream import record_run, snapshots_of_training

from offloop.bus.errors import ConfigurationError
from offloop.consumers import (
    JsonlLogger,
    LRMonitor,
    TrainerMetrics,
)  # fmt: skip
from offloop.consumers.cli.attached import read_order, run_attached


def attached(payload: bytes) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "offloop.consumers.cli.attached"]
    return subprocess.run(command, input=payload, capture_output=True, timeout=100, check=False)


def test_loggers_receive_the_trainers_metrics_once(runs_dir: Path) -> None:
    for name, callbacks in ("r", [LRMonitor()]), ("s", [LRMonitor(), TrainerMetrics()]):
        run = record_run(runs_dir, name, snapshots_of_training())
        assert run_attached(str(run), callbacks, [JsonlLogger()]) == 0
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert any(row.get("metrics/eval/accuracy") == 0.75 for row in rows)
    # The user's own stands where the user put it, after the learning rate; one put in by default would come before.
    assert [list(row)[2] for row in rows[:3]] == ["time/epoch", "lr-SGD/group0", "time/batch"]


def test_a_malformed_order_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    head = b'{"sys_path": [], "run": "r"}\n'
    for payload in (b"[]\n", head + b"no pickle", head + b"cno_such_module\nThing\n."):
        with pytest.raises(ConfigurationError):
            read_order(io.BytesIO(payload))


def test_an_attached_consumer_survives_ctrl_c_until_the_run_ends(runs_dir: Path, tmp_path: Path) -> None:
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
