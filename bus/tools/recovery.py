"""A clean recording from a damaged one, or from one that was cut off."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from bus.errors import ConfigurationError, ProtocolError, RecordingError, RunDirectoryError
from bus.printing import Damage
from bus.protocol.frames import CUT, END, Topic, decode_event, parse_topic
from bus.protocol.numbering import Numbering
from bus.protocol.order import Gap
from bus.recording.reader import Record, RecordingReader
from bus.recording.writer import RecordingWriter
from bus.runs.directory import is_locked, read_run


@dataclass(frozen=True)
class Recovery:
    """What :func:`recover` found and wrote."""

    path: Path
    """The recording that was written."""
    records: int
    """Events and marks that were kept."""
    damage: tuple[str, ...]
    """What was damaged or torn off, each with its offset in the original."""
    gaps: tuple[Gap, ...]
    """Numbers that are missing in what was kept, of each rank; also those that were never recorded."""
    lost: bool
    """Whether the original held more than was kept."""
    ended: bool
    """Whether it tells how the run ended."""


def recovered_path(recording: Path) -> Path:
    """Where a recovered recording is written when nothing else is said."""
    return recording.with_name(f"{recording.stem}.recovered{recording.suffix}")


def recover(path: Path, output: Path) -> Recovery:
    """Writes everything that is whole in the recording ``path`` to ``output``, in order, with index and footer. The
    original is never changed.

    Raises:
        ConfigurationError: ``output`` exists, or the recording is that of a live run.
        RecordingError: ``path`` is not a recording, or nothing in it says of which run it is.
        RunDirectoryError: ``output`` cannot be written.
    """
    if os.path.lexists(output):
        raise ConfigurationError(f"{output} exists: choose another file with '--output', or move it away")
    with RecordingReader(path) as reader:
        if _is_live(path):
            raise ConfigurationError(f"{path} is being written by a live run: wait until the run has ended")
        kept = _Kept()
        chunks = reader.read()
        first = next(chunks, [])
        run, attempt = _identity(reader, path)
        writer = RecordingWriter(output, run, attempt, reader.metadata.get("id"))
        try:
            kept.copy(first, writer)
            for records in chunks:
                kept.copy(records, writer)
            writer.close()
        except BaseException as error:
            with contextlib.suppress(OSError, RunDirectoryError):
                writer.close()
            output.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise RunDirectoryError(f"{output} cannot be written: {error.strerror}") from None
            raise
        kept.note_ends(reader)
        cut = [reader.cut] if reader.cut else []
        damage = [*reader.damage, *cut, *kept.damage.lines(), *kept.numbering.problems]
        lost = reader.lost or bool(kept.damage)
    return Recovery(output, kept.count, tuple(damage), tuple(kept.gaps), lost, kept.ended)


class _Kept:
    """What goes into the new recording."""

    def __init__(self) -> None:
        self.count = 0
        self.damage = Damage()
        self.gaps: list[Gap] = []
        self.ended = False
        self.numbering = Numbering()
        self._topics: dict[str, tuple[bytes, Topic]] = {}

    def copy(self, records: list[Record], writer: RecordingWriter) -> None:
        """Appends the records that are messages of the protocol, and names the others."""
        for name, body in records:
            try:
                place = self._topics.get(name)
                if place is None:
                    place = self._topics[name] = (name.encode(), parse_topic(name.encode()))
                event = decode_event(body)
            except ProtocolError as error:
                self.damage.add(f"a record of {name!r} is left out: {error}")
                continue
            topic, parsed = place
            first = event.fields.get("first") if parsed.name == CUT else None
            self._note_missing(parsed.rank, first if type(first) is int else event.seq)
            if event.seq > self.numbering.last(parsed.rank).seq:
                self.numbering.follow(parsed.rank, parsed.name, event.seq, event.base_seq)
            writer.append(topic, event.seq, event.base_seq, event.time, body)
            self.count += 1
            self.ended = self.ended or parsed.name == END

    def _note_missing(self, rank: int, number: int) -> None:
        expected = self.numbering.last(rank).seq + 1
        if number > expected:
            self.gaps.append(Gap(rank, expected, number - 1))

    def note_ends(self, reader: RecordingReader) -> None:
        """Adds what is missing at the end, as far as the marks of the recording say it."""
        for rank, position in reader.positions.items():
            self._note_missing(rank, position.seq + 1)


def _identity(reader: RecordingReader, path: Path) -> tuple[str, int]:
    try:
        return reader.metadata["run"], int(reader.metadata["attempt"])
    except (KeyError, ValueError):
        raise RecordingError(
            f"{path} is not a recording: it does not say of which run; nothing in it can be recovered"
        ) from None


def _is_live(path: Path) -> bool:
    folder = path.absolute().parent
    if not is_locked(folder):
        return False
    try:
        return read_run(folder).recording.name == path.name
    except RunDirectoryError:
        return True
