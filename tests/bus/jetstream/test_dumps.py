import contextlib

from helpers import wait_for

from offloop.bus import Publisher, Recording
from offloop.bus.protocol.flight_ring import FlightRing
from offloop.bus.protocol.frames import Topic, event_encoder, pack_map
from offloop.bus.runs.directory import read_run
from offloop.bus.runs.flight import list_dumps
from offloop.bus.subscriber.commands import send_command
from offloop.bus.types.timestamp import TrainingTime


@contextlib.contextmanager
def host(name, runs, copying):
    """Give the directory of a run with a flight recorder, a broker and a bridge on a host of that name."""
    ring = FlightRing(5, 1 << 20)
    agreed = {"attempt": 1, "run_id": "1" * 16}
    with contextlib.closing(ring), Publisher("r", runs_dir=runs, flight=ring, **agreed) as publisher:
        publisher.publish("batch_end", batch=1, loss=0.5)
        encode = event_encoder(Topic("r", "batch_end", 0), 1)
        ring.put(encode(2, 2, 1, TrainingTime(batch=1), None, {"loss": 0.5}, pack_map({"world_size": 1})))
        bridge = copying(runs / "r", host=name)
        wait_for(lambda: bridge.status.attempt, "the bridge")
        yield runs / "r"
    bridge.wait()


def test_each_dump_of_one_host_is_one_of_all_with_the_reason_and_whose_it_is(tmp_path, copying):
    with host("one", tmp_path / "1", copying) as first, host("two", tmp_path / "2", copying) as second:
        send_command(read_run(first), "dump", reason="look at it")
        send_command(read_run(first), "dump", reason="and again")
        wait_for(lambda: len(list_dumps(second)) == 2, "the dumps of the other host")
    # They do not go back and forth.
    own, others = list_dumps(first), list_dumps(second)
    assert [Recording(one).flight for one in own] == [("asked", "look at it"), ("asked", "and again")]
    assert [Recording(one).flight[1] for one in others] == ["on host one: look at it", "on host one: and again"]
    assert [one.fields["loss"] for one in Recording(others[0])] == [0.5]
