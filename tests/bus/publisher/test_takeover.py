"""A training whose standing broker is gone for good loses nothing, and says where the rest is."""

import signal
import sys
from contextlib import ExitStack
from subprocess import PIPE, Popen

import pytest
from brokers import free_address
from click.testing import CliRunner
from faults import Follower, StandingBroker, Training, assert_complete, assert_counted, numbers_in
from helpers import wait_for
from proxy import Network

from offloop.bus import Event, Publisher, Recording, find_run
from offloop.bus.cli.describe import describe_recording
from offloop.bus.cli.recordings import merge_recordings
from offloop.bus.publisher.connection import BrokerConnection
from offloop.bus.types.timeouts import Timeouts

FAST = {"rate": 50, "size": 300, "backlog_bytes": 256 * 1024}
"""A training that keeps what it publishes in twelve seconds."""


@pytest.fixture
def far(runs_dir):
    """Where the standing broker's runs are."""
    return runs_dir / "far"


@pytest.fixture
def near(runs_dir):
    """Where the training's own are."""
    return runs_dir / "near"


IMPATIENT = Timeouts(flush=0.5)
"""Of a publisher that waits for its broker a moment, as they do not in other tests."""


def publish(publisher, begin, end):
    for batch in range(begin, end):
        publisher.publish(Event.BATCH_END, batch=batch)


def settled(publisher):
    """Waits until the broker has everything on disk."""
    wait_for(lambda: publisher.poll() or publisher.recorded_all, "everything to be recorded")


def merge(*paths, to):
    """What ``offloop convert merge`` makes of recordings."""
    done = CliRunner().invoke(merge_recordings, [*map(str, paths), "-o", str(to)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return Recording(to)


@pytest.mark.slow
def test_a_run_whose_directory_is_here_goes_on_in_its_recording(far, near):
    """Half of what may be kept is there, and the broker is still away."""
    near.mkdir(parents=True)
    broker = StandingBroker(far)
    with Training(near, broker=broker.address, **FAST) as training, Follower(far) as follower:
        training.await_recorded(20)
        broker.end(signal.SIGTERM)
        wait_for(lambda: find_run("r", far).live, "the run to be served again", 60)
        training.await_published(training.published + 20)
        told = training.finish()
        assert_complete(follower.result(), told["events"])
    assert (told["dropped"], told["lag"]) == (0, 0)
    recording = Recording(far / "r")
    assert_counted(list(numbers_in(iter(recording))), told["events"])
    assert (recording.gaps, str(recording.ending), find_run("r", far).status) == ((), "finished", "finished")
    assert f"run r is recorded again, where it was: in {far / 'r'}" in training.errors
    assert not list(near.glob("*/run.json"))


@pytest.mark.slow
def test_what_comes_after_a_broker_elsewhere_is_in_a_recording_of_its_own(far, near, tmp_path):
    near.mkdir(parents=True)
    broker = StandingBroker(far)
    with Training(near, broker=broker.address, **FAST) as training:
        training.await_recorded(20)
        broker.end(signal.SIGKILL)
        # As on another machine, whose disk is not to be seen.
        far.rename(far.with_name("elsewhere"))
        wait_for(lambda: (near / "r" / "run.json").exists() and find_run("r", near).live, "a broker of its own", 60)
        with Follower(near) as follower:
            training.await_published(training.published + 20)
            told = training.finish()
            assert follower.result()["numbers"][-1] == told["events"]
    assert (told["dropped"], told["lag"]) == (0, 0)
    first, rest = far.with_name("elsewhere") / "r" / "recording-1.mcap", near / "r" / "recording-1.mcap"
    assert f"{far / 'r' / rest.name} with the broker at {broker.address}, what came after in {rest}" in training.errors
    assert Recording(first).run_id == Recording(rest).run_id
    described = describe_recording(rest)
    assert described["gaps"] == []
    ((_, begin, last),) = (gap.values() for gap in described["left_out"])
    assert begin == 1
    assert 20 <= last < told["events"]
    whole = merge(first, rest, to=tmp_path / "whole.mcap")
    assert_counted(list(numbers_in(iter(whole))), told["events"])
    assert (whole.gaps, str(whole.ending), find_run("r", near).status) == ((), "finished", "finished")


@pytest.mark.slow
def test_what_is_left_at_the_end_is_recorded_by_all_ranks_together(far, near, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("OFFLOOP_RUNS_DIR", str(near))
    # Another run has the name here already.
    with Publisher("r") as other:
        publish(other, 1, 3)
    broker = StandingBroker(far)
    ranks = [Publisher("r", broker=broker.address, rank=rank, world_size=2, timeouts=IMPATIENT) for rank in (0, 1)]
    for publisher in ranks:
        publish(publisher, 1, 10)
        settled(publisher)
    broker.end(signal.SIGTERM)
    far.rename(far.with_name("elsewhere"))
    for publisher in ranks:
        publish(publisher, 10, 20)
    for publisher in ranks:
        publisher.close()
        assert publisher.recorded_all
    first, rest = far.with_name("elsewhere") / "r" / "recording-1.mcap", ranks[0].recording
    assert rest == ranks[1].recording
    assert rest.parents[1].parent == near
    assert f"what came after in {rest}" in caplog.text
    wait_for(lambda: find_run(rest.parent).status == "finished", "the end of the run")
    assert describe_recording(near / "r" / "recording-1.mcap")["events"] == {"batch_end": 2}
    whole = merge(first, rest, to=tmp_path / "whole.mcap")
    assert [[one.timestamp.batch for one in whole if one.rank == rank] for rank in (0, 1)] == [[*range(1, 20)]] * 2
    assert (whole.gaps, str(whole.ending)) == ((), "finished")


def test_where_nothing_can_be_written_the_loss_is_named(far, near, caplog):
    near.parent.mkdir(exist_ok=True)
    near.write_text("a file where runs should be")
    broker = StandingBroker(far)
    publisher = Publisher("r", broker=broker.address, runs_dir=near, timeouts=IMPATIENT)
    publish(publisher, 1, 10)
    settled(publisher)
    broker.end(signal.SIGTERM)
    far.rename(far.with_name("elsewhere"))
    publish(publisher, 10, 20)
    publisher.close()
    assert f"run r cannot be recorded by a broker of its own either: the run directory {near}" in caplog.text
    assert "does not answer: events 10 to 20 may not be recorded" in caplog.text


HASTY_BROKER = """
import signal, sys
from pathlib import Path
from offloop.bus.broker import Broker
from offloop.bus.types.timeouts import Timeouts

control, stream = (f"tcp://127.0.0.1:{port}" for port in (sys.argv[1], "*"))
broker = Broker(control, stream, Path(sys.argv[2]), timeouts=Timeouts(unreachable=1.0))
signal.signal(signal.SIGTERM, lambda *_: broker.stop())
print("ready", flush=True)
broker.serve()
"""


@pytest.mark.parametrize("missed", [1, 10])
def test_what_a_trainer_does_after_it_was_taken_for_lost_is_recorded(far, near, tmp_path, monkeypatch, missed):
    """By a broker elsewhere, which could not reach it for a minute and has written the end of its stream. With one
    event in that minute, that end has the number of the trainer's last event."""
    monkeypatch.setenv("OFFLOOP_RUNS_DIR", str(near))
    receive = BrokerConnection.receive

    def receive_late(link):
        """What the broker says after its welcome is there when that is read, as in a process that had no time."""
        message = receive(link)
        if message is not None and message.kind == "welcome":
            link.socket.poll(1000)
        return message

    monkeypatch.setattr(BrokerConnection, "receive", receive_late)
    port = int(free_address().rpartition(":")[2])
    with (
        Popen([sys.executable, "-c", HASTY_BROKER, str(port), far], stdout=PIPE, text=True) as broker,
        ExitStack() as stack,
    ):
        stack.callback(broker.terminate)
        network = stack.enter_context(Network(port))
        assert broker.stdout.readline() == "ready\n"
        with monkeypatch.context() as there:
            # On this machine the broker would see that the process lives.
            there.setattr("socket.gethostname", lambda: "there")
            publisher = Publisher("r", broker=network.address)
        publish(publisher, 1, 10)
        settled(publisher)
        network.refuse()
        wait_for(lambda: not find_run("r", far).live, "the broker to take it for lost")
        publish(publisher, 10, 10 + missed)
        network.restore()
        settled(publisher)
        publish(publisher, 10 + missed, 30)
        publisher.close()
        assert publisher.recorded_all
        whole = merge(far / "r" / "recording-1.mcap", publisher.recording, to=tmp_path / "whole.mcap")
        assert [one.timestamp.batch for one in whole] == [*range(1, 30)]
        assert (whole.gaps, str(whole.ending)) == ((), "finished")
