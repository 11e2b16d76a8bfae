"""Publishing: complete, in order, bounded, and never in the way of the training. Brokers here are real processes."""

import datetime
import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from brokers import broker_pid
from helpers import wait_for
from recording_files import file_limit
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
from offloop.bus.index.index import read_entry
from offloop.bus.protocol.frames import Control
from offloop.bus.publisher.launch import BrokerProcess
from offloop.bus.publisher.session import BrokerSession
from offloop.bus.recording.source import RecordSource
from offloop.bus.types.commands import Command
from offloop.bus.types.timeouts import Timeouts
from offloop.bus.types.timestamp import Timestamp


def read_back(publisher):
    recording = Recording(publisher.recording)
    return list(recording), recording.ending


def run_script(script, *options, code=0):
    command = [sys.executable, *options, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stderr
    return done


# -- what arrives -----------------------------------------------------------------------------------------------------


def test_a_plain_loop_is_recorded_as_it_was(runs_dir):
    derived = {
        "a": np.float64(0.5),
        "b": [Event.EPOCH_END, True],
        "c": type("Name", (str,), {})("n"),
        "d": (1, {"e": 2}),
    }
    with Publisher("my-run", info={"config": {"lr": 0.1}}) as publisher:
        assert find_run("my-run").live
        for batch in range(1, 101):
            publisher.publish(Event.BATCH_END, epoch=0, batch=batch, loss=1 / batch, lr=[0.1, 0.01], **derived)
        publisher.publish(Event.FIT_END)
    (*snapshots, end), ending = read_back(publisher)
    # Without counters an event has those of the one before.
    assert (end.event, int(end.timestamp.batch)) == (Event.FIT_END, 100)
    assert [int(snapshot.timestamp.batch) for snapshot in snapshots] == list(range(1, 101))
    assert [snapshot.seq for snapshot in snapshots] == list(range(1, 101))
    last = snapshots[-1]
    assert abs(last.time - time.time()) < 600
    assert (last.loss, last.lr["optimizer"], int(last.previous_timestamp.batch)) == (0.01, [0.1, 0.01], 99)
    plain = {"a": 0.5, "b": ["epoch_end", True], "c": "n", "d": [1, {"e": 2}]}
    assert {name: last.fields[name] for name in plain} == plain
    assert ending.status == "finished"
    assert (publisher.statistics().acknowledged, publisher.statistics().dropped) == (102, 0)
    run = find_run("my-run")
    assert (run.live, run.status) == (False, "finished")
    assert run.last.info["config"] == {"lr": 0.1}
    assert run.last.info["pid"] == os.getpid()
    assert run.last.info["versions"]["offloop"]
    assert publisher.run_dir == runs_dir / "my-run"
    assert publisher.run_dir.stat().st_mode & 0o777 == 0o700


def test_a_planned_duration_applies_until_another_one_is_given(runs_dir):
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


def test_event_times_never_decrease_and_a_plain_loop_gets_its_training_time_from_them(runs_dir):
    now = 5_000_000_000
    with Publisher("r", clock=lambda: now) as publisher:
        for now in (6_000_000_000, 8_500_000_000, 7_000_000_000, 9_000_000_000):  # noqa: B007  the clock reads it
            publisher.publish(Event.BATCH_END)
    snapshots, _ = read_back(publisher)
    assert [snapshot.time_ns / 1e9 for snapshot in snapshots] == [6, 8.5, 8.5, 9]
    assert [snapshot.timestamp.total_wct.total_seconds() for snapshot in snapshots][::3] == [1, 4]


def test_unrequested_events_are_not_published(runs_dir):
    assert {event for event in BASE_EVENTS if "batch" in event.value} == {Event.BATCH_END}
    with Publisher("r") as publisher:
        assert Event.BEFORE_FORWARD not in publisher.requested_events
        publisher.publish(Event.BEFORE_FORWARD)
        publisher.publish("EPOCH_END")
    assert [snapshot.event for snapshot in read_back(publisher)[0]] == [Event.EPOCH_END]
    publisher.close()
    assert publisher.requested_events == set()
    with pytest.raises(ClosedError):
        publisher.publish(Event.BATCH_END)


def test_pending_values_delay_events_in_order_and_are_never_waited_for(runs_dir):
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


# -- when it is sent --------------------------------------------------------------------------------------------------


def test_a_fast_loop_sends_in_bursts_within_the_delay_and_urgent_events_at_once(runs_dir):
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


def test_the_shortest_delay_requested_by_a_consumer_applies(runs_dir):
    now = 0

    def longest_wait():
        nonlocal now
        waits = []
        for _ in range(200):
            now += 1_000_000
            publisher.publish(Event.BATCH_END)
            waits.append(publisher.statistics().backlog)
        return max(waits)

    def asking(event, max_delay):
        subscriber = Subscriber("r", events=[event], max_delay=max_delay)
        wait_for(lambda: publisher.poll() or event in publisher.demand.events, event)
        return subscriber

    with Publisher("r", clock=lambda: now, max_delay=0.1) as publisher:
        assert longest_wait() == 99
        with (
            asking(Event.BATCH_CHECKPOINT, 0.005),
            asking(Event.AFTER_LOSS, 1),
        ):
            assert longest_wait() == 4
            publisher.demand_in_effect(Timestamp(batch=1).values)
    # The delay is not part of what is recorded.
    (mark,) = [one.event.fields for one in RecordSource(publisher.recording) if one.topic.name == "$demand"]
    assert set(mark["demand"]) == {"batch_checkpoint", "after_loss"}


# -- how a run ends ---------------------------------------------------------------------------------------------------


def test_an_exception_fails_the_run_with_its_text(runs_dir, caplog):
    class Loss:
        def ready(self):
            raise RuntimeError("device-side assert")

        value = ready

    publisher = Publisher("r")
    publisher.publish(Event.BATCH_END, batch=1, loss=Loss())
    with pytest.raises(RuntimeError, match="the error"), publisher:
        raise RuntimeError("the error \udcff " + "x" * (1 << 20))
    (snapshot,), ending = read_back(publisher)
    for text in (str(ending), f"failed: {find_run('r').last.error}"):
        assert text.startswith("failed: RuntimeError: the error \\udcff xxx")
    # Neither a failed device nor a text that is too long and not UTF-8 keeps the run from ending.
    assert (snapshot.loss, snapshot.not_sent) == (None, "device-side assert")
    assert "event 1 is sent without loss" in caplog.text


def test_a_user_function_that_fails_during_close_does_not_lose_the_end_of_the_run(runs_dir, monkeypatch):
    def fail(command):
        raise RuntimeError("in the user's function")

    publisher = Publisher("r", on_command=fail)
    command = Control("command", Command("stop").to_wire())
    with monkeypatch.context() as commanded:
        commanded.setattr(publisher._session, "receive", lambda: commanded.undo() or command)
        publisher._next_exchange = 0
        with pytest.raises(RuntimeError, match="in the user's function"):
            publisher.close()
    assert str(read_back(publisher)[1]) == "finished"


def test_a_collected_publisher_ends_its_stream_only_in_the_process_that_made_it(runs_dir):
    script = """
import gc, os, sys
from offloop.bus import Event, Publisher, find_run
from offloop.bus.types.timeouts import Timeouts
gc.disable()
publisher = Publisher("r", timeouts=Timeouts(silence=60.0, flush=60.0, broker_exit=60.0))
publisher.itself = publisher
for closes in (True, False):
    child = os.fork()
    if child == 0:
        assert not publisher.requested_events
        if closes:
            publisher.close()
        del publisher
        gc.collect()
        sys.exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert find_run("r").live
publisher.publish(Event.FIT_END)
del publisher
gc.collect()
print(find_run("r").status)
"""
    # Python 3.12 and newer warn about any fork beside threads, such as those of a socket.
    done = run_script(script, "-W", "ignore:This process:DeprecationWarning")
    assert (done.stdout, done.stderr) == ("finished\n", "")
    assert [snapshot.event for snapshot in Recording(runs_dir / "r")] == [Event.FIT_END]


LAST_LINES = {
    "with publisher: sys.exit(0)": ("finished", 0),
    "sys.exit(3)": ("stopped", 3),
    "publisher.publish(Event.FIT_END); sys.exit(3)": ("finished", 3),
    "publisher.stop_requested = True": ("stopped", 0),
    "os.kill(os.getpid(), signal.SIGINT)": ("stopped", -signal.SIGINT),
    "threading.Thread(target=publish_on, daemon=True).start(); time.sleep(0.1)": ("finished", 0),
}
"""How a program ends, the status of its run, and its exit code."""
WITHOUT_CLOSE = """
import os, signal, sys, threading, time
from offloop.bus import Event, Publisher
signal.signal(signal.SIGINT, signal.default_int_handler)
publisher = Publisher(sys.argv[1])
for batch in range(1, 501):
    publisher.publish(Event.BATCH_END, batch=batch)
while publisher.statistics().acknowledged < 500:
    time.sleep(0.01)
    publisher.poll()

def publish_on():
    while True:
        publisher.publish(Event.EPOCH_END, batch=500)

"""


@pytest.mark.slow
def test_a_program_that_exits_without_close_leaves_a_complete_recording(runs_dir):
    commands = [[sys.executable, "-c", WITHOUT_CLOSE + line, f"r{number}"] for number, line in enumerate(LAST_LINES)]
    programs = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    for number, (program, (status, code)) in enumerate(zip(programs, LAST_LINES.values(), strict=True)):
        _, errors = program.communicate(timeout=200)
        assert program.returncode == code, errors
        wait_for(lambda run=f"r{number}": not find_run(run).live, "the broker to finish the record")
        recording = Recording(runs_dir / f"r{number}")
        assert len([one for one in recording if one.event is Event.BATCH_END]) == 500
        assert recording.ending.status == status == find_run(f"r{number}").status


def test_only_a_broker_that_is_stopped_is_reported_as_silent(runs_dir, caplog):
    with Publisher("r", timeouts=Timeouts(silence=1.0)) as publisher:
        for batch in (1, 2):
            # A loop that pauses does not call its publisher.
            time.sleep(1.2)
            publisher.publish(Event.BATCH_END, batch=batch)
            wait_for(lambda: publisher.poll() or publisher.recorded_all, "the record")
        assert caplog.text == ""
        pid = broker_pid(publisher.run_dir)
        os.kill(pid, signal.SIGSTOP)
        try:
            publisher.publish(Event.EPOCH_END, epoch=1)
            wait_for(lambda: publisher.poll() or caplog.text, "the warning")
        finally:
            os.kill(pid, signal.SIGCONT)
    assert "the broker of run r has not answered for 1 s" in caplog.text


def test_close_waits_for_a_stopped_broker_only_up_to_its_time_limit(runs_dir, caplog):
    publisher = Publisher("r", timeouts=Timeouts(flush=0.2, broker_exit=1000.0))
    publisher.publish(Event.EPOCH_END)
    pid = broker_pid(publisher.run_dir)
    os.kill(pid, signal.SIGSTOP)
    try:
        publisher.close()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert "does not answer" in caplog.text
    wait_for(lambda: find_run("r").status == "finished", "the broker to finish the record by itself")


def test_events_whose_fields_may_be_kept_are_sent_in_batches(runs_dir):
    with Publisher("r", max_delay=1) as publisher:
        context = publisher.pack_context({})
        publisher.publish(Event.EPOCH_START)
        for batch in range(1, 301):
            fields = {"loss": 0.5, "lr": {"SGD": [0.1]}, "batch_size": 8}
            publisher.send(Event.BATCH_END, Timestamp(batch=batch).values, None, fields, context, True)
        assert publisher.statistics().sent >= 256
        assert publisher.statistics().held < 64


def test_a_program_that_is_terminated_while_it_ends_still_ends_its_run(runs_dir):
    code = """
import atexit
from offloop.bus import Publisher
publisher = Publisher("r")
publisher.publish("epoch_end")
atexit.register(lambda: input("at exit"))
raise ValueError("too large")
"""
    program = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert program.stdout.read(7) == b"at exit"
    broker = broker_pid(find_run("r").path)

    def ignores_sigterm():
        ignored = Path(f"/proc/{program.pid}/status").read_text().partition("SigIgn:")[2].split()[0]
        return int(ignored, 16) >> (signal.SIGTERM - 1) & 1

    os.kill(broker, signal.SIGSTOP)
    try:
        program.stdin.write(b"\n")
        program.stdin.flush()
        wait_for(ignores_sigterm, "the end of the program")
        program.terminate()
    finally:
        os.kill(broker, signal.SIGCONT)
    program.communicate(timeout=60)
    assert (find_run("r").status, program.returncode) == ("failed", 1)


# -- what is refused --------------------------------------------------------------------------------------------------


def test_unsupported_values_are_refused_in_the_call_and_leave_no_gap(runs_dir):
    class OnGpu:
        is_cuda = True

        def __float__(self):
            raise AssertionError("read: the host would have waited for the GPU")

    refused = [
        {"loss": OnGpu()},
        {"loss": torch.ones(3)},
        {"lr": "fast"},
        {"logged": {"a": 1.0}},
        {"lr": torch.empty((), device="meta")},
        {"total_wct": 3.0},
        {"dataloader_label": {1}},
        {"dataloader_label": "\ud800"},
        {"\ud800": 1},
        {"thing": object()},
        {"thing": 2**64},
        {"thing": {(1, 2): 3}},
        {"thing": memoryview(b"abc")[::2]},
        {"deep": [{"thing": datetime.datetime.now(datetime.UTC)}]},
        {"deep": [[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]},
        {"lists": [[]] * 70_000},
        {"elements": [0] * 1_100_000},
        {"large": b"x" * (17 << 20)},
    ]
    with Publisher("r") as publisher:
        for fields in refused:
            with pytest.raises(ConfigurationError, match=r"cannot be sent|cannot be a field|on a GPU"):
                publisher.publish(Event.BATCH_END, **fields)
        for fields, message in (
            ({"good": 1, "deep": {"thing": object()}}, r"field 'deep\.thing' of batch_end cannot be sent"),
            ({"dataloader_label": {1}}, r"cannot be sent \(dataloader_label: "),
            ({"lr": {"SGD": "x"}}, r"lr: could not convert string to float: 'x'"),
            ({"batch": "x"}, r"batch: invalid duration 'x'"),
            ({"max_duration": "100 batches"}, r"invalid duration '100 batches'"),
        ):
            with pytest.raises(ConfigurationError, match=message):
                publisher.publish(Event.BATCH_END, **fields)
        publisher.publish(Event.BATCH_END, lr=0.5)
    assert [(snapshot.seq, snapshot.lr["optimizer"]) for snapshot in read_back(publisher)[0]] == [(1, [0.5])]


@pytest.mark.parametrize(
    ("event", "counts", "text"),
    [
        ("batch_end", {"batch": 0}, "batch is 0: counts begin at 0, and at the end of the first batch, batch is 1"),
        ("batch_end", {"batch": "0ba", "sample": 8}, "batch is 0"),
        ("batch_start", {"batch": -1}, "batch is -1"),
        ("epoch_end", {"batch": 3, "sample_in_epoch": -2}, "sample_in_epoch is -2"),
    ],
)
def test_counts_that_no_training_has_are_refused(event, counts, text, runs_dir):
    with Publisher("r", events=Event) as publisher:
        with pytest.raises(ConfigurationError, match=f"^{text}"):
            publisher.publish(event, loss=1.0, **counts)
        publisher.publish("batch_start", batch=0)
        publisher.publish("batch_end", sample=8)
    assert [int(snapshot.timestamp.batch) for snapshot in read_back(publisher)[0]] == [0, 0]


def test_a_rate_alone_is_that_of_the_only_parameter_group(runs_dir):
    rates = {"": 0.3, "SGD": [0.1, 0.2], "AdamW": (1, np.float32(0.5))}
    with Publisher("r") as publisher:
        publisher.publish("batch_end", batch=1, lr=rates)
        with pytest.raises(ConfigurationError, match="cannot be sent"):
            publisher.publish("batch_end", batch=2, lr={"SGD": "fast"})
    assert read_back(publisher)[0][0].lr == {"": [0.3], "SGD": [0.1, 0.2], "AdamW": [1.0, 0.5]}
    assert read_entry(find_run("r")).metrics["lr-/group0"].last == 0.3


def test_unsupported_values_logged_in_a_training_are_left_out_and_reported(runs_dir, caplog):
    wrong = {
        1: {"too large": "x" * (17 << 20)},
        2: {f"too many {number}": "x" * (1 << 20) for number in range(20)},
    }

    def log(event, state, logger):
        logger.log_metrics({"good": 0.5, **wrong.get(state.timestamp.values[2], {})})

    with gold_trainer(publish=True, run_name="large", algorithms=Act(log, Event.BATCH_START)) as trainer:
        trainer.fit()
    recording = Recording(runs_dir / "large")
    batches = [snapshot for snapshot in recording if snapshot.event is Event.BATCH_END]
    assert [snapshot.timestamp.batch.value for snapshot in batches] == list(range(1, 9))
    assert (recording.gaps, recording.ending.status) == ((), "finished")
    assert all(snapshot.loss is not None for snapshot in batches)
    logged = [values for snapshot in batches for _, values in snapshot.logged]
    assert [values["good"] for values in logged] == [0.5] * 8
    assert [len(values) for values in logged if len(values) > 1] == [16]
    for text in ("run large: too large", "16,777,216 are allowed", "bytes of an event of more than"):
        assert text in caplog.text


def test_a_failed_start_leaves_no_run_behind(runs_dir, tmp_path):
    (tmp_path / "file").write_text("")
    refused = [
        (ConfigurationError, {"info": {"config": object()}}),
        (ConfigurationError, {"info": {"config": "x" * 2_000_000}}),
        (ZeroDivisionError, {"info": lambda name: {"share": 1 / 0}}),
        (ConfigurationError, {"rank": 1, "world_size": 2}),
        (ConfigurationError, {"rank": 2, "world_size": 2}),
        (ConfigurationError, {"max_delay": 7}),
        (ConfigurationError, {"backlog_bytes": 1000}),
        (ConfigurationError, {"backlog_bytes": "64MiB"}),
        (ConfigurationError, {"runs_dir": tmp_path / ("x" * 100)}),
        (RunDirectoryError, {"runs_dir": tmp_path / "file"}),
        (ConfigurationError, {"broker": "tcp://127.0.0.1:5570"}),
        (ConfigurationError, {"broker": "nonsense"}),
        (BrokerError, {"broker": "ipc:///nowhere", "timeouts": Timeouts(welcome=0.2)}),
    ]
    for error, arguments in refused:
        with pytest.raises(error):
            Publisher("r", **arguments)
    with pytest.raises(InvalidRunNameError):
        Publisher("a/b")
    assert not (runs_dir / "r").exists()
    Publisher("r").close()


def test_a_killed_training_that_is_started_at_once_waits_for_the_end_of_the_attempt_before(runs_dir):
    run_script(
        """
import os, signal
from offloop import Event, Publisher
publisher = Publisher("r")
publisher.publish(Event.BATCH_END, batch=1, loss=1.0)
publisher.poll()
os.kill(os.getpid(), signal.SIGKILL)
""",
        code=-signal.SIGKILL,
    )
    broker = broker_pid(runs_dir / "r")
    os.kill(broker, signal.SIGSTOP)
    # As on a busy machine: longer than a broker takes to start.
    threading.Timer(4, os.kill, (broker, signal.SIGCONT)).start()
    with Publisher("r", resume=True) as publisher:
        publisher.publish(Event.BATCH_END, batch=2, loss=2.0)
    assert [(one.number, one.status) for one in find_run("r").attempts] == [(1, "lost"), (2, "finished")]


def test_a_resumption_is_a_new_attempt_of_a_run_that_is_not_live_also_of_a_renamed_one(runs_dir):
    with Publisher("r") as publisher:
        publisher.publish(Event.BATCH_END, loss=1.0)
        with pytest.raises(RunIsLiveError) as raised:
            Publisher("r", resume=True)
        assert raised.value.run == "r"
    (runs_dir / "r").rename(runs_dir / "moved")
    with Publisher("moved", resume=True) as publisher:
        publisher.publish(Event.BATCH_END, loss=2.0)
    assert (publisher.attempt, find_run("moved").name) == (2, "moved")
    assert [(one.run_name, one.loss) for one in Recording(runs_dir / "moved")] == [("moved", 2.0)]
    assert [snapshot.loss for snapshot in Recording(runs_dir / "moved", attempt=1)] == [1.0]


# -- a broker that fails ----------------------------------------------------------------------------------------------


def test_the_training_continues_when_its_broker_cannot_be_restarted(runs_dir, caplog):
    publisher = Publisher("r")
    publisher.publish(Event.BATCH_END, batch=1)
    # While it lives it may be writing there.
    os.kill(broker_pid(publisher.run_dir), signal.SIGKILL)
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
    assert "does not resume it: the directory of run 'r' in" in caplog.text
    publisher.publish(Event.BATCH_END, batch=batch + 1)
    publisher.close()


@pytest.mark.slow
def test_a_broker_that_cannot_be_started_or_has_no_room_is_started_again(runs_dir, monkeypatch, caplog):
    spawn, attempts = BrokerProcess._spawn, []

    def spawn_in_trouble(*arguments):
        attempts.append(arguments)
        if len(attempts) == 1:
            raise OSError(errno.EMFILE, "too many open files")
        with file_limit(0):  # the broker inherits it: on its disk no file has room
            return spawn(*arguments)

    with Publisher("r") as publisher:
        publisher.publish(Event.BATCH_END, batch=1)
        wait_for(lambda: publisher.poll() or publisher.recorded_all, "the first event")
        with monkeypatch.context() as trouble:
            trouble.setattr(BrokerProcess, "_spawn", spawn_in_trouble)
            os.kill(broker_pid(publisher.run_dir), signal.SIGKILL)
            wait_for(lambda: publisher.publish(Event.EPOCH_END) or publisher.poll() or len(attempts) > 3, "attempts")
    recording = Recording(publisher.recording)
    assert [snapshot.seq for snapshot in recording] == list(range(1, publisher.statistics().published))
    assert (str(recording.ending), recording.gaps) == ("finished", ())
    assert "is not recorded yet, retrying: [Errno 24] too many open files" in caplog.text


def test_a_stopped_broker_delays_nothing_and_events_beyond_the_backlog_are_a_named_gap(runs_dir, caplog, monkeypatch):
    monkeypatch.setattr("offloop.bus.publisher.session.SEND_QUEUE", 10)
    with Publisher("r", backlog_bytes=100_000) as publisher:
        pid = broker_pid(publisher.run_dir)
        os.kill(pid, signal.SIGSTOP)
        try:
            for batch in range(1, 20_001):
                publisher.publish(Event.BATCH_END, batch=batch)
            statistics = publisher.statistics()
        finally:
            os.kill(pid, signal.SIGCONT)
    dropped = publisher.statistics().dropped
    assert 0 < statistics.backlog_bytes <= statistics.backlog_bytes_high <= 100_000
    assert statistics.backlog > 1000
    recording = Recording(publisher.recording)
    assert len(list(recording)) == 20_000 - dropped
    (gap,) = recording.gaps
    assert gap.last - gap.first + 1 == dropped > 0
    assert f"{dropped} events of run r were" in caplog.text


def test_a_finished_broker_is_not_restarted_before_its_last_acknowledgement_arrives(runs_dir, monkeypatch, caplog):
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


# -- where a program runs ---------------------------------------------------------------------------------------------


def test_invalid_utf_8_in_folder_and_arguments_and_a_module_named_zmq_do_no_harm(tmp_path, runs_dir, monkeypatch):
    folder = tmp_path / os.fsdecode(b"folder\xff")
    folder.mkdir()
    (folder / "zmq.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["train.py", os.fsdecode(b"--data=\xfe")])
    with Publisher("r", runs_dir=runs_dir) as publisher:
        publisher.publish(Event.EPOCH_END)
    (attempt,) = find_run("r", runs_dir).attempts
    assert attempt.info["command"] == ["train.py", "--data=\\xfe"]
    assert attempt.info["cwd"] == f"{tmp_path}/folder\\xff"
    with pytest.raises(ConfigurationError, match=r"broker.sock is not UTF-8"):
        Publisher("r", runs_dir="runs")


WITH_MANY_FILES = """
import os, resource, sys
from offloop.bus import Event, Publisher
from offloop.bus.types.timeouts import Timeouts
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard < 4096 else 4096, hard))
files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
with Publisher("r", timeouts=Timeouts(flush=60.0, silence=60.0)) as publisher:
    publisher.publish(Event.FIT_START)
"""


def test_a_training_with_more_than_a_thousand_open_files_is_recorded(runs_dir):
    assert run_script(WITH_MANY_FILES).stderr == ""
    assert [one.event for one in Recording(find_run("r").path)] == [Event.FIT_START]


WITHOUT_THREADS = """
import json, os, resource, signal
from pathlib import Path
from offloop.bus import BrokerError, Publisher
first = Publisher("r", world_size=2)
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (4 << 20), resource.RLIM_INFINITY))
try:
    Publisher("r", rank=1, world_size=2, broker=first.address)
except BrokerError as error:
    print(error)
first.close()
# It would wait for the other rank.
os.kill(json.loads((first.run_dir / "broker.json").read_text())["pid"], signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_a_process_that_gets_no_more_threads_is_told_so_and_not_aborted(runs_dir):
    assert "needs threads: can't start new thread" in run_script(WITHOUT_THREADS).stdout


def test_a_training_without_room_for_the_files_of_a_broker_is_told_so(runs_dir):
    script = """
import resource
from offloop.bus import BrokerError, Publisher
resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))
try:
    Publisher("r")
except BrokerError as error:
    print(error)
"""
    said = run_script(script).stdout
    assert "the broker cannot be started: [Errno 24] Too many open files; look at the limits" in said


def test_an_outcome_is_recorded_although_the_loop_hangs_after_a_loss_that_came_late(runs_dir):
    class Loss:
        arrived = False

        def ready(self):
            return self.arrived

        def value(self):
            return 0.5

    loss = Loss()
    with Publisher("r") as publisher:
        publisher.publish(Event.BATCH_END, batch=1, loss=loss)
        loss.arrived = True
        publisher.answer(Command("stop"), Event.BATCH_END, Timestamp(batch=1).values)
        wait_for(lambda: [*Recording(find_run("r").recording).read_commands()], "the outcome, without another call")
