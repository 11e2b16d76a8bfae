"""Recordings as users read them: iterate over a file's snapshots."""

import itertools
import os
import weakref
from collections.abc import AsyncGenerator, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from offloop.bus.errors import RecordingError, RunNotFoundError
from offloop.bus.protocol.frames import CHECKPOINT, COMMAND, END
from offloop.bus.protocol.order import BATCH, CheckpointMark, Ending, Gap, StreamOrder
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.protocol.stream import SNAPSHOTS_PER_TURN, RunStream, in_turns
from offloop.bus.recording.reader import RecordingReader
from offloop.bus.runs.directory import RUN_FILE, read_run
from offloop.bus.types.commands import Outcome
from offloop.bus.types.event import Event


class Recording(RunStream):
    """The recorded stream of one attempt. Iterate over it with ``for`` or ``async for``.

    The file may belong to a live run, or be truncated: every complete record is read, and :attr:`damage` names the
    unreadable places. The file is open during an iteration. ``with`` closes it where an iteration is left early.

    Args:
        path: A recording, or a run's directory.
        attempt: The attempt to read from a run's directory, by default the newest.

    Raises:
        RecordingError: The file does not exist, or is not a recording.
    """

    ending: Ending | None = None
    """The run's ending, after an iteration to the end of the file. ``lost`` if the file has none."""
    damage: str | None = None
    """Unreadable places with their offsets, after an iteration. ``None`` for an intact file."""

    def __init__(self, path: str | os.PathLike[str], attempt: int | None = None) -> None:
        self.path: Path = _find(Path(path), attempt)
        self.recording: Path = self.path
        with RecordingReader(self.path) as reader:
            # The name is in a metadata record before the first chunk, and in every check record.
            for _ in reader.read():
                if reader.metadata:
                    break
            metadata = reader.metadata
        try:
            self.run_name: str = metadata["run"]
            self.attempt: int = int(metadata["attempt"])
            self.run_id: str | None = metadata.get("id")
            """The run's identity, see :attr:`offloop.bus.RunInfo.id`. ``None`` in a recording without one."""
        except (KeyError, ValueError):
            what = (
                "is not a recording: it does not name its run, and cannot be read"
                if os.path.getsize(self.path)
                else "is empty: nothing was recorded in it"
            )
            raise RecordingError(f"{self.path} {what}", path=self.path) from None
        reason = metadata.get("flight")
        self.flight: tuple[str, str] | None = None if reason is None else (reason, metadata.get("flight_detail", ""))
        """Why a flight recorder wrote it: one word, and a description. ``None`` for other recordings."""
        self.run_dir: Path = self.path.parent
        self._iterations: weakref.WeakSet[Generator[list[Snapshot], None, None]] = weakref.WeakSet()
        self._order = StreamOrder(self.run_name, self.attempt, None)
        self._begin = 0
        self._begin_after: Mapping[int, tuple[int, int]] = {}

    def __iter__(self) -> Iterator[Snapshot]:
        return self.snapshots()

    def close(self) -> None:
        """End all iterations and close their files. A new iteration opens the file again."""
        for one in list(self._iterations):
            one.close()

    def __enter__(self) -> "Recording":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __aiter__(self) -> AsyncGenerator[Snapshot, None]:
        return in_turns(self.snapshots())

    def skip_to(self, offset: int, positions: Mapping[int, tuple[int, int]]) -> None:
        """Begin all later iterations at this place, see :meth:`offloop.bus.protocol.stream.RunStream.skip_to`."""
        self._begin, self._begin_after = offset, positions

    def read(
        self, events: Collection[Event], after: Mapping[int, tuple[int, int]]
    ) -> AsyncGenerator[Sequence[Snapshot], None]:
        """Iterate asynchronously, as :meth:`batches`."""
        return in_turns(self.batches(events, after=after), SNAPSHOTS_PER_TURN // BATCH)

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """Gaps found by the iteration so far."""
        return tuple(self._order.gaps)

    def snapshots(
        self, events: Iterable[Event] | None = None, *, after: Mapping[int, tuple[int, int]] | None = None
    ) -> Iterator[Snapshot]:
        """Iterate over snapshots in the order in which the broker forwarded them.

        Args:
            events: Events to include, by default all.
            after: Position to continue from: for each rank ``(seq, base_seq)`` of the last snapshot already read.
        """
        return itertools.chain.from_iterable(self.batches(events, after=after))

    def batches(
        self, events: Iterable[Event] | None = None, *, after: Mapping[int, tuple[int, int]] | None = None
    ) -> Iterator[list[Snapshot]]:
        """Iterate as :meth:`snapshots`, in lists. :attr:`gaps` and other marks change between the lists."""
        iteration = self._iterate(events, after)
        self._iterations.add(iteration)
        return iteration

    def _iterate(
        self, events: Iterable[Event] | None, after: Mapping[int, tuple[int, int]] | None
    ) -> Generator[list[Snapshot], None, None]:
        self._order = order = StreamOrder(self.run_name, self.attempt, events, {**self._begin_after, **(after or {})})
        with RecordingReader(self.path) as reader:
            reader.position = self._begin
            for records in reader.read():
                for batch in order.from_records(records):
                    if isinstance(batch, CheckpointMark):
                        self.on_checkpoint(batch)
                    else:
                        yield batch
            problems = [*reader.damage, *([reader.cut] if reader.cut else [])]
        self.damage = "; ".join(problems) or None
        self.ending = order.ending or Ending("lost")

    def part(self, begin: int, end: int, rank: int = 0) -> Iterator[list[Snapshot]]:
        """Iterate over one rank's snapshots, in lists, from offset ``begin`` through the file part at offset ``end``.

        Both are offsets at which file parts begin."""
        order, topics = StreamOrder(self.run_name, self.attempt, None), f"/{rank}"
        with RecordingReader(self.path) as reader:
            reader.position = begin
            for records in reader.read():
                if reader.position > end:
                    return
                for batch in order.from_records(record for record in records if record[0].endswith(topics)):
                    if not isinstance(batch, CheckpointMark):
                        yield batch

    def answered(self) -> tuple[Outcome, ...]:
        """Return the commands that the training answered, in order, up to the iteration's place."""
        return tuple(self._order.outcomes)

    def checkpoints(self) -> tuple[CheckpointMark, ...]:
        """Return the saved and loaded checkpoints, in order, up to the iteration's place."""
        return tuple(self._order.checkpoints)

    def read_endings(self) -> list[Ending]:
        """Return the endings of the finished ranks. Faster than an iteration."""
        return self._read_marks(END).endings

    def read_commands(self) -> list[Outcome]:
        """Return all answered commands, in order, with their outcomes. Faster than an iteration."""
        return self._read_marks(COMMAND).outcomes

    def read_checkpoints(self) -> list[CheckpointMark]:
        """Return all saved and loaded checkpoints, in order. Faster than an iteration."""
        return self._read_marks(CHECKPOINT).checkpoints

    def _read_marks(self, name: str) -> StreamOrder:
        order = StreamOrder(self.run_name, self.attempt, None)
        with RecordingReader(self.path) as reader:
            for records in reader.read():
                for topic, body in records:
                    if f"/{name}/" in topic:
                        order.from_record(topic, body)
        return order

    def __repr__(self) -> str:
        return f"<Recording {self.path} of {self.run_name}, attempt {self.attempt}>"


def _find(path: Path, attempt: int | None) -> Path:
    if not path.is_dir():
        return path
    if not (path / RUN_FILE).exists():
        raise RecordingError(f"{path} is not a run: it has no {RUN_FILE}; 'offloop runs' lists the runs", path=path)
    run = read_run(path)
    for candidate in run.attempts:
        if attempt == candidate.number:
            return candidate.recording
    if attempt is not None:
        numbers = ", ".join(str(candidate.number) for candidate in run.attempts)
        raise RunNotFoundError(f"run {run.name!r} has no attempt {attempt}, only {numbers}", run=run.name)
    return run.recording
