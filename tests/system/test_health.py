"""The health of a training's host: measured beside the training, and only while a consumer requests it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from brokers import broker_pid
from helpers import wait_for
from paths import TESTS

from offloop.bus import Publisher, Snapshot, Subscriber, find_run
from offloop.bus.runs.directory import host_name, read_run
from offloop.bus.types.health import HEALTH, Health
from offloop.consumers.callbacks.system_monitor import SystemMonitor
from offloop.consumers.dashboard.view.run_view import RunView
from offloop.consumers.dashboard.view.tap import RunFollower
from offloop.consumers.dashboard.web.run_ranks import RanksLook, ranks_frame
from offloop.consumers.runner.places import FolderRuns
from offloop.consumers.testing import replay


class Training:
    """A training of one rank that goes on while something is waited for."""

    def __init__(self) -> None:
        self.publisher = Publisher("r")
        self.batches = 0

    def train_until(self, condition: Any, name: str) -> Any:
        def look() -> Any:
            self.batches += 1
            self.publisher.publish("batch_end", batch=self.batches, loss=1.0)
            time.sleep(0.01)
            return condition()

        return wait_for(look, name)


@pytest.fixture
def gpus() -> Any:
    return None


@pytest.fixture
def fake_gpus(runs_dir: Path, monkeypatch: pytest.MonkeyPatch, gpus: Any) -> None:
    """The GPUs that the processes of the test see, see ``support/nvml``."""
    monkeypatch.setenv("OFFLOOP_RUNS_DIR", str(runs_dir))
    monkeypatch.setenv("PYTHONPATH", str(TESTS / "support" / "nvml"), prepend=os.pathsep)
    monkeypatch.setenv("FAKE_GPUS", json.dumps(gpus))


@pytest.fixture
def training(fake_gpus: None) -> Iterator[Training]:
    made = Training()
    yield made
    made.publisher.close()


def broker() -> psutil.Process:
    return psutil.Process(broker_pid(find_run("r").path))


def measuring() -> list[psutil.Process]:
    """The processes that the run's broker has started."""
    with contextlib.suppress(psutil.NoSuchProcess):  # one of them, or a broker of which there is no next one yet
        return [one for one in broker().children() if one.status() != psutil.STATUS_ZOMBIE]
    return []


def test_a_host_is_measured_while_it_is_requested_and_a_replay_logs_the_same(training: Training) -> None:
    time.sleep(1)
    assert measuring() == []
    command = ("--run", "r", "--callbacks", "system", "-o", "system.every_seconds=1", "--log", "jsonl")
    consumer = subprocess.Popen([sys.executable, "-m", "offloop.consumers", *command])
    path = find_run("r").path
    log = path / "metrics.jsonl"
    training.train_until(lambda: log.exists() and len(log.read_text().splitlines()) > 1, "two measurements")
    [process] = measuring()
    consumer.send_signal(signal.SIGINT)
    consumer.wait()
    training.train_until(lambda: not process.is_running() and measuring() == [], "the end of the measuring process")
    training.publisher.close()
    assert read_run(path).status == "finished"
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert "system/cpu_percent" in rows[1]
    assert [publisher.get("role") for publisher in read_run(path).last.publishers] == [None, "host"]
    # The recording may have more, from while the consumer ended.
    again = replay(SystemMonitor(every_seconds=1), path).rows[: len(rows)]
    live = [{name: value for name, value in row.items() if name.startswith("system/")} for row in rows]
    assert [dict(row.metrics) for row in again] == live
    assert [row.step for row in again] == [row["step"] for row in rows]


def health_in(snapshot: Snapshot) -> Health:
    found = Health.of(snapshot.fields)
    assert found is not None
    return found


@pytest.mark.parametrize("gpus", [[{"uuid": "GPU-a", "reasons": 0x40, "pids": [os.getpid()]}]])
def test_the_gpu_of_a_rank_is_known_and_another_broker_measures_on(training: Training) -> None:
    with Subscriber("r", events=[HEALTH]) as subscriber:
        measurements = iter(subscriber)
        measured = next(measurements)
        assert health_in(measured).cause(0) == f"GPU 0 of {host_name()} is throttled by heat"
        [first], died = measuring(), broker()
        died.send_signal(signal.SIGKILL)
        training.train_until(lambda: not died.is_running() and not first.is_running(), "the end of both processes")
        training.train_until(lambda: len(measuring()) == 1, "the next one")
        further = next(one for one in measurements if one.rank != measured.rank)
        assert health_in(further).cause(0) is not None


@pytest.mark.parametrize("gpus", ["hang"])
def test_where_nvml_hangs_everything_else_goes_on(training: Training) -> None:
    with Subscriber("r", events=[HEALTH]) as subscriber:
        health = health_in(next(iter(subscriber)))
        assert (health.gpus, health.missing, health.values["memory_percent"] > 0) == ([], {}, True)
        [process] = measuring()
        training.train_until(lambda: training.batches - training.publisher.statistics().lag > 20, "acknowledgements")
        training.publisher.close()
        assert read_run(find_run("r").path).status == "finished"
    wait_for(lambda: not process.is_running(), "the end of the measuring process")


@pytest.mark.parametrize("gpus", [[{"uuid": "GPU-a", "reasons": 0x80, "pids": [os.getpid()]}]])
def test_a_page_that_shows_a_straggler_requests_the_cause(runs_dir: Path, fake_gpus: None, gpus: Any) -> None:
    now = 10**18

    def clock() -> int:
        return now

    first = Publisher("r", world_size=2, clock=clock)
    second = Publisher("r", broker=first.address, rank=1, world_size=2, clock=clock)
    view, batch = RunView("r"), 0
    follower = RunFollower(view, lambda: FolderRuns(runs_dir).find("r"), 1)
    follower.start()

    def text() -> str:
        nonlocal now, batch
        now, batch = now + 300_000_000, batch + 1
        for rank, publisher in enumerate((first, second)):
            spans = [["backward", 50_000_000 * (1 + rank), 100_000_000]]
            phases = {"began": now - 300_000_000, "spans": spans, "device": False}
            publisher.publish("batch_end", batch=batch, loss=1.0, phases=phases)
        time.sleep(0.02)
        facts = ranks_frame([view], ["r"], RanksLook()).get("facts", ())
        return "".join(text for kind, text in facts if kind == "waiting")

    fact = wait_for(text, "a straggler")
    assert fact == "the others wait for rank 1: 50 ms a batch"
    caused = f"{fact}; GPU 0 of {host_name()} is throttled by the power supply"
    wait_for(lambda: text() == caused, "the cause")
    second.close()
    first.close()
    follower.join()
