"""The reading end of recordings: from the front or from a position, to the end of what is there, past what is
damaged."""

import contextlib
import errno
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol

from offloop.bus.errors import RecordingError
from offloop.bus.files import NotAFileError, open_file
from offloop.bus.printing import Damage
from offloop.bus.recording import records
from offloop.bus.recording.records import MAGIC, PROFILE, CheckRecord, Chunk, ChunkHead, DamageError, Position

MAX_WASTED = 256 * 1024 * 1024
WASTED_SHARE = 100

# What may stand between the header and the end of the data, besides private records.
_DATA_OPCODES = frozenset(
    (
        records.OP_HEADER,
        records.OP_CHANNEL,
        records.OP_CHUNK,
        records.OP_MESSAGE_INDEX,
        records.OP_METADATA,
        records.OP_DATA_END,
        records.OP_CHECK,
    )
)


class Record(NamedTuple):
    """One message of a recording."""

    topic: str
    body: bytes


_new_record = tuple.__new__  # what Record(...) calls, at half the cost


class Hole(NamedTuple):
    """Bytes that are lost for good."""

    end: int
    """Where what is there begins again."""
    why: str


class ByteSource(Protocol):
    """Where a recording's bytes come from."""

    @property
    def hole(self) -> Hole | None:
        """What is lost behind the bytes that are here; ``None`` where nothing is known to be."""

    @property
    def is_coming(self) -> bool:
        """Whether more of what was asked for is on its way."""

    def read_at(self, offset: int, size: int) -> bytes:
        """The bytes from ``offset`` on, at most ``size``; fewer, or none, where they are not there yet."""

    def skip_zeros(self, offset: int) -> int:
        """The next offset at which there may be other bytes than zeros."""

    def forget(self, offset: int) -> None:
        """Reads from ``offset`` on anew, where a copy is kept: it may be of bytes that have been replaced since."""

    def close(self) -> None:
        """Ends it."""


class FileSource:
    """A recording in a file.

    With ``follow`` it may be a symbolic link.

    Raises:
        RecordingError: the file is missing, cannot be opened, or is a directory.
    """

    is_coming = False
    hole = None

    def __init__(self, path: Path, *, follow: bool = True) -> None:
        self.path = path
        try:
            self._descriptor = open_file(path, follow=follow)
        except FileNotFoundError:
            raise RecordingError(f"there is no recording {path}; 'offloop runs' lists the runs", path=path) from None
        except NotAFileError:
            raise RecordingError(f"{path} is not a recording: it is not a file", path=path) from None
        except OSError as error:
            raise RecordingError(f"the recording {path} cannot be opened: {error.strerror}", path=path) from None

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return os.fstat(self._descriptor).st_size

    def read_at(self, offset: int, size: int) -> bytes:
        """The bytes from ``offset`` on, at most ``size``; fewer where the file ends.

        Raises:
            RecordingError: the disk does not give them.
        """
        try:
            # A damaged record may claim anything: no memory is taken for what is not there.
            return os.pread(self._descriptor, max(0, min(size, self.size - offset)), offset)
        except OSError as error:
            raise RecordingError(
                f"the recording {self.path} cannot be read: {error.strerror}", path=self.path
            ) from None

    def skip_zeros(self, offset: int) -> int:
        """The next offset at which there may be other bytes than zeros: of a file with holes, behind one."""
        try:
            return os.lseek(self._descriptor, offset, os.SEEK_DATA)
        except OSError as error:
            return self.size if error.errno == errno.ENXIO else offset

    def forget(self, offset: int) -> None:
        """Does nothing: no copy is kept."""

    def close(self) -> None:
        """Closes the file. Can be called more than once."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


@dataclass
class _FilePart:
    """What has been seen since the last check record."""

    problems: Damage = field(default_factory=Damage)
    chunk_lost: bool = False
    """Whether one of the problems is a chunk, as far as is known without the check record."""
    messages: int = 0
    checksum: int = 0
    whole: bool = True
    """Whether every byte since the last check record is in ``checksum``."""


class _Problem(Exception):
    """What stands at an offset cannot be read."""


class _NotWholeError(_Problem):
    """A record ends behind the end of what is there."""


class RecordingReader:
    """Reads a recording from its front, also one that is still being written, was cut off, or is damaged.

    :meth:`read` gives what is there and can be called again later for what came after. Every chunk whose own bytes are
    good is given, in order, whatever happened around it. The recording is a file, or anything that is a
    :class:`ByteSource`, with a ``name`` for messages.

    Raises:
        RecordingError: the file is missing or cannot be opened.
    """

    def __init__(self, source: Path | ByteSource, name: str | None = None) -> None:
        self._source: ByteSource = FileSource(source) if isinstance(source, Path) else source
        self._name = name or str(source)
        self.cut: str | None = None
        """The record within which the recording ends, after :meth:`read`, if it does."""
        self.finished = False
        """Whether the end of a closed recording has been read."""
        self.metadata: dict[str, str] = {}
        """``run``, ``attempt``, ``protocol_version`` and ``id`` of the recording, once the front has been read."""
        self.positions: dict[int, Position] = {}
        """Of each rank, the position that the last check record says."""
        self._channels: dict[int, str] = {}
        self._begun = self._is_checked = False
        self._position = self._offset = 0
        self._last_check = 0
        self._skipped_to = -1
        self._total: int | None = 0
        self._damage = Damage()
        self._lost = False
        self._tried_again = -1
        self._part = _FilePart()
        # Since the last check record, by offset: checksum and number of messages.
        self._given: dict[int, tuple[int, int]] = {}
        # Since the last check record, offset and checksum of what is not a chunk, or a damaged one.
        self._bad: set[tuple[int, int]] = set()
        self._wasted = 0
        self._opened: tuple[tuple[int, int], Chunk] | None = None

    def __enter__(self) -> "RecordingReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the recording."""
        self._source.close()

    @property
    def position(self) -> int:
        """Offset up to which the recording has been read for good: the end of a check record, or of any record in a
        recording without check records. Reading continues from an offset that is set here: the end of a check record
        or the beginning of a chunk."""
        return self._position

    @position.setter
    def position(self, offset: int) -> None:
        self._position = self._offset = self._last_check = offset
        self._total = None if offset else 0
        self._is_checked = offset > 0
        self._part = _FilePart()
        self._given.clear()
        self.finished = False

    @property
    def damage(self) -> list[str]:
        """What is damaged so far, each with its offset: the first hundred places, and how many more there are."""
        damage = Damage()
        damage.add_all(self._damage)
        damage.add_all(self._part.problems)
        return damage.lines()

    @property
    def lost(self) -> bool:
        """Whether messages that the recording held are missing in what was given."""
        return self._lost or self._part.chunk_lost

    # -- walking ------------------------------------------------------------------------------------------------------

    def read(self) -> Iterator[list[Record]]:
        """Gives the records from ``position`` to the end of what is there now, chunk by chunk.

        Raises:
            RecordingError: it is not a recording, or the disk does not give it.
        """
        # What follows the last check record, the footer too, may have been replaced meanwhile by a broker that
        # continues the attempt.
        self.finished = False
        self._offset, self._part = self._position, _FilePart()
        self.cut = None
        if not self._begins():
            return
        while not self.finished:
            try:
                chunks = self._take_next()
            except _Problem as problem:
                if isinstance(problem, _NotWholeError) and self._source.is_coming:
                    # All of a long record would be searched anew with each piece of it that comes.
                    self._ends_within(str(problem))
                    return
                sound = self._next_sound(self._offset)
                if sound is not None and self._tried_again != self._offset:
                    # In a file that grows, what was not whole a moment ago may be, with more behind it.
                    self._tried_again = self._offset
                    self._source.forget(self._offset)
                    continue
                if sound is None and self._source.hole is not None:
                    self._skip(self._source.hole)
                    continue
                if sound is None and isinstance(problem, _NotWholeError):
                    self._ends_within(str(problem))
                    return
                self._note(str(problem), sound)
                if sound is None:
                    return
                chunks = self._take_sound(sound)
            yield from chunks

    def _begins(self) -> bool:
        """Whether the front is there.

        Raises:
            RecordingError: it is that of something else."""
        if not self._begun:
            size = len(MAGIC) + records.HEAD.size + 4 + len(PROFILE)
            front = self._source.read_at(0, size)
            profile = front[len(MAGIC) + records.HEAD.size + 4 :]
            sound = MAGIC.startswith(front[: len(MAGIC)]) and PROFILE.encode().startswith(profile)
            if sound and len(front) < size:
                if self._source.hole is not None:
                    self._skip(self._source.hole)
                    return True
                if front:
                    self._ends_within(f"its first {size} bytes")
                return False
            # Where the front was lost there may be zeros for as long as you like.
            within = records.FRONT_BYTES if any(front) else None
            if not sound and self._next_sound(0, within) is None:
                raise RecordingError(
                    f"{self._name} is not a recording: it does not begin as an MCAP file of profile {PROFILE!r} does"
                )
            self._begun = True
        if self._offset == 0:
            front = self._source.read_at(0, len(MAGIC))
            self._part.checksum = zlib.crc32(front)
            self._offset = len(MAGIC)
        return True

    def _ends_within(self, what: str) -> None:
        opcode = self._source.read_at(self._offset, 1)
        if opcode:
            self.cut = f"{self._name} ends within {what} at offset {self._offset}"
            self._part.chunk_lost |= opcode[0] == records.OP_CHUNK

    def _skip(self, hole: Hole) -> None:
        """Names what is lost for good, and continues behind it."""
        part = self._part
        part.problems.add(f"{self._name} lacks bytes {self._offset:,} to {hole.end:,}: {hole.why}")
        part.chunk_lost = True
        last_check = self._last_check
        self._offset, self._begun, self._is_checked = hole.end, True, True
        self._commit()
        self._last_check, self._skipped_to = last_check, hole.end

    def _note(self, what: str, sound: "_Sound | None") -> None:
        """Names damage at the offset; ``sound`` is what is found there or behind."""
        part = self._part
        # Within a record that began in what was lost, nothing is damaged beyond that.
        if self._offset != self._skipped_to:
            part.problems.add(f"{self._name} is damaged at offset {self._offset}: {what}")
        part.whole = False
        found = sound is not None and sound.offset == self._offset
        # Behind a chunk there are only its indexes until the next check record.
        if not found and not (self._is_checked and part.messages):
            part.chunk_lost |= self._source.read_at(self._offset, 1) == bytes([records.OP_CHUNK])

    def _take_next(self) -> Iterator[list[Record]]:
        """Takes the record at the offset; returns its messages.

        Raises:
            _Problem: it cannot be read; nothing has been taken.
        """
        head = self._source.read_at(self._offset, records.HEAD.size)
        if len(head) < records.HEAD.size:
            raise _NotWholeError("the head of a record")
        opcode, length = records.HEAD.unpack(head)
        if length > records.MAX_RECORD:
            raise _Problem(f"a record claims {length} bytes, at most {records.MAX_RECORD} are allowed")
        if opcode not in _DATA_OPCODES and not (opcode >= records.OP_CHECK and self._is_checked):
            raise _Problem(f"there is no record of kind {opcode}")
        content = self._source.read_at(self._offset + records.HEAD.size, length)
        if len(content) < length:
            raise _NotWholeError(f"a record of {length} bytes")
        try:
            return self._take(opcode, head + content)
        except DamageError as error:
            raise _Problem(f"a {records.opcode_name(opcode)} of {length} bytes cannot be read ({error})") from None

    def _take(self, opcode: int, record: bytes) -> Iterator[list[Record]]:
        content = record[records.HEAD.size :]
        chunks: Iterator[list[Record]] = iter(())
        if opcode == records.OP_CHECK:
            return self._take_check_record(_Sound(self._offset, len(record), records.read_check_record(record)))
        if opcode == records.OP_CHUNK:
            chunks = self._take_chunk(record)
        elif opcode == records.OP_HEADER:
            records.check_header(content)
        elif opcode == records.OP_CHANNEL:
            self._channels.update([records.read_channel(content)])
        elif opcode == records.OP_MESSAGE_INDEX:
            records.read_message_index(record)
        elif opcode == records.OP_METADATA:
            name, values = records.read_metadata(content)
            if name == PROFILE:
                self.metadata = values
        elif opcode == records.OP_DATA_END:
            self._finish(len(content))
        elif self._sign_at(self._offset):
            raise DamageError("it is a check record or a chunk of another name")
        self._advance(record)
        return chunks

    def _advance(self, record: bytes) -> None:
        self._part.checksum = zlib.crc32(record, self._part.checksum)
        self._offset += len(record)
        if self._part.messages and not self._is_checked:
            self._commit()

    def _finish(self, length: int) -> None:
        if length != 4:
            raise DamageError("it has not the length that it must have")
        self.finished = True
        self._commit()

    def _take_chunk(self, record: bytes) -> Iterator[list[Record]]:
        """The messages of a chunk, unless they have been given before."""
        given = self._given.get(self._offset)
        head = ChunkHead.decode(record)
        if len(record) != records.CHUNK_FRONT + head.data_size:
            raise DamageError("its length is not that of what it holds")
        if given is not None and given[0] == head.checksum:
            self._part.messages += given[1]
            return iter(())
        return self._give(self._offset, head, self._messages(self._decompressed(self._offset, record)))

    def _give(self, offset: int, head: ChunkHead, messages: list[Record]) -> Iterator[list[Record]]:
        self._part.messages += len(messages)
        given = head.checksum, len(messages)
        if not messages or self._given.get(offset) == given:
            return iter(())
        self._given[offset] = given
        return iter([messages])

    def _decompressed(self, offset: int, record: bytes) -> Chunk:
        """The chunk at an offset. What was damaged is not decompressed again, and no more is decompressed in vain than
        so many bytes for each byte of the recording.

        Raises:
            DamageError: it is not a chunk, or a damaged one."""
        known = offset, zlib.crc32(record)
        if known in self._bad:
            raise DamageError("its checksum does not hold")
        if self._opened is not None and self._opened[0] == known:
            return self._opened[1]
        size = ChunkHead.decode(record).size
        if self._wasted + size > MAX_WASTED + WASTED_SHARE * (offset + len(record)):
            raise DamageError("too much before it is damaged for it to be tried")
        try:
            chunk = Chunk.decode(record)
        except DamageError:
            self._bad.add(known)
            self._wasted += size
            raise
        self._opened = known, chunk
        return chunk

    def _messages(self, chunk: Chunk) -> list[Record]:
        channels, data = self._channels, chunk.data
        found: list[Record] = []
        for channel, _, content, end in records.read_messages(chunk):
            if channel >= 0:
                topic = channels.get(channel)
                if topic is None:
                    raise DamageError(f"a message is of channel {channel}, which has no topic")
                found.append(_new_record(Record, (topic, data[content:end])))
            else:
                channels.update([records.read_channel(data[content:end])])
        return found

    def _take_check_record(self, sound: "_Sound") -> Iterator[list[Record]]:
        """Compares what was read since the last check record with what this one says."""
        check, part = sound.what, self._part
        assert isinstance(check, CheckRecord)  # by the caller
        before = check.before if self._total is None else self._total
        expected = check.total - before
        missing = expected - part.messages
        if missing > 0:
            part.problems.add(
                f"{self._name} has lost {missing} messages between offsets {self._last_check} and {sound.offset}"
            )
        as_written = check.start == self._position and (not part.whole or part.checksum == check.checksum)
        if (self._is_checked or not self._position) and not part.problems and not as_written:
            part.problems.add(
                f"{self._name} is damaged between offsets {self._position} and {sound.offset}: "
                "what stands there is not what was written, but no message is lost"
            )
        if self._total is not None or check.start == self._position:
            part.chunk_lost = missing > 0
        self.metadata, self.positions = check.metadata, check.positions
        self._offset, self._is_checked = sound.end, True
        self._commit()
        self._total = check.total
        return iter(())

    def _commit(self) -> None:
        """What was read so far is never read again."""
        part = self._part
        self._damage.add_all(part.problems)
        self._lost |= part.chunk_lost
        if self._total is not None:
            self._total += part.messages
        self._part = _FilePart(whole=self._is_checked)
        self._given.clear()
        self._bad.clear()
        self._opened = None
        self._tried_again = -1
        self._position = self._last_check = self._offset

    # -- finding what is whole ----------------------------------------------------------------------------------------

    def _take_sound(self, sound: "_Sound") -> Iterator[list[Record]]:
        if isinstance(sound.what, CheckRecord):
            return self._take_check_record(sound)
        self._offset = sound.end
        return self._give(sound.offset, sound.what, sound.messages)

    def _next_sound(self, begin: int, end: int | None = None) -> "_Sound | None":
        """The next check record or chunk from ``begin`` on whose checksum holds, whatever its opcode and length are."""
        for sign, offset in records.find_signs(self._source.read_at, begin, end, self._source.skip_zeros):
            with contextlib.suppress(DamageError):
                return self._check_record_at(offset) if sign == records.CHECK_SIGN else self._chunk_at(offset)
        return None

    def _sign_at(self, offset: int) -> bool:
        """Whether the sign of a check record or a chunk stands where it would in a record at ``offset``."""
        return any(
            start == offset
            for _, start in records.find_signs(self._source.read_at, offset, offset + records.CHUNK_FRONT)
        )

    def _check_record_at(self, offset: int) -> "_Sound":
        size = records.CHECK_FRONT + CheckRecord.payload_size(self._source.read_at(offset, records.CHECK_FRONT))
        return _Sound(offset, size, CheckRecord.decode(self._read_candidate(offset, size)))

    def _chunk_at(self, offset: int) -> "_Sound":
        head = ChunkHead.decode(self._source.read_at(offset, records.CHUNK_FRONT))
        if not head.checksum:
            raise DamageError("it has no checksum to know it by")
        size = records.CHUNK_FRONT + head.data_size
        record = self._read_candidate(offset, size)
        return _Sound(offset, size, head, self._messages(self._decompressed(offset, record)))

    def _read_candidate(self, offset: int, size: int) -> bytes:
        """What may be a record. Such places may overlap: what is read in vain counts as what is decompressed in vain,
        except where the reader stands, for that may be a record that is being written."""
        record = self._source.read_at(offset, size)
        if len(record) < size and offset > self._offset:
            self._wasted += len(record)
        if self._wasted > MAX_WASTED + WASTED_SHARE * (offset + len(record)):
            raise DamageError("too much before it is damaged for it to be tried")
        return record


class _Sound(NamedTuple):
    """A record that is whole for certain."""

    offset: int
    size: int
    what: CheckRecord | ChunkHead
    messages: list[Record] = []  # noqa: RUF012  never changed

    @property
    def end(self) -> int:
        return self.offset + self.size
