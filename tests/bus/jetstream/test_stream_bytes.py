"""What a stream has of a recording, as readers get it."""

import contextlib
import signal
import time

import pytest
from helpers import wait_for
from nats_servers import NatsServer
from run_folders import write_run

from offloop.bus import Subscriber
from offloop.bus.jetstream import connection, names
from offloop.bus.jetstream.connection import NatsServers
from offloop.bus.jetstream.nats_connection import NatsConnection
from offloop.bus.jetstream.stream_bytes import StreamBytes

SUBJECT = names.recording_subject("r", 1, "here")


def make_stream(nats_server, **limits):
    subjects = [names.recording_subject("r")]
    nats_server.operate(lambda jetstream: jetstream.add_stream(name="ol_r", subjects=subjects, **limits))


def send(nats_server, *parts, begin=0):
    async def publish(jetstream):
        offset = begin
        for part in parts:
            await jetstream.publish(SUBJECT, part, headers={names.OFFSET: str(offset)})
            offset += len(part)

    nats_server.operate(publish)


def read(stored, offset, size):
    """So many bytes, as soon as they are there."""
    return wait_for(lambda: len(data := stored.read_at(offset, size)) == size and data, "bytes")


@contextlib.contextmanager
def reading(nats_server):
    with NatsConnection(nats_server.servers) as there, contextlib.closing(StreamBytes(there, "r", 1)) as stored:
        yield stored


def test_small_messages_are_read_from_anywhere(nats_server):
    parts = [bytes([number % 251]) * (50 + number % 7) for number in range(500)]
    whole = b"".join(parts)
    make_stream(nats_server)
    send(nats_server, *parts)
    with reading(nats_server) as stored:
        assert read(stored, 0, len(whole)) == whole
        assert read(stored, 1000, 100) == whole[1000:1100]
    with reading(nats_server) as stored:
        assert read(stored, 20_000, 5) == whole[20_000:20_005]
        assert read(stored, 1000, 100) == whole[1000:1100]


def test_a_message_that_the_server_does_not_store_does_not_count(nats_server):
    async def pass_by(jetstream):
        await jetstream._nc.publish(SUBJECT, b"refused", headers={names.OFFSET: "4"})
        await jetstream._nc.flush()

    async def give_room(jetstream):
        config = (await jetstream.stream_info("ol_r")).config
        await jetstream.update_stream(config.evolve(max_msgs=-1))

    make_stream(nats_server, max_msgs=1, discard="new")
    send(nats_server, b"good")
    with reading(nats_server) as stored:
        assert read(stored, 0, 4) == b"good"
        nats_server.operate(pass_by)
        time.sleep(0.2)
        assert stored.read_at(0, 100) == b"good"
        nats_server.operate(give_room)
        send(nats_server, b" and more", begin=4)
        assert read(stored, 0, 13) == b"good and more"


def test_readers_leave_nothing_in_the_servers(nats_server, copying, runs_dir):
    copying(write_run(runs_dir, "r")).wait()

    async def consumers(jetstream):
        return [(await jetstream.stream_info(name)).state.consumer_count for name in ("ol_r", "KV_ol_runs")]

    with Subscriber("r", stream=nats_server.address) as subscriber:
        list(subscriber)
        assert nats_server.operate(consumers) == [0, 0]


@pytest.mark.slow
def test_a_server_that_hangs_is_left_for_another(tmp_path, nats_server, monkeypatch):
    """Stopped, not dead: its connections stay open, and nothing comes."""
    monkeypatch.setattr(connection, "_PING_SECONDS", 0.3)
    other = NatsServer(tmp_path)
    try:
        servers = {one.port: one for one in (nats_server, other)}
        with NatsConnection(NatsServers.parse(f"{nats_server.address},{other.address}")) as there:
            port = there.client.connected_url.port
            servers[port].signal(signal.SIGSTOP)
            wait_for(lambda: there.is_connected and there.client.connected_url.port != port, "another")
            servers[port].signal(signal.SIGCONT)
    finally:
        other.kill()
