"""What a stream has of a recording, as readers get it."""

import asyncio
import contextlib
import signal
import time

from helpers import wait_for
from nats.js.errors import NotFoundError
from nats_servers import NatsCluster
from run_folders import WrittenRun, write_run

from offloop.bus import Subscriber
from offloop.bus.jetstream import names
from offloop.bus.jetstream.bridge import Bridge
from offloop.bus.jetstream.nats_connection import NatsConnection
from offloop.bus.jetstream.stream_bytes import StreamBytes

MESSAGES = 500
SUBJECT = names.recording_subject("r", 1, "here")


async def make_stream(jetstream):
    await jetstream.add_stream(name="ol_r", subjects=[names.recording_subject("r")])


def sending(parts, begin=0):
    async def send(jetstream):
        offset = begin
        for part in parts:
            await jetstream.publish(SUBJECT, part, headers={names.OFFSET: str(offset)})
            offset += len(part)

    return send


def read(stored, offset, size):
    """So many bytes, as soon as they are there."""
    return wait_for(lambda: len(data := stored.read_at(offset, size)) == size and data, "bytes", 10)


@contextlib.contextmanager
def reading(nats_server):
    with (
        NatsConnection(nats_server.servers) as connection,
        contextlib.closing(StreamBytes(connection, "r", 1)) as stored,
    ):
        yield stored


def test_small_messages_are_read_from_anywhere(nats_server):
    parts = [bytes([number % 251]) * (50 + number % 7) for number in range(MESSAGES)]
    whole = b"".join(parts)
    nats_server.operate(make_stream)
    nats_server.operate(sending(parts))
    with reading(nats_server) as stored:
        assert read(stored, 0, len(whole)) == whole
        assert read(stored, 1000, 100) == whole[1000:1100]
    with reading(nats_server) as stored:
        assert read(stored, 20_000, 5) == whole[20_000:20_005]
        assert read(stored, 1000, 100) == whole[1000:1100]


def test_what_passes_and_is_not_stored_does_not_count(nats_server):
    """A full stream refuses a message that readers have seen: what another one brings later is read."""

    async def pass_by(jetstream):
        await jetstream._nc.publish("ol.r.r.1.here", b"refused", headers={names.OFFSET: "4"})
        await jetstream._nc.flush()

    async def make_full(jetstream):
        await jetstream.add_stream(name="ol_r", subjects=[names.recording_subject("r")], max_msgs=1, discard="new")

    nats_server.operate(make_full)
    nats_server.operate(sending([b"good"]))
    with reading(nats_server) as stored:
        assert read(stored, 0, 4) == b"good"
        nats_server.operate(pass_by)
        time.sleep(0.3)
        assert stored.read_at(0, 100) == b"good"

        async def give_room(jetstream):
            config = (await jetstream.stream_info("ol_r")).config
            await jetstream.update_stream(config.evolve(max_msgs=-1))

        nats_server.operate(give_room)
        nats_server.operate(sending([b" and more"], begin=4))
        assert read(stored, 0, 13) == b"good and more"


def test_the_end_of_a_file_that_another_broker_continues_is_replaced(nats_server):
    nats_server.operate(make_stream)
    nats_server.operate(sending([b"begin", b"footer"]))
    with reading(nats_server) as stored:
        assert read(stored, 0, 11) == b"beginfooter"
        nats_server.operate(sending([b"on", b"ward"], begin=5))
        wait_for(lambda: stored.read_at(0, 100) == b"beginonward", "what took its place", 10)


def test_a_reader_knows_how_far_it_is_behind(nats_server, runs_dir):
    run = WrittenRun(runs_dir, "r")
    for _ in range(10):
        run.train([0.5] * 20)

    async def is_listed(jetstream):
        with contextlib.suppress(NotFoundError):
            return (await jetstream.stream_info("KV_ol_runs")).state.messages > 0
        return False

    async def copy():
        bridge = Bridge(run.path, nats_server.servers)
        copying = asyncio.create_task(bridge.copy())
        while bridge.status.copied < run.writer.size or not await asyncio.to_thread(nats_server.operate, is_listed):
            await asyncio.sleep(0.01)
        copying.cancel()
        await asyncio.gather(copying, return_exceptions=True)

    asyncio.run(copy())
    with Subscriber("r", stream=nats_server.address) as subscriber:
        following = iter(subscriber)
        next(following)
        behind = subscriber.statistics().lag
        assert behind > 0
        for _ in range(199):
            next(following)
        assert (subscriber.statistics().lag, subscriber.statistics().lag_high) == (0, behind)


def test_readers_leave_nothing_in_the_servers(nats_server, runs_dir):
    run = write_run(runs_dir, "r")
    asyncio.run(Bridge(run, nats_server.servers).copy())

    async def consumers(jetstream):
        return [(await jetstream.stream_info(name)).state.consumer_count for name in ("ol_r", "KV_ol_runs")]

    with Subscriber("r", stream=nats_server.address) as subscriber:
        list(subscriber)
        assert nats_server.operate(consumers) == [0, 0]


def test_a_server_that_hangs_is_left_within_seconds(tmp_path):
    """Stopped, not dead: its connections stay open, and nothing comes."""
    cluster = NatsCluster(tmp_path)
    try:
        with NatsConnection(cluster.servers) as connection:
            port = connection.client.connected_url.port
            stopped = next(node for node in cluster.nodes.values() if node.port == port)
            stopped.signal(signal.SIGSTOP)
            began = time.monotonic()
            wait_for(lambda: connection.is_connected and connection.client.connected_url.port != port, "another", 60)
            took = time.monotonic() - began
            stopped.signal(signal.SIGCONT)
        assert took < 15
    finally:
        for node in cluster.nodes.values():
            node.kill()
