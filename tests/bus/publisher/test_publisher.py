"""Publishing: complete, in order, bounded, and never in the way of the training. Brokers here are real processes."""

import datetime
import decimal
import errno
import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid

import numpy as np
import pytest
import torch
import zmq
from helpers import wait_for
from training import Act, gold_trainer

from offloop.bus import (
    BASE_EVENTS,
    BrokerError,
    ClosedError,
    ConfigurationError,
    Event,
    InvalidRunNameError,
    Publisher,
    Recording,
    RunDirectoryError,
    RunIsLiveError,
    Subscriber,
    find_run,
)
from offloop.bus.protocol.frames import Control
from offloop.bus.publisher import session_state
from offloop.bus.publisher.launch import BrokerProcess
from offloop.bus.publisher.session import BrokerSession
from offloop.bus.recording.source import RecordSource
from offloop.bus.types.commands import Command
from offloop.bus.types.demand import Demand
from offloop.bus.types.timeouts import Timeouts
from offloop.bus.types.timestamp import Timestamp


def read_back(publisher):
    recording = Recording(publisher.recording)
    return list(recording), recording.ending


def broker_pid(publisher):
    return json.loads((publisher.run_dir / "broker.json").read_text())["pid"]


def test_how_long_the_training_will_be_is_given_once(runs_dir):
    with Publisher("my-run") as publisher:
        publisher.publish(Event.BATCH_END, batch=1, max_duration=None)
        publisher.publish(Event.FIT_START, batch=1, max_duration="9ba")
        publisher.publish(Event.BATCH_END, batch=2)
        publisher.log({"x": 1.0})
        publisher.publish(Event.BATCH_END, batch=3, max_duration="3ep")
        publisher.publish(Event.BATCH_END, batch=4)
        publisher.close("stopped")
    snapshots, _ = read_back(publisher)
    planned = [None if one.max_duration is None else str(one.max_duration) for one in snapshots]
    assert planned == [None, "9ba", "9ba", "3ep", "3ep"]
    wait_for(lambda: find_run("my-run").last.reached, "the end in run.json")
    assert find_run("my-run").last.reached.planned == "3ep"


def test_a_plain_loop_is_recorded_as_it_was(runs_dir):
    with Publisher("my-run") as publisher:
        for batch in range(1, 101):
            publisher.publish(
                Event.BATCH_END, epoch=0, batch=batch, loss=1 / batch, lr=[0.1, 0.01], note="x", max_duration="100ba"
            )
    snapshots, ending = read_back(publisher)
    assert [int(snapshot.timestamp.batch) for snapshot in snapshots] == list(range(1, 101))
    assert [snapshot.seq for snapshot in snapshots] == list(range(1, 101))
    last = snapshots[-1]
    assert (last.loss, last.lr["optimizer"], last.note, str(last.max_duration)) == (0.01, [0.1, 0.01], "x", "100ba")
    assert int(last.previous_timestamp.batch) == 99
    assert ending.status == "finished"
    assert publisher.statistics().acknowledged == 101
    assert publisher.statistics().dropped == 0


def test_event_times_never_go_back(runs_dir):
    times = iter([100, 200, 150, 120, 300, 250])
    now = 0
    with Publisher("r", clock=lambda: now) as publisher:
        for now in times:  # noqa: B007  the clock reads it
            publisher.publish(Event.BATCH_END)
    assert [snapshot.time_ns for snapshot in read_back(publisher)[0]] == [100, 200, 200, 200, 300, 300]


def test_unrequested_events_are_not_published(runs_dir):
    with Publisher("r") as publisher:
        assert Event.BEFORE_FORWARD not in publisher.requested_events
        publisher.publish(Event.BEFORE_FORWARD)
        publisher.publish("EPOCH_END")
    assert [snapshot.event for snapshot in read_back(publisher)[0]] == [Event.EPOCH_END]


def test_a_fast_loop_sends_in_bursts_within_the_delay_and_all_else_at_once(runs_dir):
    now = 0
    with Publisher("r", clock=lambda: now, max_delay=0.05) as publisher:
        publisher.publish(Event.BATCH_END, batch=1)
        assert publisher.statistics().backlog == 0
        for now in range(1_000_000, 50_000_000, 7_000_000):  # noqa: B007  the clock reads it
            publisher.publish(Event.BATCH_END, batch=2)
        assert publisher.statistics().backlog == 7
        now = 51_000_000
        publisher.publish(Event.BATCH_END, batch=3)
        assert publisher.statistics().backlog == 0
        publisher.publish(Event.BATCH_END, batch=4)
        publisher.publish(Event.EPOCH_END, batch=4)
        assert publisher.statistics().backlog == 0
        publisher.publish(Event.BATCH_END, batch=5)
        publisher.poll()
        assert publisher.statistics().backlog == 0
    assert len(read_back(publisher)[0]) == 12
    with pytest.raises(ConfigurationError, match="max_delay is 7"):
        Publisher("s", max_delay=7)


@pytest.mark.slow
def test_a_consumer_says_how_late_events_may_be_the_shortest_delay_wins_and_ends_with_its_lease(runs_dir):
    now = 0

    def tick():
        nonlocal now
        now += 1_000_000
        publisher.publish(Event.BATCH_END)
        return publisher.statistics().backlog

    def longest_wait():
        # Two hundred milliseconds of the loop, twice the longest delay here.
        return max(tick() for _ in range(200))

    def asking(event):
        return wait_for(lambda: publisher.poll() or event in publisher.demand.events, event)

    with Publisher("r", clock=lambda: now, max_delay=0.1) as publisher:
        assert longest_wait() == 99
        with Subscriber("r", events=[Event.BATCH_START], max_delay=0.02):
            asking(Event.BATCH_START)
            assert longest_wait() == 19
            with Subscriber("r", events=[Event.BATCH_CHECKPOINT], max_delay=0.005):
                asking(Event.BATCH_CHECKPOINT)
                assert longest_wait() == 4
            with Subscriber("r", events=[Event.AFTER_LOSS], max_delay=1):
                asking(Event.AFTER_LOSS)
                assert longest_wait() == 4
            wait_for(lambda: publisher.poll() or Event.BATCH_CHECKPOINT not in publisher.demand.events, "the lease")
            assert longest_wait() == 19
        wait_for(lambda: publisher.poll() or not publisher.demand.events, "the other leases")
        assert longest_wait() == 99
    with pytest.raises(ConfigurationError, match="max_delay is 7"):
        Subscriber("r", max_delay=7)


def test_with_no_delay_an_event_arrives_before_the_loop_does_anything_else(runs_dir):
    with Publisher("r", max_delay=1) as publisher:
        publisher.publish(Event.BATCH_END, batch=1)
        with Subscriber("r", max_delay=0, demand=Demand.of([Event.AFTER_LOSS])) as subscriber:
            snapshots = iter(subscriber)
            assert next(snapshots).timestamp.batch == 1
            wait_for(lambda: publisher.poll() or publisher.demand.events, "the demand")
            for batch in range(2, 20):
                publisher.publish(Event.BATCH_END, batch=batch)
                assert next(snapshots).timestamp.batch == batch


def test_how_late_events_may_be_is_not_recorded(runs_dir):
    with Publisher("r") as publisher, Subscriber("r", max_delay=0, events=[Event.AFTER_LOSS]) as subscriber:
        wait_for(lambda: publisher.poll() or publisher.demand.events, "the demand")
        publisher.publish(Event.AFTER_LOSS, batch=1)
        publisher.demand_in_effect(Timestamp(batch=1).values)
        publisher.publish(Event.AFTER_LOSS, batch=2)
        publisher.close()
        assert [snapshot.timestamp.batch for snapshot in subscriber] == [1, 2]
    (mark,) = [one.event.fields for one in RecordSource(publisher.recording) if one.topic.name == "$demand"]
    assert mark == {"demand": {"after_loss": {"every": [1], "fields": {}}}}


def test_the_base_set_has_one_event_a_batch():
    per_batch = {event for event in BASE_EVENTS if "batch" in event.value}
    assert per_batch == {Event.BATCH_END}


def test_values_on_their_way_hold_events_back_in_order_and_are_never_waited_for(runs_dir):
    class Loss:
        def __init__(self):
            self.there = False
            self.reads_too_early = 0

        def ready(self):
            return self.there

        def value(self):
            self.reads_too_early += not self.there
            return 0.25

    loss = Loss()
    with Publisher("r") as publisher:
        publisher.publish(Event.BATCH_END, batch=1, loss=loss)
        publisher.publish(Event.EPOCH_END, batch=1)
        assert publisher.statistics().held == 2
        loss.there = True
        publisher.publish(Event.BATCH_END, batch=2, loss=1.0)
        publisher.poll()
        assert publisher.statistics().held == 0
        late = Loss()
        publisher.publish(Event.BATCH_END, batch=3, loss=late)
        assert late.reads_too_early == 0
    snapshots, _ = read_back(publisher)
    assert [(snapshot.event.value, snapshot.loss) for snapshot in snapshots] == [
        ("batch_end", 0.25),
        ("epoch_end", None),
        ("batch_end", 1.0),
        ("batch_end", 0.25),
    ]
    assert loss.reads_too_early == 0
    assert late.reads_too_early == 1  # closing drains


def test_an_exception_ends_the_run_as_failed_with_its_text(runs_dir):
    publisher = Publisher("r")

    def train():
        with publisher:
            publisher.publish(Event.FIT_START)
            raise ZeroDivisionError("division by zero")

    with pytest.raises(ZeroDivisionError):
        train()
    assert str(read_back(publisher)[1]) == "failed: ZeroDivisionError: division by zero"
    assert find_run("r").last.error == "ZeroDivisionError: division by zero"


def test_an_error_whose_text_cannot_be_sent_ends_the_run_as_failed(runs_dir):
    publisher = Publisher("r")
    with pytest.raises(ValueError, match="file"), publisher:
        raise ValueError("file \udcff " + "x" * (17 << 20))
    assert find_run("r").status == "failed"
    assert find_run("r").last.error.startswith("ValueError: file \\udcff xxx")


def test_a_command_of_the_users_that_fails_while_the_run_is_closed_does_not_lose_its_end(runs_dir):
    def fail(command):
        raise RuntimeError("in the user's function")

    now = 0
    publisher = Publisher("r", on_command=fail, max_delay=1, clock=lambda: now)
    publisher.publish(Event.BATCH_END, batch=1)
    now = 100_000_000
    publisher.publish(Event.BATCH_END, batch=2)
    receive = publisher._session.receive

    def receive_once():
        publisher._session.receive = receive
        return Control("command", Command("stop").to_wire())

    publisher._session.receive = receive_once
    with pytest.raises(RuntimeError, match="in the user's function"):
        publisher.close()
    assert str(read_back(publisher)[1]) == "finished"


def test_closing_twice_is_fine_and_publishing_afterwards_is_refused(runs_dir):
    publisher = Publisher("r")
    publisher.close()
    publisher.close()
    assert publisher.requested_events == set()
    with pytest.raises(ClosedError, match="closed"):
        publisher.publish(Event.BATCH_END)


def test_a_publisher_that_is_dropped_ends_its_stream(runs_dir):
    publisher = Publisher("r")
    recording = publisher.recording
    publisher.publish(Event.FIT_START)
    del publisher
    gc.collect()
    # It may have been dropped by an error that the program handled.
    wait_for(lambda: find_run("r").status == "stopped", "the run to be over")
    assert len(list(Recording(recording))) == 1


@pytest.mark.parametrize("last_line", ["gc.collect()", "gc.enable()\nheap = [[] for _ in range(1_000_000)]"])
def test_a_publisher_in_a_cycle_that_is_collected_ends_its_stream(runs_dir, last_line):
    script = f"""
import gc
from offloop.bus import Event, Publisher
gc.disable()
publisher = Publisher("r")
publisher.publish(Event.FIT_END)
publisher.itself = publisher
del publisher
{last_line}
from offloop.bus import find_run
print(find_run("r").status)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=True)
    assert (done.stdout, done.stderr) == ("finished\n", "")
    assert [snapshot.event for snapshot in Recording(runs_dir / "r")] == [Event.FIT_END]


def test_a_publisher_in_a_cycle_stays_the_parents_when_a_forked_child_collects_it(runs_dir):
    script = """
import gc, os, sys
from offloop.bus import Event, Publisher, find_run
gc.disable()
publisher = Publisher("r")
publisher.itself = publisher
child = os.fork()
if child == 0:
    del publisher
    gc.collect()
    sys.exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
assert find_run("r").live
publisher.publish(Event.FIT_START)
"""
    # Python 3.12 and newer warn about any fork beside threads, such as those of a socket.
    command = [sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert done.stderr == ""
    assert find_run("r").status == "finished"
    assert [snapshot.event for snapshot in Recording(runs_dir / "r")] == [Event.FIT_START]


@pytest.mark.parametrize(
    ("last_line", "status", "code"),
    [
        ("pass", "finished", 0),
        ("import sys; sys.exit(3)", "stopped", 3),
        ("raise SystemExit('no data')", "stopped", 1),
        ("publisher.publish(Event.FIT_END); import sys; sys.exit(3)", "finished", 3),
        ("publisher.stop_requested = True", "stopped", 0),
        ("raise ValueError('boom')", "failed", 1),
        ("import os; os._exit(3)", "lost", 3),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", "stopped", -signal.SIGINT),
        ("threading.Thread(target=publish_on, daemon=True).start(); time.sleep(0.1)", "finished", 0),
    ],
)
def test_a_program_that_ends_without_close_leaves_a_whole_record(runs_dir, last_line, status, code):
    script = f"""
import signal, threading, time
from offloop.bus import Event, Publisher
signal.signal(signal.SIGINT, signal.default_int_handler)
publisher = Publisher("r")
for batch in range(500):
    publisher.publish(Event.BATCH_END, batch=batch)
while publisher.statistics().acknowledged < 500:
    time.sleep(0.01)
    publisher.poll()

def publish_on():
    while True:
        publisher.publish(Event.EPOCH_END, batch=500)

{last_line}
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == code, done.stderr
    run = wait_for(lambda: (found := find_run("r")) and not found.live and found, "the broker to finish the record")
    recording = Recording(run.path)
    assert len([one for one in recording if one.event is Event.BATCH_END]) == 500
    assert recording.ending.status == status == run.status


def test_a_value_that_cannot_be_sent_is_named_and_leaves_no_hole(runs_dir):
    with Publisher("r") as publisher:
        publisher.publish(Event.BATCH_END, batch=1)
        with pytest.raises(ConfigurationError, match="batch_end cannot be sent"):
            publisher.publish(Event.BATCH_END, batch=2, thing=object())
        publisher.publish(Event.BATCH_END, batch=3)
    assert [(snapshot.seq, snapshot.timestamp.batch) for snapshot in read_back(publisher)[0]] == [(1, 1), (2, 3)]


def test_time_passes_in_a_plain_loop_that_does_not_tell_it(runs_dir):
    now = 5_000_000_000
    with Publisher("r", clock=lambda: now) as publisher:
        for now in (6_000_000_000, 8_500_000_000):  # noqa: B007  the clock reads it
            publisher.publish(Event.BATCH_END)
    assert [snapshot.timestamp.total_wct.total_seconds() for snapshot in read_back(publisher)[0]] == [1, 3.5]


def test_a_device_that_failed_does_not_keep_the_run_from_ending_with_its_error(runs_dir, caplog):
    class Loss:
        def ready(self):
            raise RuntimeError("device-side assert")

        value = ready

    publisher = Publisher("r")

    def train():
        with publisher:
            publisher.publish(Event.BATCH_END, batch=1, loss=Loss())
            raise RuntimeError("the original error")

    with pytest.raises(RuntimeError, match="the original error"):
        train()
    snapshots, ending = read_back(publisher)
    assert str(ending) == "failed: RuntimeError: the original error"
    assert (snapshots[0].loss, snapshots[0].not_sent) == (None, "device-side assert")
    assert "event 1 is sent without loss" in caplog.text


@pytest.mark.parametrize(
    "fields",
    [
        {"total_wct": 3.0},
        {"dataloader_label": {1}},
        {"thing": {1}},
        {"deep": [{"thing": datetime.datetime.now(datetime.UTC)}]},
        {"thing": datetime.date(2026, 1, 1)},
        {"thing": decimal.Decimal(1)},
        {"thing": uuid.UUID(int=1)},
        {"thing": 2**64},
        {"thing": "\ud800"},
        {"\ud800": 1},
        {"dataloader_label": "\ud800"},
        {"loss": torch.ones(3)},
        {"lists": [[]] * 70_000},
        {"elements": [0] * 1_100_000},
        {"lr": "fast"},
        {"lr": torch.empty((), device="meta")},
        {"thing": {(1, 2): 3}},
        {"thing": memoryview(b"abc")[::2]},
        {"deep": [[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]},
        {"large": b"x" * (17 << 20)},
    ],
)
def test_values_that_cannot_be_sent_are_refused_where_they_are_given(runs_dir, fields):
    with Publisher("r") as publisher:
        with pytest.raises(ConfigurationError, match="cannot be sent"):
            publisher.publish(Event.BATCH_END, **fields)
        publisher.publish(Event.BATCH_END, lr=0.5)
    assert [(snapshot.seq, snapshot.lr["optimizer"]) for snapshot in read_back(publisher)[0]] == [(1, [0.5])]


def test_numbers_and_text_of_derived_classes_are_sent_as_the_plain_ones(runs_dir):
    given = {"a": np.float64(0.5), "b": [Event.EPOCH_END, True], "c": type("Name", (str,), {})("n"), "d": (1, {"e": 2})}
    with Publisher("r") as publisher:
        publisher.publish(Event.BATCH_END, **given)
    fields = read_back(publisher)[0][0].fields
    assert {name: fields[name] for name in given} == {"a": 0.5, "b": ["epoch_end", True], "c": "n", "d": [1, {"e": 2}]}


def test_a_start_that_fails_leaves_nothing_behind_and_the_name_free(runs_dir):
    with pytest.raises(ConfigurationError, match="cannot be"):
        Publisher("r", info={"config": object()})
    with pytest.raises(ConfigurationError, match=r"has 2,00.,\d+ bytes, and 983,040 are allowed"):
        Publisher("r", info={"config": "x" * 2_000_000})
    with pytest.raises(ZeroDivisionError):
        Publisher("r", info=lambda name: {"share": 1 / 0})
    with pytest.raises(ConfigurationError, match="rank 1 needs the address of its run's broker"):
        Publisher("r", rank=1, world_size=2)
    assert not (runs_dir / "r").exists()
    Publisher("r").close()


def test_a_module_in_the_current_folder_does_not_take_the_place_of_a_package(runs_dir, tmp_path, monkeypatch):
    (tmp_path / "zmq.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    Publisher("r").close()
    assert find_run("r").status == "finished"


def test_a_moved_run_goes_on_under_its_new_name(runs_dir):
    Publisher("a").close()
    (runs_dir / "a").rename(runs_dir / "b")
    with Publisher("b", resume=True) as publisher:
        publisher.publish(Event.FIT_START)
    assert publisher.attempt == 2
    assert find_run("b").name == "b"
    assert [snapshot.run_name for snapshot in Recording(runs_dir / "b")] == ["b"]


def test_leaving_with_code_0_is_finishing(runs_dir):
    publisher = Publisher("r")

    def leave():
        with publisher:
            sys.exit(0)

    with pytest.raises(SystemExit):
        leave()
    assert find_run("r").status == "finished"


def test_a_loss_on_a_gpu_is_not_read_behind_the_users_back(runs_dir):
    class Loss:
        is_cuda = True

        def __float__(self):
            raise AssertionError("read: the host would have waited for the GPU")

    with Publisher("r") as publisher, pytest.raises(ConfigurationError, match=r"on a GPU.*read_later"):
        publisher.publish(Event.BATCH_END, loss=Loss())


def test_a_resumption_is_a_new_attempt_and_both_are_kept(runs_dir):
    for loss in (1.0, 2.0):
        with Publisher("r", resume=True) as publisher:
            publisher.publish(Event.BATCH_END, loss=loss)
    assert publisher.attempt == 2
    assert [snapshot.loss for snapshot in Recording(runs_dir / "r")] == [2.0]
    assert [snapshot.loss for snapshot in Recording(runs_dir / "r", attempt=1)] == [1.0]


def test_a_live_run_cannot_be_resumed(runs_dir):
    with Publisher("r") as publisher:
        with pytest.raises(RunIsLiveError, match=r"'r' .* is live already: choose another") as raised:
            Publisher("r", resume=True)
        assert raised.value.run == "r"
        publisher.publish(Event.FIT_START)
    assert len(read_back(publisher)[0]) == 1


def test_names_places_and_paths_that_cannot_be(runs_dir, tmp_path):
    with pytest.raises(InvalidRunNameError):
        Publisher("a/b")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match=r"cannot be written.*--runs-dir"):
        Publisher("r", runs_dir=tmp_path / "file")
    with pytest.raises(ConfigurationError, match="socket's may have 107"):
        Publisher("r", runs_dir=tmp_path / ("x" * 100))
    with pytest.raises(ConfigurationError, match="rank is 2"):
        Publisher("r", rank=2, world_size=2)


def test_no_broker_at_the_named_address_is_told(runs_dir):
    with pytest.raises(BrokerError, match=r"no broker answers at ipc:///nowhere: give further ranks"):
        Publisher("r", broker="ipc:///nowhere", timeouts=Timeouts(welcome=0.2))
    for address in ("tcp://127.0.0.1:5570", "nonsense"):
        with pytest.raises(ConfigurationError, match=r"use the Publisher.address of the first rank"):
            Publisher("r", broker=address)


def test_the_training_goes_on_when_no_broker_can_be_started_again(runs_dir, caplog):
    publisher = Publisher("r")
    publisher.publish(Event.BATCH_END, batch=1)
    # While it lives it may be writing there.
    os.kill(broker_pid(publisher), signal.SIGKILL)
    wait_for(lambda: not find_run("r").live, "the broker to be gone")
    shutil.rmtree(publisher.run_dir)
    batch = 1

    def goes_on():
        nonlocal batch
        batch += 1
        publisher.publish(Event.BATCH_END, batch=batch)
        return not publisher.requested_events

    wait_for(goes_on, "the publisher to give up")
    assert "was killed by signal 9; another one is started" in caplog.text
    assert "does not take it up again: the directory of run 'r' in" in caplog.text
    publisher.publish(Event.BATCH_END, batch=batch + 1)
    publisher.close()


@pytest.mark.parametrize(("owner", "name"), [(BrokerSession, "_connect"), (BrokerProcess, "_spawn")])
def test_a_trainer_that_is_out_of_descriptors_for_a_while_finds_its_broker_later(
    runs_dir, monkeypatch, caplog, owner, name
):
    monkeypatch.setattr(session_state, "HELLO_AGAIN_SECONDS", 0.2)
    publisher = Publisher("r", timeouts=Timeouts(flush=30.0))
    publisher.publish(Event.BATCH_END, batch=1)
    wait_for(lambda: publisher.poll() or publisher.recorded_all, "the first event")
    failed = 0

    def fail(*_):
        nonlocal failed
        failed += 1
        raise zmq.ZMQError(errno.EMFILE) if name == "_connect" else OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as full:
        full.setattr(owner, name, fail)
        os.kill(broker_pid(publisher), signal.SIGKILL)
        wait_for(lambda: publisher.publish(Event.EPOCH_END) or publisher.poll() or failed > 1, "the second failure")
    publisher.close()
    snapshots, ending = read_back(publisher)
    assert len(snapshots) == publisher.statistics().published - 1
    assert (ending.status, publisher.recorded_all) == ("finished", True)
    assert "is not recorded yet, and it is tried again" in caplog.text


def test_a_broker_that_stands_still_delays_nothing_and_gets_everything_later(runs_dir, monkeypatch):
    monkeypatch.setattr("offloop.bus.publisher.session.SEND_QUEUE", 10)
    with Publisher("r") as publisher:
        publisher.publish(Event.FIT_START)
        pid = broker_pid(publisher)
        os.kill(pid, signal.SIGSTOP)
        try:
            for batch in range(100_000):
                publisher.publish(Event.BATCH_END, batch=batch)
            assert publisher.statistics().backlog > 1000
        finally:
            os.kill(pid, signal.SIGCONT)
    statistics = publisher.statistics()
    assert statistics.dropped == 0
    assert statistics.backlog_bytes_high > 0
    assert [snapshot.seq for snapshot in read_back(publisher)[0]] == list(range(1, 100_002))


def test_what_is_kept_for_a_broker_that_stands_still_is_bounded_and_the_loss_is_counted(runs_dir, caplog, monkeypatch):
    monkeypatch.setattr("offloop.bus.publisher.session.SEND_QUEUE", 10)
    with Publisher("r", backlog_bytes=100_000) as publisher:
        pid = broker_pid(publisher)
        os.kill(pid, signal.SIGSTOP)
        try:
            for batch in range(60_000):
                publisher.publish(Event.BATCH_END, batch=batch)
            assert publisher.statistics().backlog_bytes <= 100_000
        finally:
            os.kill(pid, signal.SIGCONT)
    dropped = publisher.statistics().dropped
    assert dropped > 0
    recording = Recording(publisher.recording)
    assert len(list(recording)) == 60_000 - dropped
    (gap,) = recording.gaps
    assert gap.last - gap.first + 1 == dropped
    assert f"{dropped} events of run r were given up" in caplog.text


def test_a_forked_child_publishes_nothing_and_ends_nothing(runs_dir):
    with Publisher("r") as publisher:
        publisher.publish(Event.BATCH_END, batch=1)
        child = os.fork()
        if child == 0:
            ok = not publisher.requested_events
            publisher.close()
            os._exit(0 if ok else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        publisher.publish(Event.BATCH_END, batch=2)
    snapshots, ending = read_back(publisher)
    assert [int(snapshot.timestamp.batch) for snapshot in snapshots] == [1, 2]
    assert ending.status == "finished"


def test_the_run_says_what_it_is(runs_dir):
    with Publisher("r", info={"config": {"lr": 0.1}}) as publisher:
        assert find_run("r").live
    run = find_run("r")
    assert not run.live
    assert run.status == "finished"
    assert run.last.info["config"] == {"lr": 0.1}
    assert run.last.info["pid"] == os.getpid()
    assert run.last.info["versions"]["offloop"]
    assert publisher.run_dir == runs_dir / "r"
    assert (runs_dir / "r").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("size", [0, -1, 1000, "64MiB"])
def test_a_ring_that_holds_nothing_is_refused(runs_dir, size):
    with pytest.raises(ConfigurationError, match="65,536 or more; 67,108,864 is the default"):
        Publisher("r", backlog_bytes=size)
    assert not (runs_dir / "r").exists()


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"bad": "x" * (17 << 20)}, "an event of 17,.* 16,777,216 are allowed"),
        ({"bad": 2**70}, "can't serialize ints"),
        ({"bad": "\ud800"}, "surrogates not allowed"),
        ({"bad": torch.tensor(1j)}, "complex"),
        ({"bad": object()}, "a object cannot be logged"),
        ({f"bad {number}": "x" * (1 << 20) for number in range(20)}, "1,048,[0-9]* bytes of an event of more than"),
    ],
    ids=["large", "int", "text", "complex", "object", "many"],
)
def test_what_cannot_be_sent_of_an_event_of_a_training_is_left_out_named_and_ends_nothing(
    wrong, reason, runs_dir, caplog
):
    def log(event, state, logger):
        logger.log_metrics({"good": 0.5, **(wrong if state.timestamp.values[2] == 2 else {})})

    with gold_trainer(publish=True, run_name="large", algorithms=Act(log, Event.BATCH_START)) as trainer:
        trainer.fit()
    recording = Recording(runs_dir / "large")
    batches = [snapshot for snapshot in recording if snapshot.event is Event.BATCH_END]
    assert [snapshot.timestamp.batch.value for snapshot in batches] == list(range(1, 9))
    assert (recording.gaps, recording.ending.status) == ((), "finished")
    assert all(snapshot.loss is not None for snapshot in batches)
    logged = [values for snapshot in batches for _, values in snapshot.logged]
    assert [values["good"] for values in logged] == [0.5] * 8
    assert [len(values) for values in logged if len(values) > 1] == ([16] if len(wrong) > 1 else [])
    assert re.search(f"run large: bad.* is left out, all else is published: .*{reason}", caplog.text)


def test_a_program_whose_folder_and_arguments_are_not_utf_8_publishes(tmp_path, runs_dir, monkeypatch):
    folder = tmp_path / os.fsdecode(b"folder\xff")
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["train.py", os.fsdecode(b"--data=\xfe")])
    with Publisher("r", runs_dir=runs_dir) as publisher:
        publisher.publish(Event.EPOCH_END)
    (attempt,) = find_run("r", runs_dir).attempts
    assert attempt.info["command"] == ["train.py", "--data=\\xfe"]
    assert attempt.info["cwd"] == f"{tmp_path}/folder\\xff"
    with pytest.raises(ConfigurationError, match=r"folder\\xff/runs/r/broker.sock is not UTF-8: choose another runs"):
        Publisher("r", runs_dir="runs")


def test_a_current_folder_that_was_removed_is_named_and_does_not_matter_to_runs_elsewhere(
    tmp_path, runs_dir, monkeypatch
):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(
        RunDirectoryError, match=r"the current folder was removed, .*name an absolute one with runs_dir"
    ):
        Publisher("r", runs_dir="runs")
    with Publisher("r", runs_dir=runs_dir) as publisher:
        publisher.publish(Event.EPOCH_END)
    (attempt,) = find_run("r", runs_dir).attempts
    assert attempt.info["cwd"] == f"{folder} (deleted)"


def test_closing_waits_no_longer_than_its_time_limit_for_a_broker_that_stands_still(runs_dir, caplog):
    publisher = Publisher("r", timeouts=Timeouts(flush=0.2, broker_exit=1000.0))
    publisher.publish(Event.EPOCH_END)
    pid = broker_pid(publisher)
    os.kill(pid, signal.SIGSTOP)
    try:
        publisher.close()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert "does not answer" in caplog.text
    wait_for(lambda: find_run("r").status == "finished", "the broker to finish the record by itself")


WITH_MANY_FILES = """
import os, resource, sys
from offloop.bus import Event, Publisher
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard < 4096 else 4096, hard))
files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
with Publisher("r") as publisher:
    publisher.publish(Event.FIT_START)
"""


def test_a_training_with_more_than_a_thousand_open_files_is_recorded(runs_dir):
    done = subprocess.run([sys.executable, "-c", WITH_MANY_FILES], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert [one.event for one in Recording(find_run("r").path)] == [Event.FIT_START]


def test_a_broker_that_has_finished_is_not_started_again_before_its_last_acknowledgement_is_here(
    runs_dir, monkeypatch, caplog
):
    receive, ended = BrokerSession._next, []

    def receive_late(self):
        # As where ZeroMQ's thread has no processor for a moment.
        if self.process is None or self.process.ended() is None:
            return None
        ended.append(time.monotonic())
        return receive(self) if ended[-1] - ended[0] > 0.05 else None

    with Publisher("r") as publisher:
        publisher.publish(Event.BATCH_END, batch=1)
        monkeypatch.setattr(BrokerSession, "_next", receive_late)
    assert caplog.messages == []
    assert find_run("r").status == "finished"
