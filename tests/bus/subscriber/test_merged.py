"""Ranks whose hosts have a recording each, read as one stream."""

import asyncio
import contextlib

import pytest

from offloop.bus import Event, Publisher, Subscriber
from offloop.bus.subscriber.merged import MergedSubscriber

RANKS = ((0, 1), (2, 3))


@pytest.fixture
def hosts(tmp_path):
    """Start the publishers of two hosts, each with a broker and a recording of its own."""
    with contextlib.ExitStack() as opened:
        made = []
        for number, (first, second) in enumerate(RANKS):
            common = {"runs_dir": tmp_path / str(number), "world_size": 4, "local_world_size": 2, "attempt": 1}
            here = opened.enter_context(Publisher("wide", rank=first, **common))
            beside = opened.enter_context(Publisher("wide", rank=second, broker=here.address, **common))
            made.append((here, beside))
        yield made


@pytest.fixture
def merged(tmp_path, hosts):
    """One rank of each host."""
    chosen = enumerate(((0,), (3,)))
    with MergedSubscriber(
        [Subscriber("wide", runs_dir=tmp_path / str(number), ranks=ranks) for number, ranks in chosen]
    ) as merged:
        yield merged


def train(host, *batches):
    for batch in batches:
        for publisher in host:
            publisher.publish(Event.BATCH_END, batch=batch, loss=1 / batch)
    for publisher in host:
        publisher.poll()


def numbers(snapshots, rank):
    return [snapshot.seq for snapshot in snapshots if snapshot.rank == rank]


def test_hosts_are_merged_once_and_in_order_without_waiting_for_a_silent_one(hosts, merged):
    train(hosts[0], *range(1, 11))

    async def read():
        got = []
        async for snapshot in merged:
            got.append(snapshot)
            if len(got) == 10:
                assert numbers(got, 0) == list(range(1, 11))
                train(hosts[1], *range(1, 11))
            if len(got) == 20:
                assert merged.ending is None
                # Both have these at once, and so they come side by side.
                train(hosts[0], *range(11, 101))
                train(hosts[1], *range(11, 101))
            if len(got) == 200:
                for beside, (first, second) in enumerate(hosts):
                    ending = ("failed", "out of memory") if beside else ("finished",)
                    second.close(*ending)
                    first.close(*ending)
        return got

    got = asyncio.run(asyncio.wait_for(read(), 60))
    assert [numbers(got, rank) for rank in range(4)] == [list(range(1, 101)), [], [], list(range(1, 101))]
    batches = [int(snapshot.timestamp.batch) for snapshot in got[20:]]
    assert batches == sorted(batches)
    assert (merged.first_rank, str(merged.ending)) == (0, "failed: out of memory")


def test_an_event_is_handled_when_the_next_one_is_requested(tmp_path, hosts):
    """A training may wait for handled events: one that was only read in order to merge does not count."""
    subscribers = [
        Subscriber("wide", runs_dir=tmp_path / str(number), ranks=ranks, barrier_events=[Event.BATCH_END])
        for number, ranks in enumerate(RANKS)
    ]
    train(hosts[0], 1, 2)
    train(hosts[1], 1, 2)

    async def read():
        given = []
        async for snapshot in merged:
            handled = {rank: seq for one in subscribers for rank, seq in list(one._handled.items())}
            last = {one.rank: one.seq for one in given}
            assert all(seq <= last.get(rank, 0) for rank, seq in handled.items())
            given.append(snapshot)
            if len(given) == 8:
                return

    with MergedSubscriber(subscribers) as merged:
        asyncio.run(read())
