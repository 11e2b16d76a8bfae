"""Processes that join a run besides its ranks: they come, go and die, and nothing that they published is lost."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faults import broker_of
from helpers import wait_for

import offloop
from offloop.bus import (
    BASE_EVENTS,
    ConfigurationError,
    Event,
    Publisher,
    Recording,
    RunNotFoundError,
    Snapshot,
    find_run,
)
from offloop.bus.errors import BrokerError
from offloop.bus.publisher.actor import Actor
from offloop.bus.recording.tables import read_rows
from offloop.bus.runs.directory import read_run
from offloop.bus.types.actor import FIRST_ACTOR, JOIN
from offloop.consumers import Callback, Logger
from offloop.consumers.callbacks import TrainerMetrics
from offloop.consumers.testing import replay

WORKER = """
import sys, time, offloop
with offloop.join(role=sys.argv[1]) as actor:
    print(actor.name, flush=True)
    number = 0
    while not actor.training_ended:
        with actor.span("generate"):
            time.sleep(0.002)
        actor.log_table("samples", [{"worker": actor.name, "number": number}])
        actor.log(made=number)
        print(number, flush=True)
        number += 1
"""


class Worker:
    def __init__(self, role: str = "rollout") -> None:
        self.process = subprocess.Popen([sys.executable, "-c", WORKER, role], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.number = -1
        self.name = self.process.stdout.readline().strip()

    def read_number(self) -> int:
        assert self.process.stdout is not None
        self.number = int(self.process.stdout.readline())
        return self.number

    def last_number(self) -> int:
        out, _ = self.process.communicate(timeout=100)
        return max(map(int, out.split()), default=self.number)


def is_recorded(actor: Actor) -> bool:
    assert actor._publisher is not None
    actor.poll()
    return not actor._publisher.statistics().lag


def train(publisher: Publisher, batches: int, seconds: float = 0.01) -> None:
    for _ in range(batches):
        train.batch = getattr(train, "batch", 0) + 1  # type: ignore[attr-defined]
        publisher.publish("batch_end", batch=train.batch, loss=1.0)  # type: ignore[attr-defined]
        time.sleep(seconds)


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OFFLOOP_RUNS_DIR", str(tmp_path / "runs"))
    train.batch = 0  # type: ignore[attr-defined]
    yield
    assert JOIN not in os.environ


def rows(run: str = "r") -> dict[str, list[int]]:
    """The numbers of each worker's rows, in recorded order."""
    found: dict[str, list[int]] = {}
    for part in read_rows([Recording(find_run(run).path)], "samples"):
        for worker, number in part.rows:
            found.setdefault(worker, []).append(number)
    return found


class Recorder(Callback):
    all_ranks = True
    events = BASE_EVENTS

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    def run_event(self, event: Event, state: Snapshot, logger: Logger) -> None:
        self.seen[f"{state.rank} {event.value}"] += 1


def test_actors_come_and_go_with_metrics_and_without_ending_the_run() -> None:
    with Publisher("r") as publisher:
        with offloop.join(role="evaluator") as first:
            first.event("evaluated", score=0.5)
        train(publisher, 3)
        with offloop.join(role="evaluator") as second, offloop.join(role="evaluator") as third:
            wait_for(lambda: publisher.wait() or second.batch == 3, "the batch")
            second.log(score=0.7)
            second.log({"staleness": 3}, step=1)
            assert (first.name, second.name, third.name) == ("evaluator-0", "evaluator-0", "evaluator-1")
        with offloop.join(role="rollout", name="w") as named, offloop.join(role="rollout", name="w") as other:
            assert (named.name, other.name) == ("w", "w-2")
        train(publisher, 1)
    recording = Recording(find_run("r").path)
    seen = list(recording)
    assert str(recording.ending) == "finished"
    joined = [(one.rank - FIRST_ACTOR, one.actor) for one in seen if one.event is Event.INIT and one.rank]
    names = ["evaluator-0", "evaluator-0", "evaluator-1", "w", "w-2"]
    roles = ["evaluator"] * 3 + ["rollout"] * 2
    assert joined == [
        (number, {"name": name, "role": role}) for number, (name, role) in enumerate(zip(names, roles, strict=True))
    ]
    assert {(one.rank - FIRST_ACTOR, int(one.timestamp.batch)) for one in seen if "logged" in one.fields} == {(1, 3)}
    recorder = Recorder()
    replay(recorder, recording)
    assert recorder.seen == {"0 batch_end": 4}
    metrics = replay(TrainerMetrics(), recording).metrics
    assert metrics["evaluator-0/score"] == [(3, 0.7)]
    assert metrics["evaluator-0/staleness"] == [(1, 3)]
    run: Any = offloop.runs()["r"]
    assert run.metrics("evaluator-0/score", to="dict") == {"step": [3], "evaluator-0/score": [0.7]}
    assert run.summary["evaluator-0/staleness"].last == 3


def test_each_row_is_recorded_once_though_broker_and_actor_are_killed() -> None:
    with Publisher("r") as publisher:
        workers = [Worker(), Worker(), Worker("judge")]
        for kill in range(3):
            train(publisher, 20)
            before = broker_of(publisher.run_dir)
            os.kill(before, signal.SIGKILL)
            train(publisher, 20)
            wait_for(lambda: publisher.wait() or broker_of(publisher.run_dir) not in (0, before), "another broker")  # noqa: B023
            if kill == 1:
                killed = workers.pop(0)
                killed.process.kill()
                kept = killed.last_number()
        train(publisher, 50)
    made = {worker.name: worker.last_number() for worker in workers}
    found = rows()
    assert found.keys() == {killed.name, *made}
    for name, last in made.items():
        # What an actor makes after it has heard of the end is recorded too, as it leaves in time.
        assert found[name] == list(range(last + 1))
    assert found[killed.name] == list(range(len(found[killed.name])))
    assert len(found[killed.name]) >= 1
    assert kept >= 0
    recording = Recording(find_run("r").path)
    batches = [one.timestamp.batch for one in recording if one.event is Event.BATCH_END]
    assert batches == list(range(1, train.batch + 1))  # type: ignore[attr-defined]
    assert str(recording.ending) == "finished"
    ranks = {one.rank for one in recording}
    assert {gap.rank for gap in recording.gaps} <= ranks - {0}


TRAINING = """
import offloop, time
publisher = offloop.Publisher("r")
print("on", flush=True)
while True:
    publisher.publish("batch_end", batch=1, loss=0.0)
    time.sleep(0.01)
"""


@pytest.fixture
def training() -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen([sys.executable, "-c", TRAINING], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_an_actor_whose_training_is_killed_ends_with_it(training: "subprocess.Popen[str]") -> None:
    with offloop.join("r", role="rollout") as actor:
        for number in range(20):
            actor.log_table("samples", [{"worker": actor.name, "number": number}])
        wait_for(lambda: is_recorded(actor), "the record")
        training.kill()
        wait_for(lambda: actor.training_ended, "the end")
        actor.log_table("samples", [{"worker": actor.name, "number": 99}])
        actor.event("late")
    assert rows()["rollout-0"][:20] == list(range(20))
    assert read_run(find_run("r").path).status == "lost"


def test_an_actor_finds_out_that_training_and_broker_are_gone(
    training: "subprocess.Popen[str]", caplog: pytest.LogCaptureFixture
) -> None:
    actor = offloop.join("r", role="rollout")
    actor.event("first")
    wait_for(lambda: is_recorded(actor), "the record")
    serving = broker_of(find_run("r").path)
    os.kill(serving, signal.SIGSTOP)
    training.kill()
    training.wait()
    os.kill(serving, signal.SIGKILL)
    actor.event("lost")
    wait_for(lambda: actor.training_ended, "the end")
    assert "run r has ended: 1 events of this process are not recorded" in caplog.text
    actor.close()


def test_a_run_waits_a_moment_for_its_actors_and_no_longer() -> None:
    publisher = Publisher("r")
    idle = offloop.join(role="idle")
    worker = Worker()
    worker.read_number()
    publisher.close()
    last = worker.last_number()
    assert rows()["rollout-0"] == list(range(last + 1))
    wait_for(lambda: read_run(find_run("r").path).status == "finished", "the end of the run")
    wait_for(lambda: idle.training_ended, "the end")
    idle.close()


def test_only_a_live_run_can_be_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=f"{JOIN}=DIRECTORY"):
        offloop.join(role="rollout")
    with pytest.raises(RunNotFoundError):
        offloop.join("nowhere", role="rollout", wait_seconds=0.1)
    with pytest.raises(ConfigurationError, match="cannot be the name"):
        offloop.join("r", role="a b")
    with Publisher("r"):
        assert os.environ[JOIN] == str(find_run("r").path.absolute())
    with pytest.raises(BrokerError, match="is finished: an actor joins a live run"):
        offloop.join("r", role="rollout", wait_seconds=0.1)


def test_a_disabled_actor_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOOP_DISABLED", "1")
    with offloop.join(role="rollout") as actor:
        actor.log(x=1)
        actor.event("e")
        actor.log_table("t", lambda: pytest.fail("computed"))
        assert (actor.batch, actor.training_ended, actor.name, actor.run_name) == (0, False, "rollout", None)


def test_commands_are_for_the_training(tmp_path: Path) -> None:
    with Publisher("r") as publisher, offloop.join(role="rollout"):
        sent = subprocess.Popen(
            [sys.executable, "-m", "offloop", "send", "r", "stop"], stdout=subprocess.PIPE, text=True
        )
        wait_for(lambda: publisher.wait() or publisher.stop_requested, "the command")
        publisher.publish("batch_end", batch=1, loss=0.0)
        wait_for(lambda: publisher.wait() or sent.poll() is not None, "its end")
        sent.communicate()
        assert sent.returncode == 0
        show = subprocess.run(
            [sys.executable, "-m", "offloop", "show", "r", "--details"], capture_output=True, text=True, check=True
        ).stdout
        assert "rollout-0" in show
