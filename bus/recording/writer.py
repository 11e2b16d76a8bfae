"""Writer of recordings: chunk by chunk, also after a crash or a full disk."""

import contextlib
import errno
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import mcap.records
import zstandard

from offloop.bus.errors import ProtocolError, RecordingError, RunDirectoryError
from offloop.bus.files import open_file
from offloop.bus.protocol.frames import END, PROTOCOL_VERSION, parse_topic
from offloop.bus.recording import records
from offloop.bus.recording.records import BACK, FRONT, MAX_TOPICS, PROFILE, CheckRecord, FileSource, Position, walk

CHUNK_BYTES = 1024 * 1024
COMPRESSION_LEVEL = 1


class _Channel(NamedTuple):
    identity: int
    rank: int
    is_end: bool


_ROOM_FOR_ENDS = 4096


class RecordingWriter:
    """Appends frames to a recording in the given order. Nothing is on disk before :meth:`flush`.

    When :meth:`append` or :meth:`flush` cannot write, the writer becomes :attr:`failed`: frames since the last
    successful flush are forgotten, and the file ends where it ended then. :meth:`recover` makes it usable again.

    ``run_id`` is the run's identity, see :attr:`offloop.bus.RunInfo.id`. ``about`` is further metadata. With ``resume``
    it continues the attempt's recording after its last check record, or raises RecordingError if it is another one's.
    RunDirectoryError means that the file cannot be created, opened or written."""

    def __init__(
        self,
        path: Path,
        run: str,
        attempt: int,
        run_id: str | None = None,
        about: Mapping[str, str] = MappingProxyType({}),
        *,
        resume: bool = False,
    ) -> None:
        self.path = path
        self._metadata = {"run": run, "attempt": str(attempt), "protocol_version": str(PROTOCOL_VERSION)}
        self._metadata |= ({} if run_id is None else {"id": run_id}) | dict(about)
        self._compress = zstandard.ZstdCompressor(level=COMPRESSION_LEVEL).compress
        self._write_error: str | None = None
        self._closed = False
        self._size = 0
        # Contents of the file.
        self._identities: dict[str, int] = {}
        self._last_identity = 0
        self._positions: dict[int, Position] = {}
        self._total = 0
        self._forget()
        try:
            new = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._descriptor = open_file(path, os.O_RDWR) if resume else os.open(path, new, 0o600)
        except OSError as error:
            raise self._failure("opened" if resume else "created", error) from None
        try:
            if resume:
                self._take_over()
            else:
                self._put(self._front())
        except BaseException as error:
            os.close(self._descriptor)
            if not resume:
                path.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise self._failure("written" if resume else "created", error) from None
            raise

    def _failure(self, what: str, error: OSError) -> RunDirectoryError:
        return RunDirectoryError(f"the recording {self.path} cannot be {what}: {error.strerror}", path=self.path)

    def _forget(self) -> None:
        self._buffer = bytearray()
        self._channels: dict[bytes, _Channel] = {}
        self._times: list[int] = []
        self._topics: dict[int, str] = {}
        self._reached: dict[int, tuple[int, int, int, bool]] = {}
        self._appended = 0

    def _front(self) -> bytes:
        front = FRONT + records.encode(mcap.records.Metadata(name=PROFILE, metadata=self._metadata))
        return front + self._check_record(front).encode()

    def _take_over(self) -> None:
        """Continue after the last check record: later bytes were never acknowledged."""
        front = self._front()
        beginning = os.pread(self._descriptor, len(front), 0)
        if len(beginning) < len(front) and front.startswith(beginning):
            # It was created just before the crash.
            self._put(front)
            return
        last: CheckRecord | None = None
        with contextlib.closing(FileSource(self.path, follow=False)) as file:
            for head in walk(file):
                if head.check is not None:
                    last, self._size = head.check, head.end
                    self._identities.update({topic: identity for identity, topic in last.topics.items()})
        if last is None:
            raise RecordingError(
                f"{self.path} is not a recording: move it away, or start the run under another name", path=self.path
            )
        expected, found = ([said.get(key) for key in ("run", "attempt")] for said in (self._metadata, last.metadata))
        if found != expected:
            raise RecordingError(
                f"{self.path} holds run {found[0]!r}, attempt {found[1]}, and not run {expected[0]!r}, "
                f"attempt {expected[1]}: move it away, or start the run under another name",
                path=self.path,
            )
        if (version := last.metadata.get("protocol_version")) != str(PROTOCOL_VERSION):
            raise RecordingError(
                f"{self.path} is of protocol version {version}, this offloop writes {PROTOCOL_VERSION}: continue it "
                "with the version of offloop that began it, or start the run under another name",
                path=self.path,
            )
        self._last_identity = max(self._identities.values(), default=0)
        self._metadata, self._positions, self._total = last.metadata, dict(last.positions), last.total
        os.ftruncate(self._descriptor, self._size)

    @property
    def written(self) -> int:
        return self._total + self._appended

    @property
    def size(self) -> int:
        """Number of flushed bytes, in whole records: the offset of the next chunk."""
        return self._size

    @property
    def positions(self) -> dict[int, Position]:
        return dict(self._positions)

    @property
    def failed(self) -> bool:
        """A write failed: :meth:`recover` must succeed before the next one."""
        return self._write_error is not None

    def append(self, topic: bytes, seq: int, base_seq: int, time: int, body: bytes) -> None:
        """Append one frame. ``topic`` has no delimiter; ``time`` is the event's, in nanoseconds since 1970.

        Raises OSError or RunDirectoryError: a full chunk cannot be written; ProtocolError: ``topic`` is invalid, or one
        too many for the file."""
        self.append_all([(topic, seq, time, body)], base_seq)

    def append_all(self, events: list[tuple[bytes, int, int, bytes]], base_seq: int) -> None:
        """Append consecutive frames of one rank: topic, ``seq``, time, body of each. ``base_seq`` is the last one's."""
        channels, buffer = self._channels, self._buffer
        pack, opcode, head = records.MESSAGE.pack, records.OP_MESSAGE, records.MESSAGE.size - records.HEAD.size
        for topic in sorted({event[0] for event in events} - channels.keys()):
            self._open_channel(topic)
        current = None
        for topic, seq, time, body in events:
            if topic != current:
                channel, current = channels[topic], topic
            buffer += pack(opcode, len(body) + head, channel.identity, seq & 0xFFFFFFFF, time, time)
            buffer += body
        self._times += events[0][2], time
        self._reached[channel.rank] = (seq, base_seq, time, channel.is_end)
        self._appended += len(events)
        if len(buffer) >= CHUNK_BYTES:
            self.flush()

    def has_room_for(self, topic: bytes) -> bool:
        """Return whether the topic is known or can be added, with room left for the ends of ranks."""
        return self._last_identity < MAX_TOPICS - _ROOM_FOR_ENDS or topic.decode() in self._identities

    def _open_channel(self, topic: bytes) -> None:
        """Add a topic to the chunk: each chunk has its own channels, so that it can be read alone."""
        self._check_usable()
        parsed = parse_topic(topic)
        name = topic.decode()
        identity = self._identities.get(name)
        if identity is None:
            if self._last_identity == MAX_TOPICS:
                raise ProtocolError(f"a recording holds at most {MAX_TOPICS} topics, so {name!r} does not fit")
            identity = self._last_identity = self._last_identity + 1
            self._identities[name] = identity
            self._topics[identity] = name
        self._buffer += records.encode(records.channel_record(identity, name))
        self._channels[topic] = _Channel(identity, parsed.rank, parsed.name == END)

    def flush(self) -> None:
        """Write the chunk in progress, so that readers see all appended frames.

        Raises OSError: the disk failed; RunDirectoryError: the file is gone, or an earlier write failed."""
        self._check_usable()
        with self._note_write_errors():
            self._check_present()
            if self._appended:
                self._write_chunk()

    def _write_chunk(self) -> None:
        data = self._buffer
        chunk = records.encode_chunk(data, self._compress(data), min(self._times), max(self._times))
        check = self._check_record(chunk)
        self._put(chunk + check.encode())
        self._positions, self._total = check.positions, check.total
        self._forget()

    def _check_record(self, part: bytes = b"") -> CheckRecord:
        reached = {rank: Position(*position) for rank, position in self._reached.items()}
        positions, total = {**self._positions, **reached}, self._total + self._appended
        return CheckRecord(self._size, self._total, total, zlib.crc32(part), self._metadata, self._topics, positions)

    def _put(self, data: bytes) -> None:
        """Write all of ``data`` after the last good byte, or nothing."""
        rest, offset = memoryview(data), self._size
        try:
            while rest:
                count = os.pwrite(self._descriptor, rest, offset)
                rest, offset = rest[count:], offset + count
        except OSError:
            # Readers must not see an incomplete chunk, because another one takes its place later.
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
            raise
        self._size = offset

    @contextlib.contextmanager
    def _note_write_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RunDirectoryError) as error:
            self._write_error = str(error)
            for name in self._topics.values():
                del self._identities[name]
            self._forget()
            raise

    def _check_usable(self) -> None:
        if self._closed:
            raise RunDirectoryError(f"the recording {self.path} is closed", path=self.path)
        if self._write_error is not None:
            raise RunDirectoryError(f"the recording {self.path} cannot be written: {self._write_error}", path=self.path)

    def _check_present(self) -> None:
        try:
            present = os.path.samestat(os.stat(self.path), os.fstat(self._descriptor))
        except FileNotFoundError:
            present = False
        if not present:
            raise RunDirectoryError(f"the recording {self.path} is gone", path=self.path)

    def recover(self) -> None:
        """Truncate a failed writer's file at its last good byte, and write a check record. Raise OSError on failure."""
        if self._closed or self._write_error is None:
            return
        try:
            self._check_present()
        except RunDirectoryError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path)) from None
        end = self._size
        os.ftruncate(self._descriptor, end)
        # A check record may fit where a chunk does not; then the writer would recover and fail in turns. This padding
        # needs as much room as a chunk, and readers skip it.
        self._put(records.HEAD.pack(records.OP_PADDING, CHUNK_BYTES) + bytes(CHUNK_BYTES))
        os.ftruncate(self._descriptor, end)
        self._size = end
        self._put(self._check_record().encode())
        self._write_error = None

    def discard(self) -> None:
        if not self._closed:
            self._closed = True
            os.close(self._descriptor)
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Flush, write the footer and close the file. A failed writer only closes it. Further calls have no effect.

        Raises OSError: the disk failed; RunDirectoryError: the file is gone. The file is closed in any case."""
        if self._closed:
            return
        try:
            if self._write_error is None:
                self.flush()
                # A second check record, in case the last chunk's is damaged later.
                self._put(self._check_record().encode())
                self._put(BACK)
                os.fsync(self._descriptor)
        finally:
            self._closed = True
            os.close(self._descriptor)
