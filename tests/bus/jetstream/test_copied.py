"""What a stream has of a recording, as readers get it."""

import asyncio

import nats

from bus.jetstream import names
from bus.jetstream.copied import CopiedRecording

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
