"""What one host writes of its flight recorder, all hosts of the run write."""

import contextlib
import os
import subprocess
import sys

from helpers import wait_for

from offloop.bus import Publisher, Recording
from offloop.bus.protocol.flight_ring import FlightRing
from offloop.bus.protocol.frames import Topic, event_encoder, pack_map
from offloop.bus.runs.bridged import read_bridge
from offloop.bus.runs.directory import read_run
from offloop.bus.runs.flight import list_dumps
from offloop.bus.subscriber.commands import send_command
from offloop.bus.types.timestamp import TrainingTime

RUN_ID = "1" * 16
"""Of the run, as its hosts agree on it."""


@contextlib.contextmanager
def host(name, runs, nats_server):
    """A rank with a flight recorder on a host of that name, its broker and its bridge; gives the run's directory."""
    ring = FlightRing(5, 1 << 20)
    with contextlib.closing(ring), Publisher("r", runs_dir=runs, attempt=1, run_id=RUN_ID, flight=ring) as publisher:
        publisher.publish("batch_end", batch=1, loss=0.5)
        encode = event_encoder(Topic("r", "batch_end", 0), 1)
        ring.put(encode(2, 2, 1, TrainingTime(batch=1), None, {"loss": 0.5}, pack_map({"world_size": 1})))
        command = [
            sys.executable,
            "-m",
            "offloop.bus",
            "server",
            "bridge",
            str(runs / "r"),
            "--stream",
            str(nats_server.servers),
        ]
        with subprocess.Popen(command, env={**os.environ, "OFFLOOP_HOST": name}) as bridge:
            try:
                wait_for(lambda: (said := read_bridge(runs / "r")) and said.attempt, "the bridge")
                yield runs / "r"
                publisher.close()
                assert bridge.wait(30) == 0
            finally:
                bridge.kill()


def test_each_dump_of_one_host_is_one_of_all_with_the_reason_and_whose_it_is(tmp_path, nats_server):
    with host("one", tmp_path / "1", nats_server) as first, host("two", tmp_path / "2", nats_server) as second:
        send_command(read_run(first), "dump", reason="look at it")
        send_command(read_run(first), "dump", reason="and again")
        wait_for(lambda: len(list_dumps(second)) == 2, "the dumps of the other host")
    # They do not go back and forth.
    own, others = list_dumps(first), list_dumps(second)
    assert [Recording(one).flight for one in own] == [("asked", "look at it"), ("asked", "and again")]
    assert [Recording(one).flight[1] for one in others] == ["on host one: look at it", "on host one: and again"]
    assert [one.fields["loss"] for one in Recording(others[0])] == [0.5]
