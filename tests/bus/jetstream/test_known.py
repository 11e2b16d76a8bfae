"""Readers elsewhere know which runs are live by what they hear, whatever clocks say."""

import asyncio
import contextlib
import json
import threading
import time

import nats
import pytest
from helpers import wait_for

from offloop.bus import BrokerError, Subscriber
from offloop.bus.jetstream.channel import StreamChannel
from offloop.bus.jetstream.nats_connection import NatsConnection
from offloop.bus.net.channels import ask


@contextlib.contextmanager
def saying(nats_server, clock=0.0, **said):
    """Run a bridge that reports a run ten times a second, by a clock of its own."""
    ended = threading.Event()

    async def say():
        client = await nats.connect(nats_server.address)
        bucket = await client.jetstream().create_key_value(bucket="ol_runs")
        while not ended.is_set():
            entry = {"run": "r", "attempt": 1, "status": "live", "live": True}
            entry["bridge"] = {"time": time.time() + clock}
            await bucket.put("r.1.h", json.dumps(entry | said).encode())
            await asyncio.sleep(0.1)
        await client.close()

    thread = threading.Thread(target=asyncio.run, args=(say(),))
    thread.start()
    yield
    ended.set()
    thread.join()


def put(nats_server, **entries):
    async def put_all(jetstream):
        bucket = await jetstream.create_key_value(bucket="ol_runs")
        for key, entry in entries.items():
            await bucket.put(key.replace("_", "."), json.dumps(entry).encode())

    nats_server.operate(put_all)


def state(there):
    return next((run.live for run in there.runs()), None)


@pytest.mark.slow
def test_a_run_is_live_while_its_bridge_is_heard_whatever_its_clock_says(nats_server):
    with NatsConnection(nats_server.servers) as early:
        with saying(nats_server, clock=-3600):
            wait_for(lambda: state(early), "the run to be live")
            with NatsConnection(nats_server.servers) as late:
                wait_for(lambda: state(late), "the same for who comes late")
                nats_server.kill()
                nats_server.start()
                wait_for(lambda: state(late), "the run to be live again")
        with NatsConnection(nats_server.servers) as afterwards:
            assert state(afterwards) is False
        wait_for(lambda: state(early) is False, "the run not to be live")


def test_a_host_that_died_in_an_attempt_before_keeps_no_reader_waiting(nats_server):
    entry = {"run": "r", "ranks": [0], "live": False}
    gone = {**entry, "attempt": 1, "host": "gone", "status": "live"}
    put(nats_server, r_1_gone=gone, r_2_h={**entry, "attempt": 2, "host": "h", "status": "finished"})
    with Subscriber("r", stream=nats_server.address) as subscriber:
        assert list(subscriber) == []
    assert str(subscriber.ending).startswith("lost: ")


ODD = {"run": "odd", "attempt": 1, "status": "failed", "started": 2.0}
MALFORMED = (
    {**ODD, "started": 1e300},
    {**ODD, "reached": {"epoch": 1, "batch": 1 << 70, "sample": 1}},
    {**ODD, "error": "\ud800"},
    {**ODD, "run": ["odd"]},
    [ODD],
    {"run": "r", "attempt": 9, "status": "live", "live": True},
)


def test_a_malformed_entry_hides_no_other_run(nats_server):
    with NatsConnection(nats_server.servers) as early:
        entries = {f"odd_1_h{number}": entry for number, entry in enumerate(MALFORMED)}
        put(nats_server, **entries, r_1_h={"run": "r", "attempt": 1, "status": "failed", "started": 1.0})
        wait_for(early.runs, "the run")
        with NatsConnection(nats_server.servers) as late:
            for one in (early, late):
                assert [(run.run, run.attempt) for run in one.runs()] == [("r", 1)]


def test_a_request_that_no_bridge_takes_is_refused_at_once(nats_server):
    # One that is waited for in vain is another error.
    with NatsConnection(nats_server.servers) as there, pytest.raises(BrokerError, match="has no bridge that answers"):
        ask(StreamChannel(there), "command", {"run": "r", "command": "stop"})
