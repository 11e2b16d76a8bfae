import asyncio
import time

from run_folders import write_run

from offloop.bus.jetstream.relay import RawRecordings
from offloop.bus.protocol.frames import Control, decode_control, split_frame
from offloop.bus.recording.growing import GrowingRecording


def test_a_long_recording_is_scanned_while_the_bridge_does_other_things(tmp_path, monkeypatch):
    path = write_run(tmp_path, "r")
    looked = []

    def look(self, really=GrowingRecording.look):
        looked.append(time.sleep(0.2 if not looked else 0))
        return really(self)

    monkeypatch.setattr(GrowingRecording, "look", look)

    async def ask():
        raw, turns = RawRecordings(path), 0
        fetch = Control("fetch", {"run": "r", "attempt": 1, "offset": 0})
        # The second one comes while the first one is looked up.
        asked = asyncio.gather(raw.answer(fetch), raw.answer(fetch))
        while not asked.done():
            await asyncio.sleep(0.01)
            turns += 1
        raw.close()
        return turns, await asked

    turns, answers = asyncio.run(ask())
    assert turns > 3
    for answer in answers:
        data = decode_control(split_frame(answer)[1]).content["data"]
        assert data == (path / "recording-1.mcap").read_bytes()
