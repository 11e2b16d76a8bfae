"""Readers elsewhere know which runs are live by what they hear, whatever clocks say."""

import asyncio
import contextlib
import json
import threading
import time

import nats
import pytest
from click.testing import CliRunner
from helpers import wait_for

from offloop.bus import BrokerError, Subscriber
from offloop.bus.cli.main import bus
from offloop.bus.jetstream.channel import StreamChannel
from offloop.bus.jetstream.nats_connection import NatsConnection
from offloop.bus.net.channels import ask


@contextlib.contextmanager
def saying(nats_server, clock=0.0, **said):
    """A bridge that says something of a run four times a second, by a clock of its own."""
    ended = threading.Event()

    async def say():
        client = await nats.connect(nats_server.address)
        with contextlib.suppress(nats.js.errors.BadRequestError):
            await client.jetstream().create_key_value(bucket="ol_runs")
        bucket = await client.jetstream().key_value("ol_runs")
        while not ended.is_set():
            now = time.time() + clock
            entry = {"run": "r", "attempt": 1, "status": "live", "live": True, "bridge": {"time": now}, **said}
            await bucket.put("r.1.h", json.dumps(entry).encode())
            await asyncio.sleep(0.25)
        await client.close()

    thread = threading.Thread(target=asyncio.run, args=(say(),))
    thread.start()
    yield
    ended.set()
    thread.join()


def state(there):
    return next((run.live for run in there.runs()), None)


@pytest.mark.parametrize("clock", [-3600, 3600])
def test_a_run_is_live_while_its_bridge_is_heard_whatever_its_clock_says(nats_server, clock):
    with NatsConnection(nats_server.servers) as early:
        with saying(nats_server, clock):
            wait_for(lambda: state(early), "the run to be live")
            with NatsConnection(nats_server.servers) as late:
                assert state(late)
                nats_server.kill()
                nats_server.start()
                wait_for(lambda: state(late), "the run to be live again")
        with NatsConnection(nats_server.servers) as afterwards:
            assert state(afterwards) is False
        wait_for(lambda: state(early) is False, "the run not to be live")


def test_a_host_that_died_in_an_attempt_before_keeps_no_reader_waiting(nats_server):
    async def put(jetstream):
        bucket = await jetstream.create_key_value(bucket="ol_runs")
        for attempt, host, status in ((1, "gone", "live"), (2, "h", "finished")):
            entry = {"run": "r", "attempt": attempt, "host": host, "ranks": [0], "status": status, "live": False}
            await bucket.put(f"r.{attempt}.{host}", json.dumps(entry).encode())

    nats_server.operate(put)
    with Subscriber("r", stream=nats_server.address) as subscriber:
        assert list(subscriber) == []
    assert str(subscriber.ending) == "lost: the stream ol_r has no recording of that attempt"


ODD = {"run": "odd", "attempt": 1, "status": "failed", "started": 2.0}


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("odd.1.h", {**ODD, "started": "yesterday"}),
        ("odd.1.h", {**ODD, "started": 1e300}),
        ("odd.1.h", {**ODD, "reached": {"epoch": 1, "batch": 1 << 70, "sample": 1}}),
        ("odd.1.h", {**ODD, "error": "\ud800"}),
        ("odd.1.h", {**ODD, "run": ["odd"]}),
        ("odd.1.h", {"run": "odd", "attempt": 1}),
        ("odd.1.h", [ODD]),
        ("odd.1.h", {"run": "r", "attempt": 9, "status": "live", "live": True}),
    ],
)
def test_an_entry_that_makes_no_sense_hides_no_other_run(nats_server, key, said):
    with saying(nats_server, started=1.0), NatsConnection(nats_server.servers) as there:
        wait_for(lambda: state(there), "the run to be live")

        async def put(jetstream):
            await (await jetstream.key_value("ol_runs")).put(key, json.dumps(said).encode())

        nats_server.operate(put)
        with NatsConnection(nats_server.servers) as late:
            for one in (there, late):
                assert [(run.run, run.attempt) for run in one.runs()] == [("r", 1)]


def test_what_no_bridge_takes_is_refused_by_its_request(nats_server):
    begin = time.monotonic()
    with (
        NatsConnection(nats_server.servers) as there,
        pytest.raises(BrokerError, match="has no bridge that answers"),
    ):
        ask(StreamChannel(there), "command", {"run": "r", "command": "stop"})
    assert time.monotonic() - begin < 4, "it waited for an answer"


def test_runs_of_which_little_is_said_are_listed(nats_server):
    async def put(jetstream):
        bucket = await jetstream.create_key_value(bucket="ol_runs")
        await bucket.put("r.1.h", json.dumps({"run": "r", "attempt": 1, "status": "failed"}).encode())
        await bucket.put("s.1.h", json.dumps({"run": "s", "attempt": 1, "status": "live", "live": True}).encode())

    nats_server.operate(put)
    for options in ([], ["--json"]):
        done = CliRunner().invoke(bus, ["runs", "--stream", nats_server.address, *options], catch_exceptions=False)
        assert done.exit_code == 0
        assert "failed" in done.output
