"""Control of a running training: what consumers and people ask of a training, and what becomes of it."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from brokers import broker_pid
from helpers import wait_for
from hypothesis import given
from hypothesis import strategies as st
from training import Act, gold_evaluators, gold_trainer

from offloop.bus import Event, Publisher, Recording, Subscriber, find_run
from offloop.bus.errors import ConfigurationError, ProtocolError
from offloop.bus.subscriber.commands import send_command
from offloop.bus.types.commands import COMMANDS, Command, Outcome, check_command
from offloop.consumers import Callback
from offloop.trainer.schedulers import ConstantScheduler

EVALUATORS = {"eval_a": {"n": 12, "batch_size": 5}}


def train_beside(work, **arguments):
    """A training that goes on until ``work``, which begins with its second batch, is done: what that returns."""
    working = []

    def step(event, state, logger):
        time.sleep(0.001)
        if int(state.timestamp.batch) == 2:
            working.append(pool.submit(work))
        if working and working[0].done():
            state.stop_training()

    options = {"publish": True, "run_name": "r", "max_duration": "100000ba", "max_delay": 0} | arguments
    with (
        ThreadPoolExecutor(1) as pool,
        gold_trainer(24, 6, algorithms=[Act(step, Event.BATCH_CHECKPOINT)], **options) as trainer,
    ):
        trainer.fit()
    return trainer, working[0].result()


def send(*command):
    return send_command(find_run("r"), *command, wait=60)


def recorded(event):
    return [one for one in Recording(find_run("r").recording) if one.event is event]


def test_a_schedule_continues_from_a_rate_that_was_set(runs_dir):
    trainer, (outcome, stop) = train_beside(
        lambda: [send("set", "lr", 0.3), send("stop")], schedulers=ConstantScheduler(alpha=0.5, t_max="1ba")
    )
    rates = {int(one.timestamp.batch): one.lr["SGD"][0] for one in recorded(Event.BATCH_END)}
    # The schedule multiplies by 1 after its first batch: it is not the rate that the optimizer was made with any more.
    assert all(rate == pytest.approx(0.3) for batch, rate in rates.items() if batch > outcome.batch)
    assert stop.batch > outcome.batch
    assert trainer.state.optimizers[0].param_groups[0]["initial_lr"] == pytest.approx(0.3)


def test_refused_commands_are_reported_and_the_training_continues(runs_dir):
    def set_temperature(state, value):
        raise ValueError(f"{value} is too hot")

    commands = [("set", "lr", -1.0), ("set", "temperature", 99), ("set", "eval", "now"), ("checkpoint",), ("resume",)]
    _, outcomes = train_beside(
        lambda: [send(*command) for command in commands], settings={"temperature": set_temperature}
    )
    assert outcomes[1].error == "ValueError: 99 is too hot"
    assert all(outcome.error for outcome in outcomes)


def test_checkpoint_and_evaluation_commands_act_at_once(runs_dir, tmp_path):
    _, (saved, evaluated) = train_beside(
        lambda: [send("checkpoint"), send("set", "eval", "now")],
        save_folder=tmp_path, save_interval=0, eval_dataloader=gold_evaluators(EVALUATORS), eval_interval=0,
    )  # fmt: skip
    (path,) = (path for path in tmp_path.iterdir() if f"-ba{saved.batch}-" in path.name)
    assert str(saved) == f"'checkpoint' wrote {path} at batch {saved.batch}"
    assert [int(one.timestamp.batch) for one in recorded(Event.EVAL_END)] == [evaluated.batch]


def test_a_pause_takes_no_training_time(runs_dir):
    def pause():
        paused = send("pause")
        # Meanwhile a value can be set, and the training does not move.
        assert send("set", "lr", 0.5).batch == paused.batch
        assert "is paused already" in send("pause").error
        time.sleep(0.6)
        assert send("set", "lr", 0.4).batch == paused.batch
        assert find_run("r").status == "paused"
        assert send("resume").error is None
        wait_for(lambda: send("set", "lr", 0.3).batch > paused.batch + 2, "the training to go on")
        assert send("stop").error is None
        return paused.batch

    _, paused_at = train_beside(pause)
    assert find_run("r").status == "stopped"
    before, after = recorded(Event.BATCH_END)[paused_at - 1 : paused_at + 1]
    assert int(after.timestamp.batch) == paused_at + 1
    passed = after.time - before.time
    assert passed > 0.6
    # However long the batch itself took.
    assert after.timestamp.batch_wct.total_seconds() < passed - 0.5


def test_repeated_stop_requests_send_one_command_and_report_its_delay_although_the_broker_dies(runs_dir):
    def watch():
        with Subscriber("r", events=[Event.BATCH_END]) as stream:
            for snapshot in stream:
                batch = int(snapshot.timestamp.batch)
                if batch == 5:
                    os.kill(broker_pid(runs_dir / "r"), signal.SIGKILL)
                if batch >= 5:
                    snapshot.stop_training()
            return stream.outcomes

    trainer, (outcome,) = train_beside(watch)
    assert (outcome.command.name, outcome.error, outcome.command.decided_at) == ("stop", None, 5)
    assert outcome.batch == trainer.state.timestamp.values[2]
    assert outcome.delay == outcome.batch - 5


def test_send_prints_the_outcome(runs_dir):
    def bus(*arguments):
        command = [sys.executable, "-m", "offloop.bus", "send", "r", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=100)

    _, (done, refused) = train_beside(lambda: [bus("set", "lr", "1e-3"), bus("set", "lr", "-1")])
    assert (done.returncode, refused.returncode, bus("pause").returncode) == (0, 1, 1)
    assert done.stdout.startswith("run r: 'set lr 0.001' took effect at batch ")
    assert "'set lr -1'" in refused.stderr


WATCHER = """
import sys
from offloop.bus import Event, Subscriber
from offloop.bus.types.demand import Demand, EventDemand
name, event, batch = sys.argv[1] or None, Event(sys.argv[2]), int(sys.argv[3])
demand = Demand({event: EventDemand(1, {"gradient_norm": 1})})
with Subscriber("r", events=[event], demand=demand, name=name, barrier_events=[event]) as stream:
    for snapshot in stream:
        if int(snapshot.timestamp.batch) == batch:
            snapshot.stop_training()
"""


@pytest.fixture
def consumer(runs_dir):
    started = []

    def start(name, event, batch):
        started.append(subprocess.Popen([sys.executable, "-c", WATCHER, name or "", event.value, str(batch)]))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("name", "event", "batch"), [("judge", Event.BATCH_END, 7), (None, Event.EVAL_END, 12)])
def test_a_waiting_trainer_stops_at_the_exact_batch(runs_dir, consumer, name, event, batch):
    options = {"max_duration": "10ep", "eval_dataloader": gold_evaluators(EVALUATORS)}

    with gold_trainer(
        24, 6, publish=True, run_name="r", wait_for=name or "all",
        algorithms=[Act(lambda *_: consumer(name, event, batch), Event.INIT)], **options,
    ) as trainer:  # fmt: skip
        wait_for(lambda: trainer._publisher.poll() or trainer._publisher.consumers, "the consumer")
        trainer.fit()
    assert trainer.state.timestamp.values[2] == batch
    (outcome,) = Recording(find_run("r").recording).read_commands()
    assert (outcome.event, outcome.batch, outcome.delay) == (event.value, batch, 0)
    if event is Event.BATCH_END:
        # It receives its fields from the first batch on.
        ends = [one for one in Recording(find_run("r").recording) if one.event is event]
        assert all("gradient_norm" in one.on_demand for one in ends)


def test_a_trainer_waits_no_longer_than_wait_seconds(runs_dir, consumer, caplog):
    stalled = []

    def begin(_event, state, logger):
        stalled.append(consumer("judge", Event.BATCH_END, 10**6))

    def freeze(_event, state, logger):
        if int(state.timestamp.batch) == 3:
            # One that is killed is not waited for at all.
            stalled[0].send_signal(signal.SIGSTOP)

    with gold_trainer(
        24, 6, publish=True, run_name="r", wait_for="all", wait_seconds=2,
        algorithms=[Act(begin, Event.INIT), Act(freeze, Event.BATCH_START)],
    ) as trainer:  # fmt: skip
        wait_for(lambda: trainer._publisher.poll() or trainer._publisher.consumers, "the consumer")
        trainer.fit()
    assert trainer.state.timestamp.values[2] == 8
    assert caplog.text.count("has not decided at batch_end within 2 s") == 1


class Elsewhere(Callback):
    barrier_events = (Event.EVAL_END,)

    def batch_end(self, state, logger):
        pass


@pytest.mark.parametrize(
    "arguments",
    [
        {"callbacks": Elsewhere(), "wait_for": "all"},
        {"wait_for": 5},
        {"wait_for": "all", "publish": False},
        {"settings": {"lr": print}},
    ],
)
def test_invalid_wait_for_and_settings_are_refused(runs_dir, arguments):
    with pytest.raises(ConfigurationError):
        gold_trainer(24, 6, **({"publish": True} | arguments))
    assert not list(runs_dir.iterdir())


def test_a_barrier_event_outside_the_requested_events_is_refused(runs_dir):
    with Publisher("r"), pytest.raises(ConfigurationError):
        Subscriber("r", events=[Event.BATCH_END], barrier_events=[Event.EVAL_END])


def test_an_absent_consumer_is_named(runs_dir, caplog):
    with gold_trainer(24, 6, publish=True, run_name="r", wait_for=["judge"], wait_seconds=0.1) as trainer:
        trainer.fit()
    assert re.search(r"consumer 'judge' .* within 0\.1 s", caplog.text)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("halt", ()), ("stop", (1,)), ("set", ("lr", "x" * 2000)), ("set", ("lr", 2**70)), ("set", ("lr", [1]))],
)  # fmt: skip
def test_invalid_commands_are_refused(name, arguments):
    with pytest.raises(ConfigurationError):
        check_command(name, arguments)


PLAIN = (
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.integers(-(2**63) + 1, 2**63 - 1) | st.text(max_size=50)
)


@given(
    st.sampled_from(list(COMMANDS)), st.lists(PLAIN, max_size=8), st.text(max_size=20), st.none() | st.integers(0, 9)
)
def test_commands_round_trip(name, arguments, identity, decided_at):
    command = Command(name, tuple(arguments), identity, decided_at)
    assert Command.from_wire(json.loads(json.dumps(command.to_wire()))) == command
    assert str(Outcome(command, "batch_end", 3))


JUNK = st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10)


@given(JUNK | st.fixed_dictionaries({"command": JUNK, "arguments": JUNK}, optional={"id": JUNK, "decided_at": JUNK}))
def test_malformed_commands_are_refused(content):
    with suppress(ProtocolError):
        Command.from_wire(content)


def test_a_command_to_an_ended_training_is_answered(runs_dir):
    """By the broker, when the run is over."""
    outcomes = []
    with Publisher("r") as publisher:
        publisher.publish(Event.BATCH_END, batch=1)
        # So that nothing else is on its way to the publisher.
        wait_for(lambda: publisher.poll() or publisher.recorded_all, "the event on disk")
        info = find_run("r")
        thread = threading.Thread(target=lambda: outcomes.append(send_command(info, "stop", wait=30)))
        thread.start()
        # The publisher ends without having looked once more.
        wait_for(lambda: publisher._session.socket.poll(0), "the command to be there")
    thread.join()
    assert outcomes[0].error == "the run has ended"
