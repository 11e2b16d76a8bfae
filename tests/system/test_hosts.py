"""A run on several hosts: each with its broker, its bridge, and a name of its own."""

import contextlib
from functools import partial

import pytest
from bridges import Copying, hurry
from click.testing import CliRunner
from helpers import wait_for

from offloop.bus import Event, Publisher
from offloop.bus.cli.main import bus
from offloop.bus.hosts.watch import watch_host

HOSTS = ("first", "second.rack")


class Host:
    """A host with two of the four ranks of a run."""

    def __init__(self, root, server, run, number):
        self.name, self.run, self.runs_dir = HOSTS[number], run, root / f"host-{number}"
        self.ranks = (2 * number, 2 * number + 1)
        common = {"runs_dir": self.runs_dir, "world_size": 4, "local_world_size": 2, "run_id": "0123456789abcdef"}
        first = Publisher(run, rank=self.ranks[0], attempt=1, **common)
        self.publishers = [first, Publisher(run, rank=self.ranks[1], attempt=1, broker=first.address, **common)]
        path = self.runs_dir / run
        self.bridge = Copying(path, server.servers, host=self.name, watch=partial(watch_host, path))

    @property
    def recording(self):
        return self.runs_dir / self.run / "recording-1.mcap"

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
        for publisher in reversed(self.publishers):
            publisher.close()


@contextlib.contextmanager
def running(host):
    try:
        yield host
    finally:
        host.close()
        host.bridge.stop()


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    hurry(monkeypatch)


@pytest.fixture
def hosts(tmp_path, server, request):
    with contextlib.ExitStack() as stack:
        run = f"wide-{len(request.node.name)}"
        yield [stack.enter_context(running(Host(tmp_path, server, run, number))) for number in (0, 1)]


def train(hosts, *batches):
    """Trains on all hosts; returns when all of it is on their disks."""
    for host in hosts:
        host.train(*batches)
    wait_for(lambda: all(host.is_on_disk() for host in hosts), "it on disk")


def test_a_silent_host_is_named(server, hosts):
    train(hosts, *range(1, 11))

    def show():
        shown = CliRunner().invoke(bus, ["show", hosts[0].run, "--stream", server.address]).output
        return dict(line.split(None, 1) for line in shown.splitlines())

    shown = wait_for(lambda: (now := show())["bridge"] == f"copying, to {server.address}" and now, "all is copied")
    assert shown["hosts"] == "2"
    assert "silent" not in shown
    hosts[1].bridge.stop()
    shown = wait_for(lambda: (now := show()).get("silent") and now, "the silence")
    assert shown["silent"].startswith("second.rack: ")
