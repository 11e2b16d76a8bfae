"""A run is copied into JetStream as it is on disk, whatever becomes of servers and bridges."""

import asyncio
import contextlib
import itertools
import random
import re
import signal
import subprocess
import sys
import threading
import time

import nats
import pytest
from click.testing import CliRunner
from helpers import wait_for
from run_folders import WrittenRun, write_run

from offloop.bus import BrokerError, Event, Publisher, Recording, Subscriber
from offloop.bus.cli.main import bus
from offloop.bus.errors import ConfigurationError, OffloopError, RecordingError, RunDirectoryError, RunNotFoundError
from offloop.bus.jetstream import bridge, known
from offloop.bus.jetstream.bridge import Bridge
from offloop.bus.jetstream.download import download
from offloop.bus.jetstream.file_copy import BridgeReplacedError, FileCopy
from offloop.bus.jetstream.nats_connection import NatsConnection
from offloop.bus.jetstream.stream_bytes import StreamBytes
from offloop.bus.protocol.frames import MAX_FRAME
from offloop.bus.recording.writer import RecordingWriter
from offloop.bus.runs.bridged import read_bridge
from offloop.bus.runs.directory import read_run


class Copying:
    """A bridge in a thread."""

    def __init__(self, path, nats_server, **options):
        self.said, self.error = [], None
        self.bridge = Bridge(path, nats_server.servers, say=self.said.append, **options)
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
def copying(nats_server):
    made = []

    def begin(path, **options):
        made.append(Copying(path, nats_server, **options))
        return made[-1]

    yield begin
    for one in made:
        one.stop()


def in_stream(nats_server, run, attempt=1):
    """The bytes of a recording, as a reader elsewhere gets them."""
    with NatsConnection(nats_server.servers) as connection:
        connection.runs(run)
        with contextlib.closing(StreamBytes(connection, run, attempt)) as stored:
            data, give_up = b"", time.monotonic() + 30
            while time.monotonic() < give_up:
                more = stored.read_at(len(data), 1 << 20)
                data += more
                if not more and stored.at_end:
                    return data
                if not more:
                    stored.wait(0.01)
    raise AssertionError("it does not come")


def test_a_finished_run_with_several_attempts_is_copied_byte_for_byte(tmp_path, nats_server, copying):
    path = write_run(tmp_path, "run.1", losses=[0.5] * 300)
    WrittenRun(tmp_path, "run.1").train([0.4] * 5).end("failed", "boom")
    copying(path).wait()
    for attempt in (1, 2):
        assert in_stream(nats_server, "run.1", attempt) == (path / f"recording-{attempt}.mcap").read_bytes()
    # Again: there is nothing to do.
    again = copying(path)
    again.wait()
    assert (again.status.state, again.status.resent) == ("done", 0)


def test_the_largest_event_comes_whole(tmp_path, nats_server, copying):
    run = WrittenRun(tmp_path, "large")
    run.send("batch_end", {"loss": 1.0, "blob": random.Random(1).randbytes(MAX_FRAME - 1000)})
    run.writer.flush()
    path = run.end()
    copying(path).wait()
    assert in_stream(nats_server, "large") == (path / "recording-1.mcap").read_bytes()
    with Subscriber("large", stream=nats_server.address) as subscriber:
        assert list(subscriber) == list(Recording(path))
        assert (subscriber.gaps, subscriber.damage) == ((), None)


def test_a_live_run_is_followed_and_lags_behind_by_nothing(tmp_path, nats_server, copying):
    run = WrittenRun(tmp_path, "live").train([1.0] * 10)
    live = copying(run.path)
    wait_for(lambda: live.status.copied == run.writer.size, "the bridge")
    run.train([0.5] * 10)
    wait_for(lambda: live.status.copied == run.writer.size and live.status.lag_events == 0, "the bridge")
    path = run.end()
    live.wait()
    assert in_stream(nats_server, "live") == (path / "recording-1.mcap").read_bytes()


def test_readers_elsewhere_see_how_far_a_live_run_is(tmp_path, nats_server, copying):
    run = WrittenRun(tmp_path, "live").train([1.0] * 10)
    copying(run.path)
    with NatsConnection(nats_server.servers) as connection:

        def batch():
            return [one.reached.batch for one in connection.runs("live") if one.reached]

        (first,) = wait_for(batch, "the progress")
        run.train([0.5] * 10)
        wait_for(lambda: batch() == [first + 10], "more of it")


def test_servers_that_are_killed_are_waited_for_and_get_what_they_lack(tmp_path, nats_server, copying):
    run = WrittenRun(tmp_path, "killed")
    live = copying(run.path)
    for _ in range(4):
        run.train([1.0] * 20)
        wait_for(lambda: live.status.copied == run.writer.size, "the bridge")
        nats_server.kill()
        run.train([0.5] * 20)
        wait_for(lambda: live.status.state == "waiting" and live.status.lag_events > 0, "the bridge")
        nats_server.start()
    path = run.end()
    live.wait()
    assert in_stream(nats_server, "killed") == (path / "recording-1.mcap").read_bytes()


@pytest.fixture
def impatient(monkeypatch):
    """Bridges give up at once."""
    monkeypatch.setattr(bridge, "_GIVE_UP_SECONDS", 0.5)
    monkeypatch.setattr(bridge, "_TELL_SECONDS", 0.05)


@pytest.mark.parametrize("trouble", ["never there", "killed", "stopped", "full"])
def test_a_bridge_of_a_run_that_has_ended_gives_up_when_the_servers_take_nothing(
    tmp_path, nats_server, copying, impatient, trouble
):
    run = WrittenRun(tmp_path, "r").train([1.0] * 20)
    if trouble == "never there":
        nats_server.kill()
        live = copying(run.path)
        wait_for(lambda: live.status.reason == "no server answers", "the bridge")
    else:
        live = copying(run.path, max_bytes=50_000)
        wait_for(lambda: live.status.copied == run.writer.size, "the bridge")
        if trouble == "full":
            run.send("batch_end", {"loss": 1.0, "blob": random.Random(1).randbytes(300_000)})
            run.writer.flush()
            wait_for(lambda: live.status.state == "paused", "the full stream")
        else:
            nats_server.kill() if trouble == "killed" else nats_server.signal(signal.SIGSTOP)
            run.train([0.5] * 20)
            wait_for(lambda: live.status.state == "waiting", "the bridge")
    path = run.end()
    with pytest.raises(BrokerError, match=r"took no more of run r for .* minutes after it had ended \(.+\): start"):
        live.wait()
    said = read_bridge(path)
    assert (said.state, said.has_all(1)) == ("failed", False)
    nats_server.signal(signal.SIGCONT) if trouble == "stopped" else None


def test_a_bridge_of_a_live_run_never_gives_up(tmp_path, nats_server, copying, impatient, monkeypatch):
    nats_server.kill()
    run = WrittenRun(tmp_path, "late").train([1.0] * 20)
    looks = []
    monkeypatch.setattr(bridge, "_GIVE_UP_SECONDS", -1.0)
    monkeypatch.setattr(Bridge, "_check_use", lambda self, check=Bridge._check_use: (check(self), looks.append(1)))
    live = copying(run.path)
    wait_for(lambda: len(looks) > 3 and live.status.reason == "no server answers", "the bridge")
    nats_server.start()
    wait_for(lambda: live.status.copied == run.writer.size, "the bridge")
    monkeypatch.setattr(bridge, "_GIVE_UP_SECONDS", 60.0)
    path = run.end()
    live.wait()
    assert read_bridge(path).has_all(1)
    assert in_stream(nats_server, "late") == (path / "recording-1.mcap").read_bytes()


@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.parametrize(("comes", "message"), [(False, "was removed"), (True, "holds another run by now")])
def test_a_bridge_ends_at_once_when_its_run_is_removed(
    tmp_path, nats_server, copying, impatient, is_there, comes, message
):
    if not is_there:
        nats_server.kill()
    run = WrittenRun(tmp_path, "r").train([1.0] * 20)
    live = copying(run.path)
    wait_for(lambda: live.status.copied if is_there else live.status.reason, "the bridge")
    run.path.rename(tmp_path / "away")
    if comes:
        write_run(tmp_path, "r")
    with pytest.raises(RunDirectoryError, match=message):
        live.wait()
    if comes:
        assert read_bridge(run.path) is None


def test_what_servers_have_forgotten_is_sent_again(tmp_path, nats_server, copying):
    run = WrittenRun(tmp_path, "forgotten").train([1.0] * 20)
    live = copying(run.path)
    wait_for(lambda: live.status.copied == run.writer.size, "the bridge")
    before = nats_server.copy_store(tmp_path / "older")
    for _ in range(5):
        run.train([0.5] * 20)
        wait_for(lambda: live.status.copied == run.writer.size, "the bridge")
    nats_server.set_back(before)
    run.train([0.25] * 20)
    wait_for(lambda: live.status.copied == run.writer.size, "the bridge")
    assert live.status.resent > 0
    assert any("forgotten" in line for line in live.said)
    path = run.end()
    live.wait()
    assert in_stream(nats_server, "forgotten") == (path / "recording-1.mcap").read_bytes()


def test_a_second_bridge_takes_over_and_the_first_ends(tmp_path, nats_server, copying):
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
    assert in_stream(nats_server, "twice") == (path / "recording-1.mcap").read_bytes()


def test_a_full_stream_pauses_the_copy_and_room_lets_it_go_on(tmp_path, nats_server, copying):
    run = WrittenRun(tmp_path, "full")
    live = copying(run.path, max_bytes=100_000)
    run.send("batch_end", {"loss": 1.0, "blob": random.Random(1).randbytes(300_000)})
    run.writer.flush()
    wait_for(lambda: live.status.state == "paused", "the bridge")
    assert live.status.copied < run.writer.size
    (said,) = live.said
    assert "takes no more (maximum bytes exceeded): waiting for room; 'nats stream edit ol_full --max-bytes=-1'" in said
    nats_server.give_room("ol_full")
    wait_for(lambda: live.status.copied == run.writer.size, "the bridge")
    path = run.end()
    live.wait()
    assert in_stream(nats_server, "full") == (path / "recording-1.mcap").read_bytes()


def test_a_reader_that_is_attached_to_a_run_whose_stream_is_full_gets_all_of_it(tmp_path, nats_server, copying):
    run = WrittenRun(tmp_path, "full").train([1.0] * 10)
    live = copying(run.path, max_bytes=100_000)
    wait_for(lambda: live.status.copied == run.writer.size, "the bridge")
    with Subscriber("full", stream=nats_server.address) as reader:
        following = iter(reader)
        got = [next(following) for _ in range(10)]
        for _ in range(20):
            run.send("batch_end", {"blob": random.Random(1).randbytes(30_000)})
            run.writer.flush()
        wait_for(lambda: live.status.state == "paused", "the full stream")
        got += [next(following)]
        run.train([0.5] * 10)
        nats_server.give_room("ol_full")
        path = run.end()
        got += list(following)
    live.wait()
    assert got == list(Recording(path / "recording-1.mcap"))
    assert (reader.gaps, reader.damage) == ((), None)


def test_servers_that_answer_and_store_nothing_are_named_with_what_lags_behind(
    tmp_path, nats_server, copying, monkeypatch
):
    """As one does whose disk is full."""
    run = WrittenRun(tmp_path, "r").train([1.0] * 10)
    live = copying(run.path)
    wait_for(lambda: live.status.copied == run.writer.size, "the bridge")

    async def publish(*_):
        await asyncio.sleep(0.1)
        raise nats.errors.TimeoutError

    monkeypatch.setattr(FileCopy, "_publish", publish)
    run.train([0.5] * 10)
    wait_for(lambda: (live.status.state, live.status.lag_events) == ("paused", 10), "the full disk")
    assert "a disk of theirs is full" in live.status.reason
    monkeypatch.undo()
    wait_for(lambda: (live.status.state, live.status.copied) == ("copying", run.writer.size), "room")
    run.end()
    live.wait()
    (said,) = live.said
    assert said.startswith("run r: the servers answer and store nothing")


def test_one_run_name_on_two_hosts_is_refused_to_the_second_run(tmp_path, nats_server, copying):
    copying(write_run(tmp_path / "one", "name"), host="first").wait()
    other = copying(write_run(tmp_path / "two", "name"), host="second")
    with pytest.raises(
        BrokerError,
        match=r"ol_name holds another run that is called 'name': give this one another name \('--run-name'\)",
    ):
        other.wait()
    assert in_stream(nats_server, "name") == (tmp_path / "one" / "name" / "recording-1.mcap").read_bytes()
    assert read_bridge(tmp_path / "two" / "name").state == "failed"


@pytest.mark.parametrize(
    "headers", [{}, {"Ol-Offset": "here"}, {"Ol-Offset": "5", "Ol-Final": "there"}, {"Ol-Offset": "-5"}], ids=str
)
def test_a_malformed_message_of_another_host_is_passed_over(tmp_path, nats_server, copying, headers):
    run = WrittenRun(tmp_path, "r").train([1.0] * 10)
    first = copying(run.path, host="here")
    wait_for(lambda: first.status.copied == run.writer.size, "the bridge")
    first.stop()
    nats_server.operate(lambda jetstream: jetstream.publish("ol.r.r.1.here", b"bad", headers=headers or None))
    run.train([0.5] * 10)
    second = copying(run.path, host="here")
    wait_for(lambda: second.status.copied == run.writer.size, "the next bridge")
    path = run.end()
    second.wait()
    assert in_stream(nats_server, "r") == (path / "recording-1.mcap").read_bytes()


def test_a_resumed_attempt_takes_the_place_of_its_end(tmp_path, nats_server, copying):
    """A footer was copied, and another broker continued the file in its place."""
    path = write_run(tmp_path, "resumed", status="lost")
    copying(path).wait()
    closed = (path / "recording-1.mcap").read_bytes()
    assert in_stream(nats_server, "resumed") == closed
    RecordingWriter(path / "recording-1.mcap", "resumed", 1, read_run(path).id, resume=True).close()
    continued = (path / "recording-1.mcap").read_bytes()
    assert not continued.startswith(closed)
    copying(path).wait()
    assert in_stream(nats_server, "resumed") == continued


def test_an_attempt_without_a_recording_is_named_and_the_others_are_copied(tmp_path, nats_server, copying):
    path = write_run(tmp_path, "partly", losses=[0.5] * 10)
    WrittenRun(tmp_path, "partly").train([0.4] * 5).end()
    (path / "recording-1.mcap").unlink()
    copy = copying(path)
    copy.wait()
    assert in_stream(nats_server, "partly", 2) == (path / "recording-2.mcap").read_bytes()
    assert copy.said == ["attempt 1 of run partly has no recording any more: not copied"]


def test_the_newest_attempt_without_a_recording_is_treated_as_any_other(tmp_path, nats_server, copying):
    path = write_run(tmp_path, "partly", losses=[0.5] * 10)
    WrittenRun(tmp_path, "partly").train([0.4] * 5).end()
    (path / "recording-2.mcap").unlink()
    copy = copying(path)
    copy.wait()
    assert in_stream(nats_server, "partly", 1) == (path / "recording-1.mcap").read_bytes()
    assert copy.said == ["attempt 2 of run partly has no recording any more: not copied"]


@pytest.mark.parametrize(("before", "meanwhile"), [(2, 1), (1, 2)])
def test_attempts_that_begin_while_another_one_is_copied_leave_none_out(
    tmp_path, nats_server, copying, before, meanwhile
):
    noise = random.Random(1)
    for _ in range(before):
        run = WrittenRun(tmp_path, "r")
        run.send("batch_end", {"loss": 1.0, "blob": noise.randbytes(300_000)})
        path = run.end()
    copy = copying(path, max_bytes=100_000)
    wait_for(lambda: copy.status.state == "paused", "the full stream")
    assert copy.status.attempt == 1
    for _ in range(meanwhile):
        WrittenRun(tmp_path, "r").train([0.5] * 5).end()
    nats_server.give_room("ol_r")
    copy.wait()
    assert copied_attempts(nats_server) == {1, 2, 3}
    for attempt in (1, 2, 3):
        assert in_stream(nats_server, "r", attempt) == (path / f"recording-{attempt}.mcap").read_bytes()


def lose_power(run, tail):
    """The bytes of a recording before its host's power failure, of which the disk has some and perhaps zeros."""
    before, run_size = run.path / "recording-1.mcap", run.writer.size
    whole = before.read_bytes()
    run.abandon()
    before.write_bytes(whole[: run_size // 2] + bytes(tail))
    return whole


@pytest.mark.parametrize("tail", [0, 100_000], ids=["cut", "zeros"])
@pytest.mark.parametrize("messages", [1, 3])
def test_after_a_power_failure_the_longer_copy_is_kept_and_the_next_attempt_is_copied(
    tmp_path, nats_server, copying, messages, tail
):
    run = WrittenRun(tmp_path, "r")
    first = copying(run.path)
    for _ in range(messages):
        run.train([1.0] * 500)
        wait_for(lambda: first.status.copied == run.writer.size, "the bridge")
    first.stop()
    whole = lose_power(run, tail)
    path = WrittenRun(tmp_path, "r").train([0.5] * 5).end()
    second = copying(path)
    second.wait()
    assert in_stream(nats_server, "r", 2) == (path / "recording-2.mcap").read_bytes()
    assert in_stream(nats_server, "r", 1) == whole
    assert len(second.said) == 1
    assert re.fullmatch(
        r".*recording-1.mcap ends [\d,]+ bytes before its copy in the stream ol_r: the copy is kept as it is",
        second.said[0],
    )


@pytest.mark.parametrize("damaged", ["in the last message", "in the first one, and the last one is lost"])
def test_an_attempt_that_differs_from_its_copy_is_named_at_the_end_and_the_others_are_copied(
    tmp_path, nats_server, copying, damaged
):
    run = WrittenRun(tmp_path, "r").train([1.0] * 500)
    first = copying(run.path)
    wait_for(lambda: first.status.copied == run.writer.size, "the bridge")
    begin = run.writer.size // 4
    if "lost" in damaged:
        run.train([1.0] * 2000)
        wait_for(lambda: first.status.copied == run.writer.size, "the bridge")
    first.stop()
    whole = (
        lose_power(run, 0) if "lost" in damaged else (run.abandon(), (run.path / "recording-1.mcap").read_bytes())[1]
    )
    recording = run.path / "recording-1.mcap"
    damage = bytearray(recording.read_bytes())
    damage[begin] ^= 1
    recording.write_bytes(damage)
    path = WrittenRun(tmp_path, "r").train([0.5] * 5).end()
    second = copying(path)
    with pytest.raises(RecordingError, match=r"recording-1.mcap differ from byte 0 on"):
        second.wait()
    assert in_stream(nats_server, "r", 2) == (path / "recording-2.mcap").read_bytes()
    assert in_stream(nats_server, "r", 1) == whole
    assert second.said[0].startswith("attempt 1 of run r is not copied any further: the stream ol_r and ")
    assert second.status.state == "failed"


def copied_attempts(nats_server):
    """Of which attempts of run ``r`` something is in the stream."""
    subjects = nats_server.operate(lambda jetstream: jetstream.stream_info("ol_r", subjects_filter=">")).state.subjects
    return {int(subject.split(".")[3]) for subject in subjects}


def test_more_replicas_than_servers_are_refused_in_a_line(tmp_path, nats_server, copying):
    with pytest.raises(BrokerError, match="does not make the stream ol_many: replicas > 1 not supported"):
        copying(write_run(tmp_path, "many"), replicas=3).wait()


def test_what_a_stream_lacks_or_let_expire_comes_from_the_host_or_is_named(tmp_path, nats_server, runs_dir):
    noise = random.Random(1)
    with (
        Publisher("r", runs_dir=runs_dir) as publisher,
        contextlib.closing(LiveCopy(runs_dir / "r", nats_server)) as copy,
    ):
        wait_for(lambda: publisher.poll() or copy.has_all, "the bridge")
        nats_server.operate(keep_the_newest)
        for number in range(300):
            publisher.publish(Event.BATCH_END, batch=number, noise=noise.randbytes(2000))
            if number % 60 == 59:
                wait_for(lambda: publisher.poll() or publisher.recorded_all, "everything on disk")
                wait_for(lambda: copy.has_all, "the bridge")
        nats_server.operate(delete_one_of_those)
        with Subscriber("r", stream=nats_server.address) as early:
            following = iter(early)
            got = [next(following) for _ in range(300)]
            publisher.close()
            got += list(following)
    assert got == list(Recording(runs_dir / "r"))
    assert (early.gaps, early.damage) == ((), None)
    copy.finish()
    with Subscriber("r", stream=nats_server.address) as late:
        rest = list(late)
        download(nats_server.address, "r", 1, tmp_path / "r.mcap")
    assert str(late.ending) == "finished"
    missing = {snapshot.seq for snapshot in got} - {snapshot.seq for snapshot in rest}
    assert missing
    assert missing == {number for gap in late.gaps for number in range(gap.first, gap.last + 1)}
    assert [gap.first for gap in late.gaps][:1] == [1]
    assert len(late.gaps) == 2
    assert "lacks bytes 0 to " in late.damage
    assert (
        late.damage.count(
            f"'offloop server remove r --stream {nats_server.address}', then 'offloop server bridge r' on its host, "
            "copies all of it again"
        )
        == 2
    )
    put_together = Recording(tmp_path / "r.mcap")
    assert list(put_together) == rest
    assert put_together.gaps == late.gaps


def test_a_hole_of_a_run_whose_host_stays_silent_is_named_and_reading_continues(
    tmp_path, nats_server, runs_dir, monkeypatch
):
    monkeypatch.setattr(known, "PATIENCE", 1.0)
    with Publisher("r", runs_dir=runs_dir) as publisher:
        with contextlib.closing(LiveCopy(runs_dir / "r", nats_server)) as copy:
            for number in range(300):
                publisher.publish(Event.BATCH_END, batch=number)
                if number % 60 == 59:
                    wait_for(lambda: publisher.poll() or publisher.recorded_all, "everything on disk")
                    wait_for(lambda: copy.has_all, "the bridge")
            copy.process.kill()
            copy.process.wait()
        nats_server.operate(delete_the_last_but_one)
        with Subscriber("r", stream=nats_server.address) as subscriber:
            following = iter(subscriber)
            got = list(itertools.takewhile(lambda snapshot: snapshot.seq < 300, following))
            download(nats_server.address, "r", 1, tmp_path / "r.mcap")
            with contextlib.closing(LiveCopy(runs_dir / "r", nats_server)) as copy:
                publisher.publish(Event.FIT_END)
                publisher.close()
                got += list(following)
                copy.finish()
    assert got[-1].event == Event.FIT_END
    (gap,) = subscriber.gaps
    assert [snapshot.seq for snapshot in got] == [*range(1, gap.first), *range(gap.last + 1, 300), 301]
    assert (
        f"'offloop server remove r --stream {nats_server.address}', then 'offloop server bridge r' on its host, copies "
        "all of it again" in subscriber.damage
    )
    put_together = Recording(tmp_path / "r.mcap")
    assert [snapshot.seq for snapshot in put_together] == [snapshot.seq for snapshot in got if snapshot.seq < 300] + [
        300
    ]
    assert put_together.gaps == subscriber.gaps


async def delete_the_last_but_one(jetstream):
    await jetstream.delete_msg("ol_r", (await jetstream.stream_info("ol_r")).state.last_seq - 1)


async def keep_the_newest(jetstream):
    config = (await jetstream.stream_info("ol_r")).config
    await jetstream.update_stream(config.evolve(discard=nats.js.api.DiscardPolicy.OLD, max_bytes=450_000))


async def delete_one_of_those(jetstream):
    state = (await jetstream.stream_info("ol_r")).state
    assert 1 < state.first_seq < state.last_seq - 1
    await delete_the_last_but_one(jetstream)


EMPTYING = {
    "emptied": lambda jetstream: jetstream.purge_stream("ol_r"),
    "removed": lambda jetstream: jetstream.delete_stream("ol_r"),
}


@pytest.mark.parametrize("emptying", EMPTYING.values(), ids=EMPTYING)
def test_of_a_stream_that_was_emptied_all_is_named_and_the_way_back_leads_there(
    tmp_path, nats_server, copying, emptying
):
    path = write_run(tmp_path, "r", losses=[0.5] * 300)
    copying(path).wait()
    nats_server.operate(emptying)
    with Subscriber("r", stream=nats_server.address) as subscriber:
        assert list(subscriber) == []
        assert re.search(
            r"lacks bytes 0 to \d.*'offloop server remove r --stream nats://\S+', then 'offloop server bridge r' on",
            subscriber.damage,
        )
        with pytest.raises(
            OffloopError, match="cannot be had from byte 0 on: the stream ol_r has lost them; 'offloop server remove"
        ):
            download(nats_server.address, "r", 1, tmp_path / "r.mcap")
    with contextlib.suppress(nats.js.errors.NotFoundError):
        nats_server.operate(lambda jetstream: jetstream.delete_stream("ol_r"))
    copying(path).wait()
    assert in_stream(nats_server, "r") == (path / "recording-1.mcap").read_bytes()


def test_a_run_is_removed_from_the_servers_when_no_bridge_copies_it(tmp_path, nats_server, copying):
    def remove(name):
        return CliRunner().invoke(bus, ["server", "remove", name, "--stream", nats_server.address])

    copying(write_run(tmp_path, "other")).wait()
    run = WrittenRun(tmp_path, "r").train([1.0] * 10)
    live = copying(run.path)
    wait_for(lambda: live.status.copied == run.writer.size, "the bridge")
    assert isinstance((refused := remove("r")).exception, ConfigurationError), refused.output
    run.end()
    live.wait()
    assert remove("r").exit_code == 0
    assert isinstance(remove("r").exception, RunNotFoundError)
    with pytest.raises(RunNotFoundError):
        Subscriber("r", stream=nats_server.address)
    assert in_stream(nats_server, "other") == (tmp_path / "other" / "recording-1.mcap").read_bytes()


class LiveCopy:
    """The command ``offloop server bridge`` in a process of its own."""

    def __init__(self, path, nats_server):
        command = [sys.executable, "-m", "offloop.bus", "server", "bridge", str(path), "--stream", nats_server.address]
        self._path, self._server = path, nats_server
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    @property
    def has_all(self):
        with contextlib.suppress(nats.js.errors.NotFoundError):
            last = self._server.operate(lambda jetstream: jetstream.get_last_msg("ol_r", "ol.r.>"))
            size = (self._path / "recording-1.mcap").stat().st_size
            return int(last.headers["Ol-Offset"]) + len(last.data) == size

    def finish(self):
        assert self.process.wait(30) == 0

    def close(self):
        if sys.exc_info()[0] is not None:
            self.process.kill()
            self.process.wait()
