"""The file beside a recording in which a host keeps its windows, see :mod:`offloop.bus.protocol.host_windows`: one
after the other as they are sent, only ever appended to, by one process at a time."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import msgpack

from offloop.bus.errors import ProtocolError, RecordingError
from offloop.bus.files import open_file
from offloop.bus.protocol.host_windows import MAX_WINDOW, HostWindow, decode_window, encode_window
from offloop.bus.recording.growing import Backlog
from offloop.bus.recording.records import FileSource

_READ_BYTES = 4 * MAX_WINDOW


def windows_path(recording: Path, attempt: int) -> Path:
    """Path of the windows of an attempt."""
    return recording.with_name(f"windows-{attempt}")


class WindowsWriter:
    """Appends windows to a file; cuts off one that a killed process has left unfinished.

    Raises BlockingIOError: another process writes it; RecordingError: the file cannot be written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.last: HostWindow | None = None
        """The last window in it."""
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
        """Raises :class:`~offloop.bus.errors.RecordingError` when the window cannot be written."""
        data = encode_window(window)
        try:
            if os.write(self._descriptor, data) < len(data):
                raise OSError(None, "there is no room")
        except OSError as error:
            # Behind a part of one, none can be read.
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
    """A host's windows as they are written; none while there is no such file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: FileSource | None = None
        self.end = 0
        """Offset behind the last whole window."""
        self.backlog = Backlog()
        self._total = 0

    @property
    def size(self) -> int:
        """As :attr:`end`."""
        return self.end

    def look(self) -> int:
        """Looks for further windows; returns :attr:`end`."""
        for _ in self.windows():
            pass
        return self.end

    def windows(self) -> Iterator[HostWindow]:
        """The windows that have come since the last look, up to a damaged one."""
        while len(data := self.read_at(self.end, _READ_BYTES)) > 0:
            begin = self.end
            for size in _sizes(data):
                at = self.end - begin
                try:
                    window = decode_window(data[at : at + size])
                except ProtocolError:
                    return
                self.end, self._total = self.end + size, self._total + 1
                self.backlog.add(self.end, self._total)
                yield window
            if self.end == begin:
                return

    def piece(self, offset: int, end: int, most: int) -> bytes:
        """The window that begins there: one goes into a message. Raises RecordingError: it is longer than that."""
        data = self.read_at(offset, min(MAX_WINDOW, end - offset))
        if (size := next(_sizes(data), 0)) > most:
            raise RecordingError(
                f"a window in {self.path} has {size:,} bytes and the servers take {most:,}: raise their 'max_payload'",
                path=self.path,
            )
        return data[:size]

    def read_at(self, offset: int, size: int) -> bytes:
        """Bytes of the file, fewer where it ends. Raises RecordingError where they cannot be read."""
        if self._file is None:
            if not self.path.exists():
                return b""
            self._file = FileSource(self.path, follow=False)
        return self._file.read_at(offset, size)

    def close(self) -> None:
        """Closes the file. Can be called more than once."""
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
