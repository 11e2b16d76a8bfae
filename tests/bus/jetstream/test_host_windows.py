"""The windows of all hosts reach readers elsewhere, whatever becomes of servers and bridges."""

import asyncio
import contextlib
import json
import os
import random

import msgspec
import pytest
from helpers import wait_for
from nats_servers import NatsServer, attach
from run_folders import WrittenRun, write_run

from offloop.bus import Recording, Subscriber
from offloop.bus.cli.describe import describe_start, lines
from offloop.bus.errors import RecordingError
from offloop.bus.hosts.watch import watch_host
from offloop.bus.jetstream.nats_connection import NatsConnection
from offloop.bus.protocol.host_windows import STEP, HostWindow, summarize
from offloop.bus.recording.host_windows import GrowingWindows, WindowsWriter, windows_path
from offloop.bus.runs.directory import read_run


def window(host, rank, last):
    step = {STEP: summarize(STEP, [rank], [[0.5, 0.25]])}
    return HostWindow(host, 1, (rank,), 2, last - 1, last, last, 0.75, (last,), (), step)


class Host:
    """A host of a run of two, with its bridge."""

    def __init__(self, root, rank, copying, servers=None, **options):
        self.name, self.rank, self.has_ended = f"host.{rank}", rank, asyncio.Event()
        (root / self.name).mkdir()
        self.run = WrittenRun(root / self.name, "wide", world_size=2)
        listed = self.run.path / "run.json"
        record = {**json.loads(listed.read_text()), "id": "0123456789abcdef"}
        record["attempts"][0] |= {"local_world_size": 1, "publishers": [{"rank": rank}]}
        listed.write_text(json.dumps(record))
        self.run.directory._record = record
        self.path = windows_path(self.run.writer.path, 1)
        self.windows = WindowsWriter(self.path)
        self.bridge = copying(self.run.path, servers, host=self.name, watch=self.watch, **options)

    async def watch(self, attempt, host):
        while not self.has_ended.is_set():
            await asyncio.sleep(0.05)

    def say(self, *batches):
        for last in batches:
            self.windows.append(window(self.name, self.rank, last))

    def end(self):
        self.run.end()
        self.has_ended.set()
        self.bridge.wait()


def lasts(path):
    return [one.last for one in GrowingWindows(path).windows()]


def test_a_reader_elsewhere_gets_the_windows_of_all_hosts(tmp_path, nats_server, copying):
    hosts = [Host(tmp_path, rank, copying) for rank in (0, 1)]
    for host in hosts:
        host.say(2, 4, 6)
    with attach(nats_server, "wide") as reader:
        got = []

        def until(last):
            got.extend(reader.host_windows())
            return {one.host for one in got if one.last == last} == {"host.0", "host.1"}

        wait_for(lambda: until(6), "the last of each host")
        for host in hosts:
            host.say(8, 10)
        wait_for(lambda: until(10), "what follows")
        mine = [one for one in got if one.host == "host.1"]
        assert mine[-3:] == [window("host.1", 1, last) for last in (6, 8, 10)]
        assert reader.host_windows() == []
    # The first one's recording alone is copied.
    with Subscriber("wide", runs_dir=tmp_path / "host.1") as here:
        assert here.host_windows() == [window("host.1", 1, last) for last in (2, 4, 6, 8, 10)]
        hosts[1].say(12)
        assert here.host_windows() == [window("host.1", 1, 12)]
    for host in hosts:
        host.end()


def test_a_silent_host_is_named(tmp_path, nats_server, copying):
    hosts = [Host(tmp_path, rank, copying) for rank in (0, 1)]
    with NatsConnection(nats_server.servers) as there:

        def shown():
            there.runs("wide")
            of_the_run = describe_start(read_run(hosts[0].run.path))
            return dict(lines(of_the_run | {"hosts": msgspec.to_builtins(there.hosts("wide"))}))

        wait_for(lambda: "silent" not in (now := shown()) and now.get("hosts") == "2", "both hosts")
        hosts[1].bridge.stop()
        assert wait_for(lambda: shown().get("silent"), "the silence").startswith("host.1: ")


def test_a_window_that_was_written_in_part_is_cut_off(tmp_path, monkeypatch):
    path = tmp_path / "windows-1"
    writer = WindowsWriter(path)
    writer.append(window("h", 0, 2))
    whole = path.read_bytes()
    for torn in range(1, len(whole)):
        path.write_bytes(whole + whole[:torn])
        assert lasts(path) == [2]
    writer.close()
    again = WindowsWriter(path)
    assert again.last == window("h", 0, 2)
    again.append(window("h", 0, 4))
    assert lasts(path) == [2, 4]
    # On a full disk at once.
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:20]))
    with pytest.raises(RecordingError, match="there is no room"):
        again.append(window("h", 0, 6))
    monkeypatch.undo()
    again.append(window("h", 0, 8))
    assert lasts(path) == [2, 4, 8]


def test_one_process_at_a_time_writes_windows(tmp_path):
    attempt = read_run(write_run(tmp_path, "r")).last
    path = windows_path(attempt.recording, 1)
    writer = WindowsWriter(path)
    writer.append(window("h", 0, 2))
    with pytest.raises(BlockingIOError):
        WindowsWriter(path)
    with pytest.raises(BlockingIOError):
        asyncio.run(watch_host(tmp_path / "r", attempt, "h"))
    writer.append(window("h", 0, 4))
    writer.close()
    writer = WindowsWriter(path)
    writer.append(window("h", 0, 6))
    assert lasts(path) == [2, 4, 6]


class FailingHost(Host):
    async def watch(self, attempt, host):
        raise ValueError("odd")


def test_a_recording_is_copied_although_windows_cannot_be_written(tmp_path, nats_server, copying):
    host = FailingHost(tmp_path, 0, copying)
    host.run.train([1.0])
    host.end()
    assert ["ValueError('odd')" in line for line in host.bridge.said] == [True]
    with Subscriber("wide", stream=nats_server.address) as reader:
        assert list(reader) == list(Recording(host.run.writer.path))


class WritingHost(Host):
    """A host whose bridge writes a window itself, as soon as it may."""

    async def watch(self, attempt, host):
        with contextlib.closing(WindowsWriter(self.path)) as writer:
            writer.append(window(self.name, self.rank, 6))
            await super().watch(attempt, host)


def test_a_bridge_writes_windows_when_the_process_that_did_has_ended(tmp_path, nats_server, copying):
    host = WritingHost(tmp_path, 0, copying)
    host.say(4)
    with attach(nats_server, "wide") as reader:
        got = []
        wait_for(lambda: got.extend(reader.host_windows()) or got, "the other one's windows")
        assert got == [window("host.0", 0, 4)]
        host.windows.close()
        wait_for(lambda: got.extend(reader.host_windows()) or len(got) > 1, "its own")
        assert got[1:] == [window("host.0", 0, 6)]
    host.end()


def test_a_recording_is_copied_although_windows_are_longer_than_the_servers_take(tmp_path, copying):
    server = NatsServer(tmp_path, options="max_payload: 16KB\n")
    try:
        host = Host(tmp_path, 0, copying, server.servers)
        ranks = tuple(range(3000))
        step = {STEP: summarize(STEP, ranks, [[0.5]] * len(ranks))}
        host.windows.append(HostWindow(host.name, 1, ranks, len(ranks), 4, 4, 4, 0.75, ranks, (), step))
        wait_for(lambda: host.bridge.said, "a line about it")
        host.run.send("batch_end", {"blob": random.Random(1).randbytes(50_000)})
        host.end()
        assert ["raise their 'max_payload'" in line for line in host.bridge.said] == [True]
        with Subscriber("wide", stream=server.address) as reader:
            assert list(reader) == list(Recording(host.run.writer.path))
    finally:
        server.kill()
