"""A run on several hosts: each with its broker, its bridge, and a name of its own."""

import contextlib
import os
import subprocess
import sys
from functools import partial

import pytest
from bridges import Copying, hurry
from click.testing import CliRunner
from helpers import wait_for
from nats_servers import attach

from offloop.bus import Event, Publisher, Recording, RunNotFoundError, Subscriber
from offloop.bus.cli.main import bus
from offloop.bus.hosts.watch import watch_host
from offloop.consumers.cli.main import consumer

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


def run_bus(*arguments):
    return CliRunner().invoke(bus, [str(argument) for argument in arguments])


def test_windows_and_events_of_all_hosts_come_from_there_early_and_late(server, hosts):
    train(hosts, *range(1, 101))
    run, got = hosts[0].run, []
    wanted = {"host": "second.rack", "events": [Event.BATCH_END, Event.AFTER_FORWARD]}
    with attach(server, run) as first, attach(server, run, **wanted) as reader:
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
        windows = []
        wait_for(
            lambda: windows.extend(first.host_windows()) or {one.host for one in windows} == set(HOSTS), "all windows"
        )
        assert list(first) == list(Recording(hosts[0].recording))
    assert {one.rank for one in got} == {2, 3}
    assert got == list(Recording(hosts[1].recording))
    assert {str(reader.ending), str(first.ending)} == {"finished"}
    assert {one.ranks for one in windows} == {(0, 1), (2, 3)}
    assert all(one.late == () and one.world_size == 4 for one in windows)
    for host in hosts:
        host.bridge.wait()
    # The bridge of that host has ended with the run: nobody waits for it.
    with Subscriber(run, stream=server.address, host="second.rack") as late:
        assert list(late) == []
    assert str(late.ending).startswith("lost: no bridge answers on that host")


def test_a_part_of_another_hosts_recording_is_what_it_cuts_out_there(server, hosts, tmp_path):
    train(hosts, *range(1, 301))
    run = hosts[0].run
    for name in HOSTS:
        attach(server, run, host=name).close()
    with pytest.raises(RunNotFoundError):
        Subscriber(run, stream=server.address, host="third")
    place = ("server", "fetch", run, "second.rack", "--stream", server.address)
    part, cut = tmp_path / "part.mcap", tmp_path / "cut.mcap"
    fetched = run_bus(*place, "--start", "100ba", "--until", "110ba", "-o", part)
    assert fetched.exit_code == 0, fetched.output
    run_bus("convert", hosts[1].recording, "--start", "100ba", "--until", "110ba", "-o", cut)
    assert list(Recording(part)) == list(Recording(cut))
    assert {one.timestamp.batch.value for one in Recording(part)} == set(range(100, 111))
    assert run_bus(*place, "-o", part).exit_code == 1, "the file exists"

    def show():
        shown = run_bus("show", run, "--stream", server.address).output
        return dict(line.split(None, 1) for line in shown.splitlines())

    shown = show()
    assert (shown["bridge"], shown["hosts"]) == (f"copying, to {server.address}", "2")
    assert "silent" not in shown
    hosts[1].bridge.stop()
    assert "no bridge answers on that host" in str(run_bus(*place, "-o", tmp_path / "none.mcap").exception)
    shown = wait_for(lambda: (now := show()).get("silent") and now, "the silence")
    assert shown["silent"].startswith("second.rack: ")


def test_a_named_consumer_of_ranks_of_several_hosts_waits_for_them_and_has_one_stream(server, tmp_path):
    (tmp_path / "seen.py").write_text(SEEN)
    path, said = tmp_path / "seen", tmp_path / "said"
    command = [*PYTHON, "offloop.consumers", "--callbacks", f"{tmp_path / 'seen.py'}:Seen", "--name", "both"]
    command += ["--stream", server.address, "--run", "wide", "--wait", "--ranks"]
    hosts = []

    def seen(rank):
        for host in hosts:
            host.poll()
        lines = path.read_text().splitlines() if path.exists() else []
        return [int(seq) for of, seq in map(str.split, lines) if int(of) == rank]

    with contextlib.ExitStack() as stack:

        def begin():
            with said.open("w") as errors:
                process = subprocess.Popen(
                    [*command, "3,1"], stderr=errors, text=True, env={**os.environ, "SEEN": str(path)}
                )
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)
            return process

        hosts.append(stack.enter_context(running(Host(tmp_path, server, "wide", 0))))
        train(hosts, *range(1, 51))
        attach(server, "wide").close()
        refused = CliRunner().invoke(consumer, [*command[3:], "1,4"]).exception
        assert "run 'wide' has no rank 4" in str(refused)
        first = begin()
        wait_for(lambda: "waiting for rank 3 of run wide" in said.read_text(), "what it waits for")
        hosts.append(stack.enter_context(running(Host(tmp_path, server, "wide", 1))))
        train(hosts[1:], *range(1, 51))
        wait_for(lambda: len(seen(1)) == len(seen(3)) == 50, "the history of both ranks")
        first.terminate()
        first.wait(30)
        train(hosts, *range(51, 61))
        second = begin()
        wait_for(lambda: len(seen(1)) == len(seen(3)) == 60, "what both ranks did meanwhile")
        for host in hosts:
            host.close()
        assert second.wait(30) == 0, said.read_text()
    assert seen(1) == seen(3) == list(range(1, 61))
    assert seen(0) == seen(2) == []
