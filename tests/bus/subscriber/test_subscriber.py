"""Receiving: everything once and in order, whenever one comes and whatever happens on the way."""

import shutil
import subprocess
import sys
import time

import pytest
from faults import ThreadFollower
from helpers import wait_for
from run_folders import WrittenRun

from offloop.bus import BASE_EVENTS, ClosedError, Event, Publisher, Recording, RunNotFoundError, Subscriber
from offloop.bus.types.demand import Demand, EventDemand


def publish(publisher, first, last, event=Event.BATCH_END):
    for batch in range(first, last + 1):
        publisher.publish(event, batch=batch, loss=1 / batch)
    publisher.poll()  # the last ones may be waiting for company


def batches(snapshots):
    return [int(snapshot.timestamp.batch) for snapshot in snapshots]


def test_early_and_late_subscribers_get_the_same_events(runs_dir):
    with Publisher("r") as publisher:
        before, ends = ThreadFollower("r"), ThreadFollower("r", events=[Event.EPOCH_END])
        publish(publisher, 1, 300)
        publisher.publish(Event.EPOCH_END, epoch=1)
        wait_for(lambda: len(before.got) == 301, "the first half to arrive")
        middle = ThreadFollower("r")
        publish(publisher, 301, 600)
    for one in (before, middle, ends):
        one.join(100)
    with Subscriber("r") as late:
        after = list(late)
    assert not late.live
    assert batches(one for one in after if one.event is Event.BATCH_END) == list(range(1, 601))
    assert before.got == middle.got == after == list(Recording(publisher.recording))
    assert [(one.event, int(one.timestamp.epoch)) for one in ends.got] == [(Event.EPOCH_END, 1)]
    assert {before.subscriber.ending, middle.subscriber.ending, late.ending} == {late.ending}
    assert str(late.ending) == "finished"


def test_inner_events_are_published_once_a_consumer_requests_them(runs_dir):
    with Publisher("r") as publisher:
        publisher.publish(Event.BATCH_START)
        watcher = ThreadFollower("r", events=[Event.BATCH_START])
        wait_for(lambda: publisher.poll() or Event.BATCH_START in publisher.requested_events, "the demand to arrive")
        assert publisher.requested_events - BASE_EVENTS == {Event.BATCH_START}
        publish(publisher, 1, 3, Event.BATCH_START)
    watcher.join(100)
    assert batches(watcher.got) == [1, 2, 3] == batches(Recording(publisher.recording))


def test_unknown_runs_and_closed_subscribers_are_errors(runs_dir):
    with pytest.raises(RunNotFoundError, match=r"none yet"):
        Subscriber("x")
    Publisher("r").close()
    with pytest.raises(RunNotFoundError, match=r"there are r"):
        Subscriber("x")
    subscriber = Subscriber("r")
    subscriber.close()
    subscriber.close()
    with pytest.raises(ClosedError):
        list(subscriber)


CYCLE = """
import gc, sys
from offloop.bus import Event, Publisher, Subscriber
gc.disable()
with Publisher("cycle") as publisher:
    publisher.publish(Event.BATCH_END, batch=1)
    subscriber = Subscriber("cycle", events=[Event.BATCH_START])
    assert subscriber.live
    cycle = [subscriber]
    cycle.append(cycle)
    del subscriber, cycle
    gc.collect()
print("over")
"""


def test_a_subscriber_in_a_cycle_can_be_collected(runs_dir):
    done = subprocess.run([sys.executable, "-c", CYCLE], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "over\n"


def test_a_refused_request_is_reported_once(runs_dir, caplog):
    def demand(name):
        return Demand({Event.BATCH_END: EventDemand(fields={f"{name}{number}": 1 for number in range(40)})})

    with Publisher("r"), Subscriber("r", demand=demand("a")), Subscriber("r", demand=demand("b")):
        wait_for(lambda: caplog.messages, "the refusal")
        time.sleep(1.2)  # the lease is renewed once a second
    (message,) = caplog.messages
    assert "all consumers of this run together request too much" in message


def test_another_run_of_the_name_is_not_followed(runs_dir):
    old = WrittenRun(runs_dir, "r").train([1.0])
    with Subscriber("r", events=[Event.BATCH_END]) as subscriber:
        snapshots = iter(subscriber)
        assert next(snapshots).loss == 1.0
        shutil.rmtree(old.path)
        new = WrittenRun(runs_dir, "r").train([9.0, 2.0, 3.0])
        old.directory._close()
        assert list(snapshots) == []
        assert subscriber.ending.status == "lost"
        new.end()
