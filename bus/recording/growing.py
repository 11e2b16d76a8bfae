"""A growing recording, as its bridge reads it: only bytes that are never replaced."""

from pathlib import Path

from offloop.bus.recording.records import MAGIC, CheckRecord, FileSource, walk


class GrowingRecording(FileSource):
    """A recording that a broker writes. Only bytes up to its last whole check record are final."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, follow=False)
        self.end: int = 0  # offset of the end of the last whole check record
        self.check: CheckRecord | None = None

    def look(self) -> int:
        """Read new check records; return :attr:`end`."""
        for head in walk(self, self.end or len(MAGIC)):
            if head.check is not None:
                self.check, self.end = head.check, head.end
        return self.end

    def piece(self, offset: int, end: int, most: int) -> bytes:
        return self.read_at(offset, min(end - offset, most))
