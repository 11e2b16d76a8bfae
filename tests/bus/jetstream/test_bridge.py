"""A run is copied into JetStream as it is on disk, whatever becomes of servers and bridges."""

import asyncio
import contextlib
import random

import nats
import pytest
from click.testing import CliRunner
from helpers import wait_for
from run_folders import WrittenRun, write_run

from offloop.bus import BrokerError, Event, Publisher, Recording, Subscriber
from offloop.bus.cli.main import bus
from offloop.bus.errors import ConfigurationError, OffloopError, RecordingError, RunDirectoryError, RunNotFoundError
from offloop.bus.jetstream import bridge
from offloop.bus.jetstream.download import download
from offloop.bus.jetstream.file_copy import BridgeReplacedError, FileCopy
from offloop.bus.jetstream.nats_connection import NatsConnection
from offloop.bus.jetstream.stream_bytes import StreamBytes
from offloop.bus.protocol.frames import MAX_FRAME
from offloop.bus.recording.writer import RecordingWriter
from offloop.bus.runs.bridged import read_bridge
from offloop.bus.runs.directory import read_run


def in_stream(nats_server, run, attempt=1):
    """Return the bytes of a recording, as a reader elsewhere gets them."""
    with NatsConnection(nats_server.servers) as connection:
        connection.runs(run)
        with contextlib.closing(StreamBytes(connection, run, attempt)) as stored:
            data = b""

            def is_whole():
                nonlocal data
                more = stored.read_at(len(data), 1 << 20)
                data += more
                return not more and stored.at_end

            wait_for(is_whole, "the whole recording")
            return data


def assert_copied(nats_server, path, *attempts):
    for attempt in attempts or (1,):
        assert in_stream(nats_server, path.name, attempt) == (path / f"recording-{attempt}.mcap").read_bytes()


def fill(run, size=300_000):
    run.send("batch_end", {"loss": 1.0, "blob": random.Random(1).randbytes(size)})
    run.writer.flush()


def test_a_finished_run_with_several_attempts_is_copied_byte_for_byte_once(tmp_path, nats_server, copying):
    path = write_run(tmp_path, "run.1", losses=[0.5] * 300)
    WrittenRun(tmp_path, "run.1").train([0.4] * 5).end("failed", "boom")
    copying(path).wait()
    assert_copied(nats_server, path, 1, 2)
    again = copying(path)
    again.wait()
    assert (again.status.state, again.status.resent) == ("done", 0)


@pytest.mark.slow
def test_the_largest_event_comes_whole(tmp_path, nats_server, copying):
    run = WrittenRun(tmp_path, "large")
    fill(run, MAX_FRAME - 1000)
    path = run.end()
    copying(path).wait()
    assert_copied(nats_server, path)
    with Subscriber("large", stream=nats_server.address) as subscriber:
        assert list(subscriber) == list(Recording(path))
        assert (subscriber.gaps, subscriber.damage) == ((), None)


@pytest.mark.slow
def test_a_bridge_of_a_finished_run_gives_up_when_the_servers_take_nothing(tmp_path, nats_server, copying, monkeypatch):
    monkeypatch.setattr(bridge, "_GIVE_UP_SECONDS", 0.5)
    run = WrittenRun(tmp_path, "r").train([1.0] * 20)
    live = copying(run.path, max_bytes=50_000)
    wait_for(lambda: live.has_all_of(run), "the bridge")
    fill(run)
    wait_for(lambda: live.status.state == "paused", "the full stream")
    path = run.end()
    with pytest.raises(BrokerError, match="stored nothing of run r"):
        live.wait()
    assert (read_bridge(path).state, read_bridge(path).has_all(1)) == ("failed", False)


@pytest.mark.parametrize(("is_connected", "is_replaced"), [(True, False), (False, True)])
def test_a_bridge_ends_at_once_when_its_run_is_removed(tmp_path, nats_server, copying, is_connected, is_replaced):
    if not is_connected:
        nats_server.kill()
    run = WrittenRun(tmp_path, "r").train([1.0] * 20)
    live = copying(run.path)
    wait_for(lambda: live.status.copied if is_connected else live.status.reason, "the bridge")
    run.path.rename(tmp_path / "away")
    if is_replaced:
        write_run(tmp_path, "r")
    with pytest.raises(RunDirectoryError, match="holds another run" if is_replaced else "was removed"):
        live.wait()
    assert not is_replaced or read_bridge(run.path) is None


def test_what_servers_have_forgotten_is_sent_again(tmp_path, nats_server, copying):
    run = WrittenRun(tmp_path, "forgotten").train([1.0] * 20)
    live = copying(run.path)
    wait_for(lambda: live.has_all_of(run), "the bridge")
    before = nats_server.copy_store(tmp_path / "older")
    for _ in range(2):
        run.train([0.5] * 20)
        wait_for(lambda: live.has_all_of(run), "the bridge")
    nats_server.set_back(before)
    run.train([0.25] * 20)
    wait_for(lambda: live.has_all_of(run), "the bridge")
    assert live.status.resent > 0
    assert any("forgotten" in line for line in live.said)
    path = run.end()
    live.wait()
    assert_copied(nats_server, path)


def test_a_second_bridge_takes_over_and_the_first_ends(tmp_path, nats_server, copying):
    run = WrittenRun(tmp_path, "twice").train([1.0] * 20)
    first = copying(run.path)
    wait_for(lambda: first.has_all_of(run), "the bridge")
    second = copying(run.path)
    # Whoever writes first makes the other one end.
    wait_for(lambda: run.train([0.5] * 5) and not (first.thread.is_alive() and second.thread.is_alive()), "the end")
    ended, other = (second, first) if first.thread.is_alive() else (first, second)
    with pytest.raises(BridgeReplacedError):
        ended.wait()
    path = run.end()
    other.wait()
    assert_copied(nats_server, path)


def test_a_full_stream_pauses_the_copy_and_readers_get_the_rest_when_there_is_room(tmp_path, nats_server, copying):
    run = WrittenRun(tmp_path, "full").train([1.0] * 10)
    live = copying(run.path, max_bytes=100_000)
    wait_for(lambda: live.has_all_of(run), "the bridge")
    with Subscriber("full", stream=nats_server.address) as reader, NatsConnection(nats_server.servers) as there:
        following = iter(reader)
        got = [next(following) for _ in range(10)]
        for _ in range(20):
            fill(run, 30_000)
        wait_for(lambda: live.status.state == "paused", "the full stream")
        (said,) = live.said
        assert "'nats stream edit ol_full --max-bytes=-1' lets it grow" in said
        got += [next(following)]
        path = run.train([0.5] * 10).end()
        # It has ended for readers when all of it is there.
        (listed,) = there.runs()
        assert (listed.status, listed.ended, listed.reached.batch >= 10) == ("live", None, True)
        nats_server.give_room("ol_full")
        got += list(following)
        live.wait()
        wait_for(lambda: there.runs()[0].status == "finished", "the end")
        assert there.runs()[0].reached.batch == 20
    assert got == list(Recording(path))
    assert (reader.gaps, reader.damage, str(reader.ending)) == ((), None, "finished")
    assert_copied(nats_server, path)


def test_servers_with_a_full_disk_are_named_with_what_lags_behind(tmp_path, nats_server, copying, monkeypatch):
    run = WrittenRun(tmp_path, "r").train([1.0] * 10)
    live = copying(run.path)
    wait_for(lambda: live.has_all_of(run), "the bridge")

    async def publish(*_):
        await asyncio.sleep(0.1)
        raise nats.errors.TimeoutError

    monkeypatch.setattr(FileCopy, "_publish", publish)
    run.train([0.5] * 10)
    wait_for(lambda: live.status.state == "paused" and live.status.lag > 0, "the full disk")
    assert "one of their disks is full" in live.status.reason
    monkeypatch.undo()
    wait_for(lambda: live.status.state == "copying" and live.has_all_of(run), "room")
    run.end()
    live.wait()
    assert len(live.said) == 1


def test_one_run_name_on_two_hosts_is_refused_to_the_second_run(tmp_path, nats_server, copying):
    first = write_run(tmp_path / "one", "name")
    copying(first, host="first").wait()
    with pytest.raises(BrokerError, match="'--run-name'"):
        copying(write_run(tmp_path / "two", "name"), host="second").wait()
    assert_copied(nats_server, first)
    assert read_bridge(tmp_path / "two" / "name").state == "failed"


def test_a_malformed_message_of_another_host_is_passed_over(tmp_path, nats_server, copying):
    run = WrittenRun(tmp_path, "r").train([1.0] * 10)
    first = copying(run.path, host="here")
    wait_for(lambda: first.has_all_of(run), "the bridge")
    first.stop()
    headers = {"Ol-Offset": "5", "Ol-Final": "there"}
    nats_server.operate(lambda jetstream: jetstream.publish("ol.r.r.1.here", b"bad", headers=headers))
    path = run.train([0.5] * 10).end()
    copying(path, host="here").wait()
    assert_copied(nats_server, path)


def test_a_resumed_attempt_takes_the_place_of_its_end(tmp_path, nats_server, copying):
    """A footer was copied, and another broker continued the file in its place."""
    path = write_run(tmp_path, "resumed", status="lost")
    copying(path).wait()
    closed = (path / "recording-1.mcap").read_bytes()
    RecordingWriter(path / "recording-1.mcap", "resumed", 1, read_run(path).id, resume=True).close()
    assert not (path / "recording-1.mcap").read_bytes().startswith(closed)
    copying(path).wait()
    assert_copied(nats_server, path)


def test_an_attempt_without_a_recording_is_named_and_the_others_are_copied(tmp_path, nats_server, copying):
    path = write_run(tmp_path, "partly", losses=[0.5] * 10)
    WrittenRun(tmp_path, "partly").train([0.4] * 5).end()
    (path / "recording-1.mcap").unlink()
    copy = copying(path)
    copy.wait()
    assert_copied(nats_server, path, 2)
    assert [line.startswith("attempt 1 of run partly") for line in copy.said] == [True]


def test_attempts_that_begin_while_another_one_is_copied_are_copied(tmp_path, nats_server, copying):
    run = WrittenRun(tmp_path, "r")
    fill(run)
    path = run.end()
    copy = copying(path, max_bytes=100_000)
    wait_for(lambda: copy.status.state == "paused", "the full stream")
    for _ in range(2):
        WrittenRun(tmp_path, "r").train([0.5] * 5).end()
    nats_server.give_room("ol_r")
    copy.wait()
    assert_copied(nats_server, path, 1, 2, 3)


def lose_power(run):
    """Cuts off half of a recording, as if its host's disk had zeros instead; returns the whole."""
    recording, half = run.path / "recording-1.mcap", run.writer.size // 2
    whole = recording.read_bytes()
    run.abandon()
    recording.write_bytes(whole[:half] + bytes(100_000))
    return whole


@pytest.mark.slow
def test_after_a_power_failure_the_longer_copy_is_kept_and_the_next_attempt_is_copied(tmp_path, nats_server, copying):
    run = WrittenRun(tmp_path, "r")
    first = copying(run.path)
    for _ in range(3):
        run.train([1.0] * 500)
        wait_for(lambda: first.has_all_of(run), "the bridge")
    first.stop()
    whole = lose_power(run)
    path = WrittenRun(tmp_path, "r").train([0.5] * 5).end()
    second = copying(path)
    second.wait()
    assert_copied(nats_server, path, 2)
    assert in_stream(nats_server, "r", 1) == whole
    assert ["the copy is kept as it is" in line for line in second.said] == [True]


@pytest.mark.slow
def test_an_attempt_that_differs_from_its_copy_is_named_at_the_end_and_the_others_are_copied(
    tmp_path, nats_server, copying
):
    run = WrittenRun(tmp_path, "r").train([1.0] * 500)
    first = copying(run.path)
    wait_for(lambda: first.has_all_of(run), "the bridge")
    recording, damaged = run.path / "recording-1.mcap", run.writer.size // 4
    run.train([1.0] * 2000)
    wait_for(lambda: first.has_all_of(run), "the bridge")
    first.stop()
    whole = lose_power(run)
    content = bytearray(recording.read_bytes())
    content[damaged] ^= 1
    recording.write_bytes(content)
    path = WrittenRun(tmp_path, "r").train([0.5] * 5).end()
    second = copying(path)
    with pytest.raises(RecordingError, match="differ from byte 0 on"):
        second.wait()
    assert_copied(nats_server, path, 2)
    assert in_stream(nats_server, "r", 1) == whole
    assert second.said[0].startswith("attempt 1 of run r")
    assert second.status.state == "failed"


def test_more_replicas_than_servers_are_refused(tmp_path, nats_server, copying):
    with pytest.raises(BrokerError, match="replicas > 1 not supported"):
        copying(write_run(tmp_path, "many"), replicas=3).wait()


def publish(publisher, copy, count, **fields):
    """Publish batches, of which every 60 are a message of the stream."""
    for number in range(count):
        publisher.publish(Event.BATCH_END, batch=number + 1, **{name: make() for name, make in fields.items()})
        if number % 60 == 59:
            wait_for(lambda: publisher.poll() or publisher.recorded_all, "everything on disk")
            wait_for(lambda: copy.status.copied == publisher.recording.stat().st_size, "the bridge")


def test_what_a_stream_let_expire_or_lost_is_named_and_reading_continues(tmp_path, nats_server, copying, runs_dir):
    noise = random.Random(1)
    with Publisher("r", runs_dir=runs_dir) as publisher:
        copy = copying(runs_dir / "r")
        wait_for(lambda: publisher.poll() or copy.status.copied, "the bridge")
        nats_server.operate(keep_the_newest)
        publish(publisher, copy, 300, noise=lambda: noise.randbytes(2000))
        nats_server.operate(delete_one_of_those)
        with Subscriber("r", stream=nats_server.address) as early:
            following = iter(early)
            got = [next(following)]
            publisher.close()
            got += list(following)
    copy.wait()
    with Subscriber("r", stream=nats_server.address) as late:
        rest = list(late)
        download(nats_server.address, "r", 1, tmp_path / "r.mcap")
    everything = {snapshot.seq for snapshot in Recording(runs_dir / "r")}
    for subscriber, given in ((early, got), (late, rest)):
        assert str(subscriber.ending) == "finished"
        named = {number for gap in subscriber.gaps for number in range(gap.first, gap.last + 1)}
        assert named == everything - {snapshot.seq for snapshot in given}
        assert (subscriber.gaps[0].first, len(subscriber.gaps)) == (1, 2)
        assert subscriber.damage.count(f"'offloop server remove r --stream {nats_server.address}'") == 2
    put_together = Recording(tmp_path / "r.mcap")
    assert list(put_together) == rest
    assert put_together.gaps == late.gaps


async def keep_the_newest(jetstream):
    config = (await jetstream.stream_info("ol_r")).config
    await jetstream.update_stream(config.evolve(discard=nats.js.api.DiscardPolicy.OLD, max_bytes=450_000))


async def delete_one_of_those(jetstream):
    state = (await jetstream.stream_info("ol_r")).state
    assert 1 < state.first_seq < state.last_seq - 1
    await jetstream.delete_msg("ol_r", state.last_seq - 1)


def test_an_emptied_or_removed_stream_is_named_and_copied_again(tmp_path, nats_server, copying):
    path = write_run(tmp_path, "r", losses=[0.5] * 300)
    copying(path).wait()
    for emptying in (nats.js.JetStreamContext.purge_stream, nats.js.JetStreamContext.delete_stream):
        nats_server.operate(lambda jetstream, empty=emptying: empty(jetstream, "ol_r"))
        with Subscriber("r", stream=nats_server.address) as subscriber:
            assert list(subscriber) == []
            assert "'offloop server bridge r'" in subscriber.damage
            with pytest.raises(OffloopError, match="'offloop server remove"):
                download(nats_server.address, "r", 1, tmp_path / "r.mcap")
    copying(path).wait()
    assert_copied(nats_server, path)


def test_a_run_is_removed_from_the_servers_when_no_bridge_copies_it(tmp_path, nats_server, copying):
    def remove(name):
        return CliRunner().invoke(bus, ["server", "remove", name, "--stream", nats_server.address])

    other = write_run(tmp_path, "other")
    copying(other).wait()
    run = WrittenRun(tmp_path, "r").train([1.0] * 10)
    live = copying(run.path)
    wait_for(lambda: live.has_all_of(run), "the bridge")
    assert isinstance((refused := remove("r")).exception, ConfigurationError), refused.output
    run.end()
    live.wait()
    assert remove("r").exit_code == 0
    assert isinstance(remove("r").exception, RunNotFoundError)
    with pytest.raises(RunNotFoundError):
        Subscriber("r", stream=nats_server.address)
    assert_copied(nats_server, other)
