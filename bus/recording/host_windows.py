"""File beside a recording with a host's windows, see :mod:`offloop.bus.protocol.host_windows`; one process appends."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import msgpack

from offloop.bus.errors import ProtocolError, RecordingError
from offloop.bus.files import open_file
from offloop.bus.protocol.host_windows import MAX_WINDOW, HostWindow, decode_window, encode_window
from offloop.bus.recording.records import FileSource

_READ_BYTES = 4 * MAX_WINDOW


def windows_path(recording: Path, attempt: int) -> Path:
    return recording.with_name(f"windows-{attempt}")


class WindowsWriter:
    """Appends windows to a file. Raises BlockingIOError if another process writes it, RecordingError on failure."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.last: HostWindow | None = None
        try:
            self._descriptor = open_file(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        except OSError as error:
            raise self._failure(error) from None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.closing(GrowingWindows(path)) as growing:
                for self.last in growing.windows():
                    pass
            os.truncate(self._descriptor, growing.end)
            self._end = growing.end
        except BaseException as error:
            os.close(self._descriptor)
            if isinstance(error, OSError) and not isinstance(error, BlockingIOError):
                raise self._failure(error) from None
            raise

    def append(self, window: HostWindow) -> None:
        data = encode_window(window)
        try:
            if os.write(self._descriptor, data) < len(data):
                raise OSError(None, "there is no room")
        except OSError as error:
            # Windows after an incomplete one could not be read.
            with contextlib.suppress(OSError):
                os.truncate(self._descriptor, self._end)
            raise self._failure(error) from None
        self._end += len(data)
        self.last = window

    def _failure(self, error: OSError) -> RecordingError:
        return RecordingError(f"the windows {self._path} cannot be written: {error.strerror}", path=self._path)

    def close(self) -> None:
        os.close(self._descriptor)


class GrowingWindows:
    """A host's windows while they are written; none while the file does not exist."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: FileSource | None = None
        self.end: int = 0  # offset of the end of the last whole window

    @property
    def size(self) -> int:
        return self.end

    def look(self) -> int:
        for _ in self.windows():
            pass
        return self.end

    def windows(self) -> Iterator[HostWindow]:
        """Yield windows added since the last call, up to a damaged one."""
        while len(data := self.read_at(self.end, _READ_BYTES)) > 0:
            begin = self.end
            for size in _sizes(data):
                at = self.end - begin
                try:
                    window = decode_window(data[at : at + size])
                except ProtocolError:
                    return
                self.end += size
                yield window
            if self.end == begin:
                return

    def piece(self, offset: int, end: int, most: int) -> bytes:
        """Return the window at an offset, as one message. Raise RecordingError if it has more than ``most`` bytes."""
        data = self.read_at(offset, min(MAX_WINDOW, end - offset))
        if (size := next(_sizes(data), 0)) > most:
            raise RecordingError(
                f"a window in {self.path} has {size:,} bytes and the servers take {most:,}: raise their 'max_payload'",
                path=self.path,
            )
        return data[:size]

    def read_at(self, offset: int, size: int) -> bytes:
        """Read bytes, fewer at the end of the file. Raise RecordingError if the disk fails."""
        if self._file is None:
            if not self.path.exists():
                return b""
            self._file = FileSource(self.path, follow=False)
        return self._file.read_at(offset, size)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _sizes(data: bytes) -> Iterator[int]:
    unpacker = msgpack.Unpacker(max_buffer_size=max(len(data), 1))
    unpacker.feed(data)
    before = 0
    with contextlib.suppress(msgpack.UnpackException, ValueError):
        while True:
            unpacker.skip()
            yield unpacker.tell() - before
            before = unpacker.tell()
