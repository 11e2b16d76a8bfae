"""The host's end of requests for ranges of its recordings, of which the stream lacks a part or all."""

import asyncio
import time
from pathlib import Path

from offloop.bus.errors import BrokerError, ProtocolError
from offloop.bus.protocol.frames import MAX_RANGE, Control, encode_control
from offloop.bus.recording.growing import GrowingRecording
from offloop.bus.runs.directory import RunInfo, read_run


class RawRecordings:
    """Answers requests for ranges of the recordings of a run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._recordings: dict[int, GrowingRecording] = {}
        self._opening = asyncio.Lock()
        self.used = float("-inf")
        """When something was last asked for, by ``time.monotonic``."""

    async def answer(self, control: Control) -> bytes:
        """The answer to a request.

        Raises:
            OffloopError: there is none: no such attempt, no such offset.
        """
        self.used = time.monotonic()
        content, run = control.content, read_run(self._path)
        number, offset = content.get("attempt", run.last.number), content.get("offset")
        if type(offset) is not int or offset < 0:
            raise ProtocolError("a range has an offset")
        recording = await self._recording(run, number)
        end = recording.look()
        recording.backlog.drop(end)
        # What follows the last check record of a file that is written may be cut off.
        end = end if run.live and number == run.last.number else recording.size
        data = recording.read_at(offset, max(0, min(end - offset, MAX_RANGE)))
        asked = {"id": content["id"]} if "id" in content else {}
        return encode_control(
            "data", {"run": content.get("run"), "attempt": number, "offset": offset, **asked, "data": data}
        )

    async def _recording(self, run: RunInfo, number: object) -> GrowingRecording:
        attempt = next((one for one in run.attempts if one.number == number), None)
        if attempt is None:
            raise BrokerError(f"run {run.name!r} has no such attempt on this host: attempts are 1 to {run.last.number}")
        async with self._opening:
            if attempt.number not in self._recordings:
                recording = GrowingRecording(attempt.recording)
                try:
                    await asyncio.to_thread(recording.look)
                except BaseException:
                    recording.close()
                    raise
                self._recordings[attempt.number] = recording
        return self._recordings[attempt.number]

    def close(self) -> None:
        """Closes the recordings."""
        for recording in self._recordings.values():
            recording.close()
