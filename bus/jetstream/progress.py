"""How far a live training came, as its recording says."""

from contextlib import suppress

from offloop.bus.errors import OffloopError
from offloop.bus.protocol.frames import decode_whole_event
from offloop.bus.protocol.order import Reached
from offloop.bus.recording.growing import GrowingRecording
from offloop.bus.recording.reader import RecordingReader


class Progress:
    """Reads the newest events of a growing recording, each part of it once."""

    def __init__(self, recording: GrowingRecording) -> None:
        self._recording = recording
        self._read_to = 0
        self._reached: Reached | None = None

    def reached(self) -> Reached | None:
        """By the last event of the lowest rank; ``None`` where none is known yet."""
        check = self._recording.check
        if check is not None and self._recording.end > self._read_to:
            self._read_to = self._recording.end
            with suppress(OffloopError), RecordingReader(self._recording.path) as reader:
                reader.position = check.start
                last = {
                    int(rank): record.body
                    for records in reader.read()
                    for record in records
                    if not (topic := record.topic.rsplit("/", 2))[1].startswith("$") and (rank := topic[2]).isdecimal()
                }
                if last:
                    self._reached = Reached.of(decode_whole_event(last[min(last)]))
        return self._reached
