"""A run on several hosts: each with its broker, its bridge, and a name of its own."""

import contextlib
import json
import os
import subprocess
import sys

import pytest
from helpers import wait_for

from offloop.bus import Event, Publisher, Recording, RunNotFoundError, Subscriber

PYTHON = (sys.executable, "-m")
HOSTS = ("first", "second.rack")
SEEN = """
import os
from offloop.consumers import Callback

class Seen(Callback):
    all_ranks = True

    def batch_end(self, state, logger):
        with open(os.environ["SEEN"], "a") as file:
            file.write(f"{state.rank} {state.seq}\\n")
"""


class Host:
    """A host with two of the four ranks of a run."""

    def __init__(self, root, nats_server, number):
        self.name, self.runs_dir = HOSTS[number], root / f"host-{number}"
        self.ranks = (2 * number, 2 * number + 1)
        common = {"runs_dir": self.runs_dir, "world_size": 4, "local_world_size": 2, "run_id": "0123456789abcdef"}
        first = Publisher("wide", rank=self.ranks[0], attempt=1, **common)
        self.publishers = [first, Publisher("wide", rank=self.ranks[1], attempt=1, broker=first.address, **common)]
        self.bridge = subprocess.Popen(
            [
                *PYTHON,
                "offloop.bus",
                "server",
                "bridge",
                "wide",
                "--runs-dir",
                self.runs_dir,
                "--stream",
                nats_server.address,
            ],
            env={**os.environ, "OFFLOOP_HOST": self.name},
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def recording(self):
        return self.runs_dir / "wide" / "recording-1.mcap"

    def train(self, *batches):
        for batch in batches:
            for rank, publisher in zip(self.ranks, self.publishers, strict=True):
                publisher.publish(Event.BATCH_END, batch=batch, loss=(1000 + rank) / batch, batch_size=4)
        self.poll()

    def poll(self):
        for publisher in self.publishers:
            publisher.poll()

    def is_on_disk(self):
        self.poll()
        done = [publisher.statistics() for publisher in self.publishers]
        return all(one.acknowledged >= one.published for one in done)

    def close(self):
        for publisher in self.publishers:
            publisher.close()


@contextlib.contextmanager
def running(host):
    try:
        yield host
    finally:
        host.close()
        host.bridge.kill()
        host.bridge.communicate()


@pytest.fixture
def hosts(tmp_path, nats_server):
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(running(Host(tmp_path, nats_server, number))) for number in (0, 1)]


def train(hosts, *batches):
    """Trains on all hosts; returns when all of it is on their disks."""
    for host in hosts:
        host.train(*batches)
    wait_for(lambda: all(host.is_on_disk() for host in hosts), "it on disk")


def attach(nats_server, **options):
    """A subscriber, as soon as its host has said that there is the run."""

    def there():
        try:
            return Subscriber("wide", stream=nats_server.address, **options)
        except RunNotFoundError:
            return None

    return wait_for(there, "the run in the stream")


def bus(*arguments):
    return subprocess.run([*PYTHON, "offloop.bus", *map(str, arguments)], capture_output=True, text=True, timeout=60)


def test_every_host_says_how_its_ranks_are_and_the_first_ones_recording_is_copied(nats_server, hosts):
    train(hosts, *range(1, 6))
    with attach(nats_server) as reader, attach(nats_server, host="second.rack"):
        got = []

        def heard():
            for host in hosts:
                host.poll()
            got.extend(reader.host_windows())
            return got

        for host in hosts:
            host.close()
        wait_for(lambda: {one.host for one in heard()} == set(HOSTS), "windows of both hosts")
        assert {one.ranks for one in got} == {(0, 1), (2, 3)}
        assert all(one.late == () and one.last == 5 and one.world_size == 4 for one in got)
        assert got[0].quantities["loss"].greatest == got[0].ranks[-1] + 1000
        assert list(reader) == list(Recording(hosts[0].recording))
    assert hosts[0].bridge.wait(30) == 0


def test_the_events_of_another_host_come_from_there_early_and_late(nats_server, hosts):
    train(hosts, *range(1, 101))
    with attach(nats_server, host="second.rack", events=[Event.BATCH_END, Event.AFTER_FORWARD]) as reader:
        following = iter(reader)
        got = [next(following) for _ in range(200)]
        # What is asked for reaches that host's ranks alone.
        there, here = hosts[1].publishers[0], hosts[0].publishers[0]
        wait_for(lambda: hosts[1].poll() or Event.AFTER_FORWARD in there.requested_events, "the demand")
        assert Event.AFTER_FORWARD not in here.requested_events
        train(hosts, *range(101, 121))
        got += [next(following) for _ in range(40)]
        for host in hosts:
            host.close()
        assert list(following) == []
        assert str(reader.ending) == "finished"
    assert {one.rank for one in got} == {2, 3}
    assert got == list(Recording(hosts[1].recording))


def test_a_part_of_another_hosts_recording_is_what_it_cuts_out_there(nats_server, hosts, tmp_path):
    train(hosts, *range(1, 301))
    attach(nats_server, host="second.rack").close()
    place = ("second.rack", "--stream", nats_server.address)
    part = tmp_path / "part.mcap"
    fetched = bus("server", "fetch", "wide", *place, "--start", "100ba", "--until", "110ba", "-o", part)
    assert fetched.returncode == 0, fetched.stderr
    cut = tmp_path / "cut.mcap"
    bus("convert", hosts[1].recording, "--start", "100ba", "--until", "110ba", "-o", cut)
    assert list(Recording(part)) == list(Recording(cut))
    assert {one.timestamp.batch.value for one in Recording(part)} == set(range(100, 111))
    # Mistakes are one line each.
    for arguments, said in (
        (
            ("wide", "third", "--stream", nats_server.address),
            "of host third",
        ),
        (("wide", *place, "--start", "9999ba", "-o", tmp_path / "none.mcap"), "error: "),
        (("wide", *place, "-o", part), "exists: choose another file"),
    ):
        refused = bus("server", "fetch", *arguments)
        assert refused.returncode != 0
        assert said in refused.stderr
        assert "Traceback" not in refused.stderr
    hosts[1].bridge.kill()
    hosts[1].bridge.wait()
    refused = bus("server", "fetch", "wide", *place, "-o", tmp_path / "none.mcap")
    assert "that host has no bridge that answers" in refused.stderr


def test_a_consumer_of_one_rank_gets_its_events_as_those_of_the_first(nats_server, hosts, tmp_path):
    train(hosts, *range(1, 51))
    attach(nats_server, host="second.rack").close()
    path = tmp_path / "logged.jsonl"
    command = [
        *PYTHON,
        "offloop.consumers",
        "--callbacks",
        "lr,metrics",
        "-l",
        "jsonl",
        "-o",
        f"jsonl.path={path}",
        "--stream",
    ]
    chosen = ["--run", "wide", "--ranks"]
    asking = [*command, nats_server.address, *chosen, "9"]
    refused = subprocess.run(asking, capture_output=True, text=True, timeout=60)
    assert "run 'wide' has no rank 9" in refused.stderr
    consumer = subprocess.Popen([*command, nats_server.address, *chosen, "3"], stderr=subprocess.PIPE, text=True)

    def logged():
        for host in hosts:
            host.poll()
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [row["loss/train/total"] for row in rows if "loss/train/total" in row]

    wait_for(lambda: len(logged()) == 50, "the history of rank 3")
    train(hosts, *range(51, 61))
    wait_for(lambda: len(logged()) == 60, "what rank 3 does now")
    for host in hosts:
        host.close()
    _, said = consumer.communicate(timeout=30)
    assert consumer.returncode == 0, said
    assert logged() == [1003 / batch for batch in range(1, 61)]


def test_a_consumer_that_waits_waits_for_the_hosts_of_its_ranks(nats_server, tmp_path):
    path, said = tmp_path / "logged.jsonl", tmp_path / "said"
    command = [*PYTHON, "offloop.consumers", "--callbacks", "lr,metrics", "-l", "jsonl", "-o", f"jsonl.path={path}"]
    command += ["--stream", nats_server.address, "--run", "wide", "--wait", "--ranks"]
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(running(Host(tmp_path, nats_server, 0)))
        train([first], 1)
        attach(nats_server).close()
        refused = subprocess.run([*command, "1,4"], capture_output=True, text=True, timeout=60)
        assert "run 'wide' has no rank 4" in refused.stderr
        with said.open("w") as errors:
            consumer = subprocess.Popen([*command, "1,3"], stderr=errors)
        stack.callback(consumer.wait, 30)
        stack.callback(consumer.terminate)
        wait_for(lambda: "waiting for rank 3 of run wide" in said.read_text(), "what it waits for")
        second = stack.enter_context(running(Host(tmp_path, nats_server, 1)))
        train([second], 1)

        def is_read():
            first.poll()
            second.poll()
            return path.exists() and '"loss/train/total"' in path.read_text()

        wait_for(is_read, "the events of these ranks")


def test_ranks_of_several_hosts_are_one_stream(nats_server, hosts, tmp_path):
    train(hosts, *range(1, 51))
    attach(nats_server, host="second.rack").close()
    (tmp_path / "seen.py").write_text(SEEN)
    path = tmp_path / "seen"
    command = [*PYTHON, "offloop.consumers", "--callbacks", f"{tmp_path / 'seen.py'}:Seen", "--name", "both"]
    command += ["--stream", nats_server.address, "--run", "wide", "--ranks", "3,1"]

    def seen(rank):
        for host in hosts:
            host.poll()
        lines = path.read_text().splitlines() if path.exists() else []
        return [int(seq) for of, seq in map(str.split, lines) if int(of) == rank]

    def begin():
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "SEEN": str(path)})

    first = begin()
    wait_for(lambda: len(seen(1)) == len(seen(3)) == 50, "the history of both ranks")
    first.terminate()
    _, said = first.communicate(timeout=30)
    assert "detached from run wide: 100 events handled" in said
    train(hosts, *range(51, 61))
    second = begin()
    wait_for(lambda: len(seen(1)) == len(seen(3)) == 60, "what both ranks did meanwhile")
    for host in hosts:
        host.close()
    _, said = second.communicate(timeout=30)
    assert (second.returncode, "consumer both goes on after 100 events" in said) == (0, True), said
    assert seen(1) == seen(3) == list(range(1, 61))
    assert seen(0) == seen(2) == []


def test_show_says_how_the_copies_of_all_hosts_are(nats_server, hosts):
    train(hosts, 1, 2)
    for name in HOSTS:
        attach(nats_server, host=name).close()

    def info():
        return dict(
            line.split(None, 1) for line in bus("show", "wide", "--stream", nats_server.address).stdout.splitlines()
        )

    shown = info()
    assert shown["bridge"] == f"copying, to {nats_server.address}"
    assert shown["hosts"] == "2"
    assert "silent" not in shown
    hosts[1].bridge.kill()
    hosts[1].bridge.wait()
    shown = wait_for(lambda: (now := info()).get("silent") and now, "the silence", timeout=30)
    assert shown["silent"] == "second.rack: no bridge answers there"
    assert shown["bridge"] == f"copying, to {nats_server.address}"


def test_a_host_whose_bridge_has_ended_with_the_run_is_not_waited_for(nats_server, hosts):
    train(hosts, *range(1, 6))
    for host in hosts:
        attach(nats_server, host=host.name).close()
        host.close()
    for host in hosts:
        assert host.bridge.wait(30) == 0
    with Subscriber("wide", stream=nats_server.address, host="second.rack") as reader:
        assert list(reader) == []
    assert str(reader.ending).startswith("lost: that host has no bridge that answers: the run has ended there")


def test_a_host_that_is_not_there_is_named(nats_server, hosts):
    train(hosts, 1)
    attach(nats_server).close()
    with pytest.raises(RunNotFoundError, match="has no run 'wide' of host third"):
        Subscriber("wide", stream=nats_server.address, host="third")
