"""What a stream has of a recording, as readers get it."""

import asyncio
import gc

import nats
from helpers import wait_for
from run_folders import write_run

from offloop.bus import Recording, Subscriber
from offloop.bus.jetstream import answering, names
from offloop.bus.jetstream.bridge import Bridge
from offloop.bus.jetstream.copied import CopiedRecording, CopiedRun

MESSAGES = 500


def test_the_many_small_messages_of_a_run_that_was_copied_live_are_few_ranges(nats_server):
    parts = [bytes([number % 251]) * (50 + number % 7) for number in range(MESSAGES)]
    subject = names.recording_subject("r", 1, "here")

    async def read():
        client = await nats.connect(nats_server.address)
        stream = client.jetstream()
        await stream.add_stream(name="ol_r", subjects=[names.all_recordings("r")])
        offset = 0
        for part in parts:
            await stream.publish(subject, part, headers={names.OFFSET: str(offset)})
            offset += len(part)
        recording = CopiedRecording(stream, "ol_r", subject)
        await recording.look()
        ranges, whole = 0, b""
        while data := await recording.read(len(whole), 1 << 18):
            ranges, whole = ranges + 1, whole + data
        again = await recording.read(0, 1 << 18)
        some = await recording.read(1000, 100)
        await recording.close()
        await client.close()
        return ranges, whole, again, some

    ranges, whole, again, some = asyncio.run(read())
    assert whole == again == b"".join(parts)
    assert some == whole[1000:1100]
    assert ranges <= 10


def test_what_nobody_reads_any_more_is_forgotten_and_fetched_again(nats_server, runs_dir, monkeypatch):
    monkeypatch.setattr(answering, "_IDLE_SECONDS", 0.2)
    run = write_run(runs_dir, "r")
    asyncio.run(Bridge(run, nats_server.servers).copy())

    def copies():
        return [one for one in gc.get_objects() if isinstance(one, CopiedRun)]

    others = copies()

    def kept():
        return [one for one in copies() if one not in others]

    with Subscriber("r", stream=nats_server.address) as first:
        list(first)
        assert kept()
        wait_for(lambda: not kept(), "what was read to be forgotten")
        with Subscriber("r", stream=nats_server.address) as second:
            assert second._gateway is first._gateway
            assert list(second) == list(Recording(run / "recording-1.mcap"))
