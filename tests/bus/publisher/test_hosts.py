"""A run on several hosts, each with a broker and a recording of its own, as publishers see it."""

import os
import signal

import pytest
from brokers import broker_pid
from helpers import wait_for

from offloop.bus import Publisher, Recording, Subscriber
from offloop.bus.cli.describe import describe_run, lines
from offloop.bus.errors import BrokerError, RunIsLiveError
from offloop.bus.runs.directory import find_run
from offloop.bus.runs.writing import next_attempt
from offloop.bus.subscriber.commands import send_command
from offloop.bus.types.event import Event

ID = "0123456789abcdef"


def second_host(folder, attempt=1):
    """Its two ranks of four; the last one has started the broker, and is to be closed last."""
    told = {"runs_dir": folder, "world_size": 4, "local_world_size": 2, "attempt": attempt, "run_id": ID}
    first = Publisher("r", rank=2, **told)
    return [Publisher("r", rank=3, broker=first.address, **told), first]


def publish(ranks):
    for one in ranks:
        one.publish(Event.EPOCH_END, batch=1)
    wait_for(lambda: [one.poll() for one in ranks] and all(one.recorded_all for one in ranks), "the recording")


def test_a_host_has_a_run_of_its_own_ranks_with_the_agreed_attempt_and_identity(tmp_path):
    assert next_attempt(tmp_path, "r") == (1, None)
    ranks = second_host(tmp_path, attempt=5)
    assert [one.attempt for one in ranks] == [5, 5]
    publish(ranks)
    follower = Subscriber("r", runs_dir=tmp_path)
    with pytest.raises(BrokerError, match="rank 0 of run 'r' is one more than the 2 that publish to this broker"):
        Publisher("r", broker=ranks[0].address, world_size=4, local_world_size=2)
    with pytest.raises(BrokerError, match="go to its first rank, which is on another host"):
        send_command(find_run("r", tmp_path), "pause")
    with pytest.raises(RunIsLiveError):
        next_attempt(tmp_path, "r")
    # Its next broker waits for the same ranks alone.
    os.kill(broker_pid(tmp_path / "r"), signal.SIGKILL)
    publish(ranks)
    for one in ranks:
        one.close()
    assert sorted((one.rank, one.seq, one.world_size) for one in follower) == [
        *((2, 1, 4), (2, 2, 4), (3, 1, 4), (3, 2, 4)),
    ]
    follower.close()
    assert follower.ending.status == "finished"
    run = find_run("r", tmp_path)
    assert (run.live, run.status, run.id) == (False, "finished", ID)
    assert [one.number for one in run.attempts] == [5]
    assert (run.last.world_size, run.last.local_world_size) == (4, 2)
    assert run.last.reached.batch == 1
    assert ("ranks", "2 of 4: the others are recorded on their hosts") in list(lines(describe_run(run)))
    recording = Recording(tmp_path / "r")
    assert (len(list(recording)), recording.ending.status, recording.gaps) == (4, "finished", ())
    assert next_attempt(tmp_path, "r") == (6, ID)
    with pytest.raises(BrokerError, match="attempt 5 of run 'r' cannot begin: another one has begun since"):
        second_host(tmp_path, attempt=5)
