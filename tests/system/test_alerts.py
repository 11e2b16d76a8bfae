"""Real trainings that finish, fail, are lost, hang, or get NaN: each notice arrives once, whoever is killed."""

import base64
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import wait_for
from receivers import Receiver
from run_folders import WrittenRun

from offloop.bus.runs.alerts import read_alerts

TRAINING = """
import math, os, signal, sys, time
from offloop import Event, Publisher

how, name, go = sys.argv[1:]
with Publisher(name) as publisher:
    publisher.publish(Event.FIT_START, max_duration="40ba")
    for batch in range(1, 41):
        loss = math.nan if how == "nan" and 20 <= batch < 30 else 1 / batch
        publisher.publish(Event.BATCH_END, epoch=0, batch=batch, sample=batch, loss=loss)
        time.sleep(0.02)
        if batch == 30 and how == "fail":
            raise ValueError("boom \\x1b[31m")
        while batch == 30 and how in ("stall", "lost") and not os.path.exists(go):
            publisher.poll()
            time.sleep(0.05)
    publisher.publish(Event.FIT_END, batch=40, sample=40)
"""
ALERT = """
from offloop.bus.cli.main import bus
from offloop.bus.terminal import run_command
from offloop.consumers.callbacks import channels
channels._PAUSES = (0.0, 0.1, 0.1)
run_command(bus)
"""
SECRET = "a-secret-word"


class Processes:
    """Trainings, and ``offloop alert``. Trainings that hang or are to be lost wait in batch 30."""

    def __init__(self, folder: Path) -> None:
        self.script, self.go, self.said = folder / "training.py", folder / "go", folder / "said"
        self.script.write_text(TRAINING)
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, how: str, name: str = "") -> subprocess.Popen[bytes]:
        words = [sys.executable, str(self.script), how, name or how, str(self.go)]
        self.running[name or how] = subprocess.Popen(words, stderr=subprocess.DEVNULL)
        return self.running[name or how]

    def alert(self, to: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start ``offloop alert``, with its standard error in a file."""
        words = [sys.executable, "-c", ALERT, "alert", *arguments, "--to", "env:MINE", "--rule", "stalled for 8s"]
        with open(self.said, "ab") as file:
            started = self.running["alert"] = subprocess.Popen(words, stderr=file, env=os.environ | {"MINE": to})
        return started

    def close(self) -> None:
        for one in self.running.values():
            one.kill()
            one.wait()
        print(self.said.read_text())  # shown where a test fails


@pytest.fixture
def processes(tmp_path: Path, runs_dir: Path) -> Iterator[Processes]:
    made = Processes(tmp_path)
    yield made
    made.close()


def stop(process: subprocess.Popen[bytes], number: signal.Signals) -> int:
    process.send_signal(number)
    return process.wait(100)


def body(receiver: Receiver, title: str) -> dict[str, Any]:
    [found] = [message for message in receiver.got if message["title"] == title]
    return found


def test_each_notice_comes_once_although_the_alerts_are_killed(processes: Processes, runs_dir: Path) -> None:
    with Receiver() as receiver:
        alerts = processes.alert(receiver.url, "--all")
        for how in ("finish", "fail", "lost", "nan", "stall"):
            processes.start(how)
        expected = ["stalled for 8s: lost", "stalled for 8s: stall", "nan: nan", "resolved: nan: nan"]
        wait_for(lambda: {*expected} <= {*receiver.titles}, "those that hang to be noticed", 100)
        processes.running["lost"].kill()
        expected += ["failed: fail", "finished: finish", "finished: nan", "lost: lost"]
        wait_for(lambda: len(receiver.got) >= len(expected), "all other notices")
        assert receiver.titles == sorted(expected)
        wait_for(lambda: all(alert.sent for run in runs_dir.iterdir() for alert in read_alerts(run)), "their notes")
        stop(alerts, signal.SIGKILL)

        assert processes.start("finish", "away").wait(100) == 0
        alerts = processes.alert(receiver.url, "--all")
        wait_for(lambda: "finished: away" in receiver.titles, "what happened meanwhile")
        wait_for(lambda: processes.said.read_text().count("run stall, epoch 0, batch 30: no event") == 2, "the stall")
        processes.go.touch()
        wait_for(lambda: "finished: stall" in receiver.titles, "the end of the stall")
        assert stop(alerts, signal.SIGINT) == 0

        alerts = processes.alert(receiver.url, "--all")
        processes.start("finish", "last")
        wait_for(lambda: "finished: last" in receiver.titles, "a new run")
        assert stop(alerts, signal.SIGTERM) == 0
        expected += ["finished: away", "finished: stall", "resolved: stalled for 8s: stall", "finished: last"]
        assert receiver.titles == sorted(expected)
        assert len({message["message"].rpartition("\n")[2] for message in receiver.got}) == len(expected)
    failed = body(receiver, "failed: fail")
    lines = failed["message"].splitlines()
    assert lines[:2] == ["failed: ValueError: boom \\x1b[31m", "loss 0.0333333, epoch 0, batch 30, attempt 1"]
    assert re.fullmatch(rf"started in {re.escape(os.getcwd())}: \S+training.py fail fail \S+go", lines[2])
    [picture] = failed["attachments"]
    assert base64.b64decode(picture["base64"]).startswith(b"\x89PNG")
    assert failed["type"] == "failure"
    assert "after batch 30" in body(receiver, "stalled for 8s: stall")["message"]


def test_what_cannot_be_sent_is_said_and_sent_by_the_next_one(processes: Processes) -> None:
    with Receiver([500] * 6) as receiver:
        to = f"json://me:{SECRET}@127.0.0.1:{receiver.port}"
        training = processes.start("lost")
        alerts = processes.alert(to, "--rule", "disk/free_gb < 1e9")
        wait_for(lambda: "disk/free_gb" in processes.said.read_text(), "the first notice")
        training.kill()
        assert alerts.wait(100) == 3
        said = processes.said.read_text()
        assert "'lost: lost' was not sent to env:MINE#1: Failed to send JSON POST notification" in said
        assert SECRET not in said
        assert (receiver.refused, receiver.titles) == (6, [])
        for _ in range(2):
            assert processes.alert(to, "lost").wait(100) == 3
            assert receiver.titles == ["lost: lost"]


def test_a_run_that_was_deleted_and_begun_again_is_another_one_for_alerts(runs_dir: Path, tmp_path: Path) -> None:
    said = tmp_path / "said"
    options = ("--all", "--name", "x", "--callbacks", "alert", "-o", "alert.rules=failed")
    command = [sys.executable, "-m", "offloop", "consume", *options]
    with open(said, "wb") as output, subprocess.Popen(command, stderr=output) as alerts:
        for error in ("the first", "the second"):
            WrittenRun(runs_dir, "r", started=time.time()).train([1.0]).end("failed", error)
            wait_for(lambda error=error: f"failed: {error}" in said.read_text(), f"{error} notice")
            shutil.rmtree(runs_dir / "r")
        assert stop(alerts, signal.SIGINT) == 0
