"""What loggers leave behind when the disk is full, and that they go on when there is room again."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from consumers_stream import batch_end, record_run, snapshots_of_training
from logged import contents

from offloop.consumers.api.logger import Row, RunContext
from offloop.consumers.loggers.csv import CsvLogger

BATCHES = 60
PLUGIN = """
import resource
from pathlib import Path

from offloop.consumers import Callback, LoggerDestination


class Losses(Callback):
    def __init__(self, room: int | None = None):
        self.room = room

    def batch_end(self, state, logger):
        batch = state.timestamp.values[2]
        if batch == 20 and self.room is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.room, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        logger.log_metrics({"loss": state.loss, f"since/{batch // 10 * 10}": 1.0 / batch})


class Server(LoggerDestination):
    background = True

    def open(self, context):
        self.taken = Path(context.run_dir, "taken").open("a")

    def log_rows(self, rows, state):
        for row in rows:
            print(row.step, file=self.taken, flush=True)

    def close(self):
        self.taken.close()
"""


def consume(directory: Path, loggers: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Replays the recording into loggers; files may have so many bytes from batch 20 on, if there is ``room``."""
    plugin = directory.parent / "plugin.py"
    plugin.write_text(PLUGIN)
    loggers = loggers.replace("Server", f"{plugin}:Server")
    options = ["--replay", str(directory), "--callbacks", f"{plugin}:Losses", "--log", loggers, *words]
    command = [sys.executable, "-m", "offloop.consumers", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def logged(directory: Path) -> dict[str, bytes]:
    found = contents(directory)
    return {name: content for name, content in found.items() if name.startswith(("metrics", "tensorboard"))}


def taken_by_server(directory: Path) -> list[int]:
    return [int(line) for line in (directory / "taken").read_text().split()]


def test_after_a_full_disk_files_are_complete_and_servers_get_entries_once(
    tmp_path: Path,
) -> None:
    loggers = "jsonl,csv,tensorboard,Server"
    whole, full = (record_run(tmp_path / name, "run", snapshots_of_training(BATCHES)) for name in ("whole", "full"))
    assert consume(whole, loggers, "--name", "mine").returncode == 0
    named = ("--name", "mine", "--commit-every", "7")
    short = consume(full, loggers, *named, "-o", "Losses.room=2300")
    assert short.returncode == 1
    for kind in ("JsonlLogger", "CsvLogger", "TensorboardLogger", "Server"):
        assert f"destination {kind} failed and gets no more values: [Errno 27] File too large\n" in short.stderr
    assert "Traceback" not in short.stderr
    assert not list(full.rglob(".*.new"))
    lines = (full / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert 20 <= len(lines) < BATCHES
    assert "".join(lines) == "".join((whole / "metrics.jsonl").read_text().splitlines(keepends=True)[: len(lines)])
    assert json.loads(lines[-1])["step"] == len(lines)
    assert (full / "metrics.csv").read_bytes().endswith(b"\n")
    taken = taken_by_server(full)
    assert taken == [*range(1, len(taken) + 1)]
    assert 14 <= len(taken) < BATCHES
    again = consume(full, loggers, *named)
    assert again.returncode == 0, again.stderr
    assert logged(full) == logged(whole)
    assert taken_by_server(full) == [*range(1, BATCHES + 1)]


def test_a_table_that_cannot_be_widened_stays_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    logger = CsvLogger(str(tmp_path / "metrics.csv"))
    logger.open(RunContext("run", 1, None))
    state = batch_end(1)
    logger.log_rows([Row(1, 2.0, {"a": 0.5})], state)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            logger.log_rows([Row(2, 3.0, {"b": 0.5})], state)
    logger.close()
    assert contents(tmp_path) == {"metrics.csv": b"step,time,a\n1,2.0,0.5\n"}
