"""Recordings as tests write, spoil and read them, also with the official library."""

import io
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mcap.reader
import mcap.writer

from offloop.bus.protocol.frames import Topic, event_encoder, pack_map
from offloop.bus.recording.reader import Record, RecordingReader
from offloop.bus.recording.writer import RecordingWriter

TOPICS = [Topic("r", name, rank) for name in ("batch_end", "epoch_end", "loss", "$end") for rank in (0, 1)]

BATCH_END = TOPICS[0].encode()[:-1]


def body(topic: Topic, seq: int, attempt: int = 1) -> bytes:
    frame = event_encoder(topic, attempt)(seq, seq, seq, (0, 0, seq) + (0,) * 11, None, {"loss": 1 / seq}, pack_map({}))
    return frame[frame.index(b"\0") + 1 :]


def append(writer: RecordingWriter, seq: int, topic: Topic = TOPICS[0]) -> Record:
    """Append one event; return it as it will be read."""
    name = topic.encode()[:-1]
    writer.append(name, seq, seq, seq, body(topic, seq))
    return name.decode(), body(topic, seq)


def crash(writer: RecordingWriter) -> None:
    """End a writer as a kill does: without a footer."""
    os.close(writer._descriptor)
    writer._closed = True


def read(path: Path) -> list[Record]:
    with RecordingReader(path) as reader:
        return [record for chunk in reader.read() for record in chunk]


def official(path: Path, seeking: bool = True) -> list[Record]:
    """Read the records with MCAP's own reader, which checks every checksum."""

    class Unseekable(io.BytesIO):
        def seekable(self) -> bool:
            return False

    with (io.BytesIO if seeking else Unseekable)(path.read_bytes()) as file:
        reader = mcap.reader.make_reader(file, validate_crcs=True)
        return [(channel.topic, message.data) for _, channel, message in reader.iter_messages(log_time_order=False)]


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    """Limit the size of files, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def spoil(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0xFF
    path.write_bytes(data)
