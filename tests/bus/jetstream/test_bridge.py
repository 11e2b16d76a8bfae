"""A run is copied into JetStream as it is on disk, whatever becomes of servers and bridges."""

import asyncio
import contextlib
import threading
import time

import pytest
from helpers import wait_for
from nats_servers import NatsServer
from run_folders import WrittenRun, write_run

from bus.errors import RecordingError
from bus.jetstream.bridge import Bridge, BridgeReplacedError
from bus.jetstream.gateway import Gateway
from bus.recording.writer import RecordingWriter
from bus.runs.directory import read_run
from bus.subscriber.source import RemoteRun
from bus.types.timeouts import Timeouts


@pytest.fixture
def server(tmp_path):
    folder = tmp_path / "nats"
    folder.mkdir()
    made = NatsServer(folder)
    yield made
    made.kill()


class Copying:
    """A bridge in a thread."""

    def __init__(self, path, server, **options):
        self.said, self.error = [], None
        self.bridge = Bridge(path, server.servers, say=self.said.append, **options)
        self._runner = asyncio.Runner()
        self._loop = self._runner.get_loop()
        self._task = self._loop.create_task(self.bridge.copy())
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self):
        async def wait():
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

        try:
            with self._runner:
                self._runner.run(wait())
        except Exception as error:  # noqa: BLE001  shown by wait()
            self.error = error

    @property
    def status(self):
        return self.bridge.status

    def wait(self):
        self.thread.join(60)
        assert not self.thread.is_alive()
        if self.error is not None:
            raise self.error

    def stop(self):
        if self.thread.is_alive():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._task.cancel)
        self.thread.join(60)


@pytest.fixture
def copying(server):
    made = []

    def begin(path, **options):
        made.append(Copying(path, server, **options))
        return made[-1]

    yield begin
    for one in made:
        one.stop()


def in_stream(server, run, attempt=1):
    """The bytes of a recording, as a reader elsewhere gets them."""
    with Gateway(server.servers) as gateway:
        remote = RemoteRun(gateway.address, run, timeouts=Timeouts(answer=20.0))
        remote._file._which = {"run": run, "attempt": attempt}
        try:
            data, give_up = b"", time.monotonic() + 30
            while time.monotonic() < give_up:
                data += (more := remote._file.read_at(len(data), 1 << 20))
                if not more and not remote.pending:
                    return data
                if not more:
                    remote.wait(0.01)
        finally:
            remote.close()
    raise AssertionError("it does not come")


def test_a_finished_run_with_several_attempts_is_copied_byte_for_byte(tmp_path, server, copying):
    path = write_run(tmp_path, "run.1", losses=[0.5] * 300)
    WrittenRun(tmp_path, "run.1").train([0.4] * 5).end("failed", "boom")
    copying(path).wait()
    for attempt in (1, 2):
        assert in_stream(server, "run.1", attempt) == (path / f"recording-{attempt}.mcap").read_bytes()
    # Again: there is nothing to do.
    again = copying(path)
    again.wait()
    assert (again.status.state, again.status.refilled) == ("done", 0)


def test_what_is_larger_than_a_message_comes_whole(tmp_path, server, copying):
    import random

    run = WrittenRun(tmp_path, "large")
    run.send("batch_end", {"loss": 1.0, "blob": random.Random(1).randbytes(3 << 20)})
    run.writer.flush()
    path = run.end()
    copying(path).wait()
    assert in_stream(server, "large") == (path / "recording-1.mcap").read_bytes()


def test_a_live_run_is_followed_and_lags_behind_by_nothing(tmp_path, server, copying):
    run = WrittenRun(tmp_path, "live").train([1.0] * 10)
    live = copying(run.path)
    wait_for(lambda: live.status.copied == run.writer.size, "the bridge")
    run.train([0.5] * 10)
    wait_for(lambda: live.status.copied == run.writer.size and live.status.lag_events == 0, "the bridge")
    path = run.end()
    live.wait()
    assert in_stream(server, "live") == (path / "recording-1.mcap").read_bytes()


def test_servers_that_are_killed_are_waited_for_and_get_what_they_lack(tmp_path, server, copying):
    run = WrittenRun(tmp_path, "killed")
    live = copying(run.path)
    for _ in range(4):
        run.train([1.0] * 20)
        wait_for(lambda: live.status.copied == run.writer.size, "the bridge")
        server.kill()
        run.train([0.5] * 20)
        wait_for(lambda: live.status.state == "waiting", "the bridge")
        assert live.status.lag_events > 0
        server.start()
    path = run.end()
    live.wait()
    assert in_stream(server, "killed") == (path / "recording-1.mcap").read_bytes()


def test_what_servers_have_forgotten_is_sent_again(tmp_path, server, copying):
    run = WrittenRun(tmp_path, "forgotten").train([1.0] * 20)
    live = copying(run.path)
    wait_for(lambda: live.status.copied == run.writer.size, "the bridge")
    before = server.copy_store(tmp_path / "older")
    for _ in range(5):
        run.train([0.5] * 20)
        wait_for(lambda: live.status.copied == run.writer.size, "the bridge")
    server.set_back(before)
    run.train([0.25] * 20)
    wait_for(lambda: live.status.copied == run.writer.size, "the bridge")
    assert live.status.refilled > 0
    assert any("forgotten" in line for line in live.said)
    path = run.end()
    live.wait()
    assert in_stream(server, "forgotten") == (path / "recording-1.mcap").read_bytes()


def test_a_second_bridge_takes_over_and_the_first_ends(tmp_path, server, copying):
    run = WrittenRun(tmp_path, "twice").train([1.0] * 20)
    first = copying(run.path)
    wait_for(lambda: first.status.copied == run.writer.size, "the bridge")
    second = copying(run.path)
    # Whoever writes first makes the other one end.
    for _ in range(200):
        run.train([0.5] * 5)
        if not (first.thread.is_alive() and second.thread.is_alive()):
            break
        time.sleep(0.05)
    ended, other = (second, first) if first.thread.is_alive() else (first, second)
    with pytest.raises(BridgeReplacedError, match="another bridge"):
        ended.wait()
    path = run.end()
    other.wait()
    assert in_stream(server, "twice") == (path / "recording-1.mcap").read_bytes()


def test_a_full_stream_pauses_the_copy_and_room_lets_it_go_on(tmp_path, server, copying):
    import random

    run = WrittenRun(tmp_path, "full")
    live = copying(run.path, max_bytes=100_000)
    run.send("batch_end", {"loss": 1.0, "blob": random.Random(1).randbytes(300_000)})
    run.writer.flush()
    wait_for(lambda: live.status.state == "paused", "the bridge")
    assert live.status.copied < run.writer.size
    assert any("takes no more" in line for line in live.said)
    _make_room(server, "ol_full")
    wait_for(lambda: live.status.copied == run.writer.size, "the bridge")
    path = run.end()
    live.wait()
    assert in_stream(server, "full") == (path / "recording-1.mcap").read_bytes()


def _make_room(server, stream):
    import nats

    async def change():
        client = await nats.connect(server.address)
        jetstream = client.jetstream()
        config = (await jetstream.stream_info(stream)).config
        config.max_bytes = -1
        await jetstream.update_stream(config)
        await client.close()

    asyncio.run(change())


def test_a_stream_of_another_run_of_that_name_is_left_alone(tmp_path, server, copying):
    copying(write_run(tmp_path / "one", "name")).wait()
    other = copying(write_run(tmp_path / "two", "name"))
    with pytest.raises(RecordingError, match="another run"):
        other.wait()


def test_a_resumed_attempt_takes_the_place_of_its_end(tmp_path, server, copying):
    """A footer was copied, and another broker continued the file in its place."""
    path = write_run(tmp_path, "resumed", status="lost")
    copying(path).wait()
    closed = (path / "recording-1.mcap").read_bytes()
    assert in_stream(server, "resumed") == closed
    RecordingWriter.resume(path / "recording-1.mcap", "resumed", 1, read_run(path).id).close()
    continued = (path / "recording-1.mcap").read_bytes()
    assert not continued.startswith(closed)
    copying(path).wait()
    assert in_stream(server, "resumed") == continued
