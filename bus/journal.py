"""The record of a run: written by the broker, read by everyone. The format is MCAP; ``docs/protocol.md`` says how it
is used."""

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import mcap.writer
import zstandard

from bus.errors import RecordingError, RunDirectoryError
from bus.wire import PROTOCOL_VERSION

__all__ = ["JournalReader", "JournalWriter", "Record"]

PROFILE = "offloop"
MAGIC = b"\x89MCAP0\r\n"
CHUNK_BYTES = 1024 * 1024
MAX_RECORD = 256 * 1024 * 1024

_HEADER = struct.Struct("<BQ")
_MESSAGE = struct.Struct("<HIQQ")
_U16 = struct.Struct("<H")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_CHUNK = struct.Struct("<QQQI")

_OP_FOOTER, _OP_CHANNEL, _OP_MESSAGE, _OP_CHUNK, _OP_METADATA, _OP_DATA_END = 2, 4, 5, 6, 12, 15


class JournalWriter:
    """Appends frames to a recording in the order in which they are given; nothing is on disk before :meth:`flush`.

    Raises:
        RunDirectoryError: the file cannot be created or written.
    """

    def __init__(self, path: Path, run: str, attempt: int) -> None:
        self.path = path
        self._channels: dict[bytes, int] = {}
        self._written = 0
        try:
            self._file = open(path, "xb")  # noqa: SIM115  kept open for as long as the run goes on
        except OSError as error:
            raise RunDirectoryError(f"the recording {path} cannot be created: {error.strerror}") from None
        self._mcap = mcap.writer.Writer(self._file, chunk_size=CHUNK_BYTES)
        self._mcap.start(profile=PROFILE)
        self._mcap.add_metadata(PROFILE, {"run": run, "attempt": str(attempt), "protocol": str(PROTOCOL_VERSION)})
        self._mcap.flush()

    @property
    def written(self) -> int:
        """How many frames have been appended."""
        return self._written

    def append(self, topic: bytes, seq: int, time: int, body: bytes) -> None:
        """Appends one frame; ``topic`` without its delimiter, ``time`` the event's, in nanoseconds since 1970."""
        channel = self._channels.get(topic)
        if channel is None:
            channel = self._mcap.register_channel(topic.decode(), message_encoding="msgpack", schema_id=0)
            self._channels[topic] = channel
        self._mcap.add_message(channel, time, body, time, seq & 0xFFFFFFFF)
        self._written += 1

    def flush(self) -> None:
        """Ends the chunk in progress, so that readers see everything appended so far."""
        self._mcap.flush()
        if not os.path.exists(self.path):
            raise RunDirectoryError(f"the recording {self.path} is gone")

    def close(self) -> None:
        """Writes the index and the footer, and closes the file."""
        self._mcap.finish()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


class Record(NamedTuple):
    """One message of a recording."""

    topic: str
    body: bytes


class JournalReader:
    """Reads a recording from its front, also one that is still being written or that was cut off.

    :meth:`read` gives what is there and can be called again later for what came after. A chunk is given when all its
    bytes are there and its checksum holds; ``position`` is the offset up to which the file has been read, ``damage``
    names what was skipped because it is damaged, and ``cut`` the record within which the file ends, if it does.

    Raises:
        RecordingError: the file is missing, cannot be opened, or is not a recording.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = len(MAGIC)
        self.damage: list[str] = []
        self.cut: str | None = None
        self.finished = False
        self.metadata: dict[str, str] = {}
        self._channels: dict[int, str] = {}
        self._decompress = zstandard.ZstdDecompressor().decompress
        try:
            self._file = open(path, "rb")  # noqa: SIM115  kept open to read on later
        except FileNotFoundError:
            raise RecordingError(f"there is no recording {path}; 'bus runs' lists the runs") from None
        except OSError as error:
            raise RecordingError(f"the recording {path} cannot be opened: {error.strerror}") from None
        if not self._begins_well():
            self._file.close()
            raise RecordingError(
                f"{path} is not a recording: it does not begin as an MCAP file of profile {PROFILE!r} does"
            )

    def _begins_well(self) -> bool:
        try:
            start = self._file.read(len(MAGIC) + _HEADER.size + 4 + len(PROFILE))
        except IsADirectoryError:
            return False
        profile = start[len(MAGIC) + _HEADER.size + 4 :]
        return start.startswith(MAGIC) and PROFILE.encode().startswith(profile)

    def __enter__(self) -> "JournalReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def read(self) -> Iterator[list[Record]]:
        """Gives the records from ``position`` to the end of what is there now, chunk by chunk."""
        self.cut = None
        while not self.finished:
            self._file.seek(self.position)
            head = self._file.read(_HEADER.size)
            if len(head) < _HEADER.size:
                self._ends_within("the head of a record", len(head))
                return
            opcode, length = _HEADER.unpack(head)
            if length > MAX_RECORD:
                # Where the next record begins cannot be known any more.
                self._damaged(f"a record claims {length} bytes, at most {MAX_RECORD} are allowed")
                self.finished = True
                return
            content = self._file.read(length)
            if len(content) < length:
                self._ends_within(f"a record of {length} bytes", len(head) + len(content))
                return
            records = self._record(opcode, content)
            self.position += _HEADER.size + length
            if records:
                yield records

    def _ends_within(self, what: str, present: int) -> None:
        if present:
            self.cut = f"{self.path} ends within {what} at offset {self.position}"

    def _damaged(self, what: str) -> None:
        self.damage.append(f"{self.path} is damaged at offset {self.position}: {what}")

    def _record(self, opcode: int, content: bytes) -> list[Record]:
        """The messages in one record of the file; a damaged record is named and has none."""
        try:
            if opcode == _OP_CHUNK:
                return self._messages(self._chunk(content))
            if opcode == _OP_CHANNEL:
                self._channel(content)
            elif opcode == _OP_METADATA:
                name, offset = _string(content, 0)
                if name == PROFILE:
                    self.metadata = _string_map(content, offset)
            elif opcode in (_OP_DATA_END, _OP_FOOTER):
                self.finished = True
        except (struct.error, zstandard.ZstdError, UnicodeDecodeError, KeyError, _DamageError) as error:
            self._damaged(f"a record of {len(content)} bytes cannot be read ({error!r})")
        return []

    def _chunk(self, content: bytes) -> bytes:
        _, _, size, checksum = _CHUNK.unpack_from(content)
        compression, offset = _string(content, _CHUNK.size)
        (length,) = _U64.unpack_from(content, offset)
        data = content[offset + 8 : offset + 8 + length]
        if compression == "zstd":
            if max(size, zstandard.frame_content_size(data)) > MAX_RECORD:
                raise _DamageError(f"a chunk claims more than {MAX_RECORD} bytes")
            data = self._decompress(data, max_output_size=size)
        elif compression:
            raise _DamageError(f"compression {compression!r} is not known, recordings use zstd")
        if len(data) != size or (checksum and zlib.crc32(data) != checksum):
            raise _DamageError("its checksum does not hold")
        return data

    def _messages(self, data: bytes) -> list[Record]:
        records: list[Record] = []
        channels = self._channels
        unpack_head, unpack_message, head_size = _HEADER.unpack_from, _MESSAGE.unpack_from, _HEADER.size
        offset, end = 0, len(data)
        while offset < end:
            opcode, length = unpack_head(data, offset)
            offset += head_size
            if offset + length > end:
                raise _DamageError("a message goes on past its chunk")
            if opcode == _OP_MESSAGE:
                channel = unpack_message(data, offset)[0]
                records.append(Record(channels[channel], data[offset + _MESSAGE.size : offset + length]))
            elif opcode == _OP_CHANNEL:
                self._channel(data[offset : offset + length])
            offset += length
        return records

    def _channel(self, content: bytes) -> None:
        (identity,) = _U16.unpack_from(content)
        self._channels[identity], _ = _string(content, 4)


class _DamageError(Exception):
    """Something in a record that cannot be; becomes a line in ``damage``."""


def _string(content: bytes, offset: int) -> tuple[str, int]:
    (length,) = _U32.unpack_from(content, offset)
    end = offset + 4 + length
    if end > len(content):
        raise _DamageError("a string goes on past its record")
    return content[offset + 4 : end].decode(), end


def _string_map(content: bytes, offset: int) -> dict[str, str]:
    (length,) = _U32.unpack_from(content, offset)
    offset += 4
    end, values = offset + length, {}
    while offset < end:
        key, offset = _string(content, offset)
        values[key], offset = _string(content, offset)
    return values
