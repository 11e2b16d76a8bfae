"""What hosts say of their ranks reaches readers elsewhere, whatever becomes of servers and bridges."""

import asyncio
import contextlib
import json
import os
import random
import threading

import pytest
from helpers import wait_for
from nats.js.errors import NotFoundError
from nats_servers import NatsServer
from run_folders import WrittenRun, write_run

from offloop.bus import Recording, RunNotFoundError, Subscriber
from offloop.bus.errors import RecordingError
from offloop.bus.hosts.watch import watch_host
from offloop.bus.jetstream.bridge import Bridge
from offloop.bus.protocol.host_windows import STEP, HostWindow, summarize
from offloop.bus.recording.host_windows import GrowingWindows, WindowsWriter, windows_path
from offloop.bus.runs.directory import read_run


def window(host, rank, last):
    step = {STEP: summarize(STEP, [rank], [[0.5, 0.25]])}
    return HostWindow(host, 1, (rank,), 2, last - 1, last, last, 0.75, (last,), (), step)


class Host:
    """A host of a run of two, with its bridge in a thread."""

    def __init__(self, root, rank, nats_server, **options):
        self._options = options
        self.name = f"host.{rank}"
        (root / self.name).mkdir()
        self.run = WrittenRun(root / self.name, "wide", world_size=2)
        listed = self.run.path / "run.json"
        said = json.loads(listed.read_text())
        said["id"] = "0123456789abcdef"
        said["attempts"][0] |= {"local_world_size": 1, "publishers": [{"rank": rank}]}
        listed.write_text(json.dumps(said))
        self.run.directory._record = said
        self.rank, self.has_ended = rank, asyncio.Event()
        self.path = windows_path(self.run.writer.path, 1)
        self.windows = WindowsWriter(self.path)
        self.said = []
        self._server = nats_server
        self.start()

    async def _watch(self, attempt, host):
        while not self.has_ended.is_set():
            await asyncio.sleep(0.05)

    def start(self):
        self.bridge = Bridge(
            self.run.path,
            self._server.servers,
            say=self.said.append,
            host=self.name,
            watch=self._watch,
            **self._options,
        )
        self.thread = threading.Thread(target=lambda: asyncio.run(self.bridge.copy()), daemon=True)
        self.thread.start()

    def say(self, *batches):
        for last in batches:
            self.windows.append(window(self.name, self.rank, last))

    def end(self):
        self.run.end()
        self.has_ended.set()
        self.thread.join(30)
        assert not self.thread.is_alive()


def attach(nats_server):
    """A subscriber, as soon as a host has said that there is the run."""

    def there():
        try:
            return Subscriber("wide", stream=nats_server.address)
        except RunNotFoundError:
            return None

    return wait_for(there, "the run in the stream")


def test_a_reader_elsewhere_gets_the_windows_of_all_hosts(tmp_path, nats_server):
    hosts = [Host(tmp_path, rank, nats_server) for rank in (0, 1)]
    for host in hosts:
        host.say(2, 4, 6)
    with attach(nats_server) as reader:
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


def test_a_full_stream_is_paused_also_while_windows_have_room(tmp_path, nats_server):
    host = Host(tmp_path, 0, nats_server, max_bytes=100_000)
    host.run.send("batch_end", {"blob": random.Random(1).randbytes(300_000)})
    host.run.writer.flush()
    wait_for(lambda: host.bridge.status.state == "paused", "the full stream")
    seen, got = set(), []

    def arrived(last):
        seen.add(host.bridge.status.state)
        got.extend(reader.host_windows())
        return [one.last for one in got][-1:] == [last]

    with attach(nats_server) as reader:
        for last in (2, 4, 6):
            host.say(last)
            wait_for(lambda last=last: arrived(last), "the window")
    assert seen == {"paused"}
    nats_server.give_room("ol_wide")
    wait_for(lambda: host.bridge.status.state == "copying", "room")
    host.end()


def test_windows_that_servers_have_forgotten_are_sent_again(tmp_path, nats_server):
    host = Host(tmp_path, 1, nats_server)
    host.say(2)
    wait_for(lambda: host.bridge.status.copied == host.path.stat().st_size, "a copy")
    older = nats_server.copy_store(tmp_path / "older")
    host.say(4, 6)
    wait_for(lambda: host.bridge.status.copied == host.path.stat().st_size, "a copy")
    nats_server.set_back(older)
    host.say(8)
    wait_for(lambda: host.bridge.status.copied == host.path.stat().st_size, "a copy")
    assert host.bridge.status.resent > 0
    assert host.bridge.status.host == "host.1"
    host.end()
    with attach(nats_server) as reader:
        got = []
        wait_for(lambda: got.extend(reader.host_windows()) or got, "the windows")
        assert got == [window("host.1", 1, 8)]


def test_what_a_killed_process_had_begun_to_write_is_cut_off(tmp_path):
    path = tmp_path / "windows-1"
    writer = WindowsWriter(path)
    writer.append(window("h", 0, 2))
    whole = path.read_bytes()
    for torn in range(1, len(whole)):
        path.write_bytes(whole + whole[:torn])
        assert list(GrowingWindows(path).windows()) == [window("h", 0, 2)]
    writer.close()
    again = WindowsWriter(path)
    assert again.last == window("h", 0, 2)
    again.append(window("h", 0, 4))
    assert [one.last for one in GrowingWindows(path).windows()] == [2, 4]


def test_what_a_full_disk_took_of_a_window_is_cut_off_at_once(tmp_path, monkeypatch):
    path = tmp_path / "windows-1"
    writer = WindowsWriter(path)
    writer.append(window("h", 0, 2))
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:20]))
    with pytest.raises(RecordingError, match="there is no room"):
        writer.append(window("h", 0, 4))
    monkeypatch.undo()
    writer.append(window("h", 0, 6))
    assert [one.last for one in GrowingWindows(path).windows()] == [2, 6]


def test_windows_that_cannot_be_written_keep_no_recording_from_being_copied(tmp_path, nats_server, monkeypatch):
    async def fail(self, attempt, host):
        raise ValueError("odd")

    monkeypatch.setattr(Host, "_watch", fail)
    host = Host(tmp_path, 0, nats_server)
    host.run.train([1.0])
    host.end()
    assert host.said == ["no more windows of this host are written: ValueError('odd')"]
    with Subscriber("wide", stream=nats_server.address) as reader:
        assert list(reader) == list(Recording(host.run.writer.path))


def test_one_process_at_a_time_writes_windows(tmp_path):
    path = tmp_path / "windows-1"
    writer = WindowsWriter(path)
    writer.append(window("h", 0, 2))
    with pytest.raises(BlockingIOError):
        WindowsWriter(path)
    writer.append(window("h", 0, 4))
    writer.close()
    writer = WindowsWriter(path)
    writer.append(window("h", 0, 6))
    assert [one.last for one in GrowingWindows(path).windows()] == [2, 4, 6]


def test_windows_are_left_to_the_process_that_writes_them(tmp_path):
    attempt = read_run(write_run(tmp_path, "r")).last
    path = windows_path(attempt.recording, 1)
    with contextlib.closing(WindowsWriter(path)), pytest.raises(BlockingIOError):
        asyncio.run(watch_host(tmp_path / "r", attempt, "h"))


class WritingHost(Host):
    """A host whose bridge writes a window itself, as soon as it may."""

    async def _watch(self, attempt, host):
        with contextlib.closing(WindowsWriter(self.path)) as writer:
            writer.append(window(self.name, self.rank, 6))
            await super()._watch(attempt, host)


def test_a_bridge_writes_windows_when_the_process_that_did_has_ended(tmp_path, nats_server):
    host = WritingHost(tmp_path, 0, nats_server)
    host.say(2, 4)
    with attach(nats_server) as reader:
        got = []
        wait_for(lambda: got.extend(reader.host_windows()) or got, "the other one's windows")
        assert got == [window("host.0", 0, 4)]
        host.windows.close()
        wait_for(lambda: got.extend(reader.host_windows()) or len(got) > 1, "its own")
        assert got[1:] == [window("host.0", 0, 6)]
    host.end()


def test_windows_that_are_others_than_those_in_the_stream_leave_the_recording_alone(tmp_path, nats_server):
    host = Host(tmp_path, 0, nats_server)
    host.run.train([1.0] * 10)
    host.say(2, 4)
    wait_for(lambda: host.bridge.status.copied == host.run.writer.size, "a copy")
    wait_for(lambda: copied_windows(nats_server) == 2, "the windows")
    older = nats_server.copy_store(tmp_path / "older")
    host.run.train([0.5] * 10)
    host.end()
    nats_server.set_back(older)
    host.path.unlink()
    again = WindowsWriter(host.path)
    for last in (3, 6, 9):
        again.append(window("host.0", 0, last))
    again.close()
    host.said.clear()
    host.start()
    host.thread.join(30)
    assert host.bridge.status.state == "done"
    assert len(host.said) == 1
    assert host.said[0].startswith("no more windows of this host are copied: the stream olw_wide and ")
    assert copied_windows(nats_server) == 2
    with Subscriber("wide", stream=nats_server.address) as reader:
        assert list(reader) == list(Recording(host.run.writer.path))


def copied_windows(nats_server):
    with contextlib.suppress(NotFoundError):
        state = nats_server.operate(lambda jetstream: jetstream.stream_info("olw_wide", subjects_filter="ol.w.>")).state
        return sum((state.subjects or {}).values())
    return 0


def test_windows_that_are_longer_than_the_servers_take_leave_the_recording_alone(tmp_path):
    (tmp_path / "nats").mkdir()
    server = NatsServer(tmp_path / "nats", options="max_payload: 16KB\n")
    try:
        host = Host(tmp_path, 0, server)
        host.say(2)
        wait_for(lambda: copied_windows(server) == 1, "the window")
        ranks = tuple(range(3000))
        step = summarize(STEP, ranks, [[0.5]] * len(ranks))
        wide = HostWindow(host.name, 1, ranks, len(ranks), 4, 4, 4, 0.75, ranks, (), {STEP: step})
        host.windows.append(wide)
        wait_for(lambda: host.said, "a line about it")
        host.run.send("batch_end", {"blob": random.Random(1).randbytes(50_000)})
        host.end()
        assert host.bridge.status.state == "done"
        (said,) = host.said
        assert "no more windows of this host are copied: a window in " in said
        assert "and the servers take 12,288: raise their 'max_payload'" in said
        with Subscriber("wide", stream=server.address) as reader:
            assert list(reader) == list(Recording(host.run.writer.path))
    finally:
        server.kill()
