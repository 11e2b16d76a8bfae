"""Reader of a recording: from any position, also while the file grows, was cut off, or is damaged."""

import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from offloop.bus.errors import RecordingError
from offloop.bus.printing import Damage
from offloop.bus.recording import records
from offloop.bus.recording.records import CheckRecord, Chunk, DamageError, RecordHead

Record: TypeAlias = tuple[str, bytes]
"""One message of a recording: topic and body."""


@dataclass
class _FilePart:
    """Records read since the last check record."""

    problems: Damage = field(default_factory=Damage)
    chunk_lost: bool = False  # a chunk is among the problems, as far as is known without the check record
    messages: int = 0


class RecordingReader:
    """Reads a recording from the front, also one that grows, was cut off, or is damaged.

    :meth:`read` yields the existing records. A later call yields those added since. Every chunk with intact bytes is
    read, in order, also after damage. ``name`` is for messages. RecordingError is raised for files that cannot be
    opened."""

    def __init__(self, source: Path | records.ByteSource, name: str | None = None) -> None:
        self._source: records.ByteSource = records.FileSource(source) if isinstance(source, Path) else source
        self._name = name or str(source)
        self.cut: str | None = None  # the incomplete record at the end, after ``read``, if any
        self.finished: bool = False  # the end of a closed recording was read
        self.metadata: dict[str, str] = {}
        """``run``, ``attempt``, ``protocol_version`` and ``id``, once the front was read."""
        self.positions: dict[int, records.Position] = {}  # position of each rank in the last check record
        self._begun = False
        self._damage = Damage()
        self._lost = False
        self._tried_again = -1
        # Checksum and number of messages by offset, since the last check record.
        self._given: dict[int, tuple[int, int]] = {}
        self.position = 0

    def __enter__(self) -> "RecordingReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._source.close()

    @property
    def position(self) -> int:
        """Offset of the last final byte: the end of a check record. Reading continues from an offset set here."""
        return self._position

    @position.setter
    def position(self, offset: int) -> None:
        self._position = self._offset = offset
        # Number of messages before the position, if known.
        self._total: int | None = None if offset else 0
        self._part = _FilePart()
        self._given.clear()
        self.finished = False

    @property
    def damage(self) -> list[str]:
        """Damaged places with their offsets: the first hundred, and the number of further ones."""
        damage = Damage()
        damage.add_all(self._damage)
        damage.add_all(self._part.problems)
        return damage.lines()

    @property
    def lost(self) -> bool:
        """Some recorded messages could not be read."""
        return self._lost or self._part.chunk_lost

    def read(self) -> Iterator[list[Record]]:
        """Yield the records from ``position`` to the present end, chunk by chunk. Raise RecordingError on failure."""
        # A broker that resumes the attempt replaces everything after the last check record, including the footer.
        self.finished, self.cut = False, None
        self._offset, self._part = self._position, _FilePart()
        if not self._has_front():
            return
        while not self.finished:
            try:
                found: list[Record] | None = self._take_next()
            except DamageError as problem:
                found = self._pass(problem)
            if found is None:
                return
            if found:
                yield found

    def _has_front(self) -> bool:
        if self._position:
            return True
        if not self._begun:
            front = self._source.read_at(0, len(records.FRONT))
            if len(front) < len(records.FRONT) and records.FRONT.startswith(front):
                if self._source.hole is not None:
                    self._skip(self._source.hole)
                    return True
                if front:
                    self._end_within(f"its first {len(records.FRONT)} bytes")
                return False
            # A lost front may have become zeros of any length.
            within = records.FRONT_BYTES if any(front) else None
            if front != records.FRONT and next(records.sound_records(self._source, 0, within), None) is None:
                raise RecordingError(
                    f"{self._name} is not a recording: it does not begin as an MCAP file of profile "
                    f"{records.PROFILE!r} does"
                )
        self._begun, self._offset = True, len(records.MAGIC)
        return True

    def _take_next(self) -> list[Record]:
        head = records.head_at(self._source, self._offset)
        if head.check is not None:
            return self._take_check_record(head, head.check)
        if head.opcode == records.OP_DATA_END:
            self.finished = True
            self._commit()
            return []
        record = records.read_record(self._source, head.offset, head.end - head.offset, head.front)
        if head.opcode == records.OP_CHUNK:
            return self._take_chunk(head, Chunk.decode(record))
        self._offset = head.end
        return []

    def _take_chunk(self, head: RecordHead, chunk: Chunk) -> list[Record]:
        messages = _messages_in(chunk)
        given = chunk.checksum, len(messages)
        self._offset = head.end
        self._part.messages += len(messages)
        if self._given.get(head.offset) == given:
            return []
        self._given[head.offset] = given
        return messages

    def _take_check_record(self, head: RecordHead, check: CheckRecord) -> list[Record]:
        part = self._part
        missing = check.total - (check.before if self._total is None else self._total) - part.messages
        between = f"between offsets {self._position} and {head.offset}"
        if missing > 0:
            part.problems.add(f"{self._name} has lost {missing} messages {between}")
        if not part.problems and not self._is_as_written(check, head.offset):
            part.problems.add(
                f"{self._name} is damaged {between}: the bytes differ from the written ones, but no message is lost"
            )
        if self._total is not None or check.start == self._position:
            part.chunk_lost = missing > 0
        self.metadata, self.positions = check.metadata, check.positions
        self._offset = head.end
        self._commit()
        self._total = check.total
        return []

    def _is_as_written(self, check: CheckRecord, end: int) -> bool:
        part = self._source.read_at(self._position, end - self._position)
        return check.start == self._position and zlib.crc32(part) == check.checksum

    def _commit(self) -> None:
        """Make the offset final: bytes before it are not read again."""
        self._damage.add_all(self._part.problems)
        self._lost |= self._part.chunk_lost
        if self._total is not None:
            self._total += self._part.messages
        self._part = _FilePart()
        self._given.clear()
        self._tried_again = -1
        self._position = self._offset

    def _pass(self, problem: DamageError) -> list[Record] | None:
        """Continue after unreadable bytes; return ``None`` at the present end."""
        is_cut = isinstance(problem, records.EndsWithinError)
        if is_cut and self._source.is_coming:
            # The whole of a long record would be searched again with each piece that arrives.
            self._end_within(str(problem))
            return None
        sound = self._next_sound()
        if sound is not None and self._tried_again != self._offset:
            # In a growing file a record may have become complete since the read, with others after it.
            self._tried_again = self._offset
            self._source.forget(self._offset)
            return []
        if sound is None and self._source.hole is not None:
            self._skip(self._source.hole)
            return []
        if sound is None and is_cut:
            self._end_within(str(problem))
            return None
        self._part.problems.add(f"{self._name} is damaged at offset {self._offset}: {problem}")
        if sound is None or sound.offset != self._offset:
            self._note_lost_chunk()
        if sound is None:
            return None
        if isinstance(sound.what, Chunk):
            return self._take_chunk(sound, sound.what)
        assert sound.check is not None  # the only other possibility
        return self._take_check_record(sound, sound.check)

    def _next_sound(self) -> RecordHead | None:
        for sound in records.sound_records(self._source, self._offset):
            with suppress(DamageError):
                if isinstance(sound.what, Chunk):
                    _messages_in(sound.what)
                return sound
        return None

    def _skip(self, hole: records.Hole) -> None:
        self._part.problems.add(f"{self._name} lacks bytes {self._offset:,} to {hole.end:,}: {hole.why}")
        self._part.chunk_lost = True
        self._offset = hole.end
        self._commit()

    def _end_within(self, what: str) -> None:
        if self._source.read_at(self._offset, 1):
            self.cut = f"{self._name} ends within {what} at offset {self._offset}"
            self._note_lost_chunk()

    def _note_lost_chunk(self) -> None:
        self._part.chunk_lost |= self._source.read_at(self._offset, 1) == bytes([records.OP_CHUNK])


def _messages_in(chunk: Chunk) -> list[Record]:
    """Decode the messages of a chunk. Raise DamageError for too long records, or more messages than it can hold."""
    data, most = chunk.data, records.MESSAGES_PER_BYTE * chunk.data_size
    topics: dict[int, str] = {}
    found: list[Record] = []
    append, front_size, body = found.append, records.MESSAGE_FRONT.size, records.MESSAGE.size
    # Opcode, length and channel of the last message; the next message nearly always has the same.
    front, size, topic = b"", 0, ""
    offset, end = 0, len(data)
    is_dense = end > most * body  # it has room for too many
    while offset < end:
        if data[offset : offset + front_size] != front:
            front = data[offset : offset + front_size]
            if len(front) < front_size:
                raise DamageError("a chunk ends within a message")
            opcode, length, channel = records.MESSAGE_FRONT.unpack(front)
            size = records.HEAD.size + length
            if opcode == records.OP_CHANNEL:
                topics.update([records.read_channel(data[offset + records.HEAD.size : offset + size])])
                front = b""
            elif opcode == records.OP_MESSAGE and size >= body and channel in topics:
                topic = topics[channel]
            else:
                raise DamageError(f"a chunk has a record of kind {opcode} and {length} bytes that it cannot have")
        if offset + size > end:
            raise DamageError("a message is longer than its chunk")
        if front:
            append((topic, data[offset + body : offset + size]))
        offset += size
        if is_dense and len(found) > most:
            raise DamageError(f"{chunk.data_size} compressed bytes hold too many messages to be numbered")
    return found
