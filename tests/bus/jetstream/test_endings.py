"""A reader of a run that has ended waits until all of it is in the stream."""

import subprocess
import sys

import pytest
from helpers import wait_for

from offloop.bus import Event, Publisher, Recording, Subscriber
from offloop.bus.jetstream.nats_connection import NatsConnection
from offloop.bus.runs.bridged import read_bridge
from offloop.bus.runs.directory import read_run


@pytest.mark.timeout(60)
def test_a_run_has_ended_for_readers_when_all_of_it_is_there(nats_server, runs_dir):
    with Publisher("r", runs_dir=runs_dir) as publisher:
        for _ in range(4):
            publisher.publish(Event.BATCH_END, noise=[1 / (1 + n) for n in range(10_000)])
    half = read_run(runs_dir / "r").last.recording.stat().st_size // 2
    words = (
        "offloop.bus",
        "server",
        "bridge",
        "r",
        "--runs-dir",
        str(runs_dir),
        "--stream",
        nats_server.address,
        "--max-bytes",
        str(half),
    )
    with (
        subprocess.Popen([sys.executable, "-m", *words], stderr=subprocess.DEVNULL) as bridge,
        NatsConnection.shared(nats_server.servers) as there,
    ):
        try:
            wait_for(lambda: (found := read_bridge(runs_dir / "r")) and found.state == "paused", "the full stream")
            (said,) = wait_for(lambda: there.runs(), "the run")
            assert (said.status, said.ended) == ("live", None)
            with Subscriber("r", stream=nats_server.address) as subscriber:
                nats_server.give_room("ol_r")
                assert list(subscriber) == list(Recording(runs_dir / "r"))
                assert str(subscriber.ending) == "finished"
            assert bridge.wait(30) == 0
            wait_for(lambda: there.runs()[0].status == "finished", "the end")
        finally:
            bridge.kill()
