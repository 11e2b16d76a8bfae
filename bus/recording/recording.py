"""Recordings as people use them: iterate over a file's snapshots."""

import itertools
import os
import weakref
from collections.abc import AsyncGenerator, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from offloop.bus.errors import RecordingError, RunNotFoundError
from offloop.bus.protocol.frames import CHECKPOINT, COMMAND, END
from offloop.bus.protocol.order import CheckpointMark, Ending, Gap, StreamOrder
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.protocol.stream import RunStream, in_turns
from offloop.bus.recording.reader import RecordingReader
from offloop.bus.runs.directory import RUN_FILE, read_run
from offloop.bus.types.commands import Outcome
from offloop.bus.types.event import Event


class Recording(RunStream):
    """The recorded stream of one attempt of a run; iterate over it, with ``for`` or ``async for``, for its snapshots.
    The file is open while an iteration is at work; ``with`` closes it where one is left before its end.

    ``path`` is a recording, or a run's directory (then ``attempt`` chooses one; the newest by default). The file may
    belong to a live run, or be truncated: every complete record is read, and ``damage`` names the rest.

    Raises RecordingError: there is no such file, or it is not a recording."""

    ending: Ending | None = None
    """The run's ending, after an iteration to the end of the file; ``lost`` when the file does not have it."""
    damage: str | None = None
    """The unreadable places with their offsets, after an iteration; ``None`` for an intact file."""

    def __init__(self, path: str | os.PathLike[str], attempt: int | None = None) -> None:
        self.path = self.recording = _find(Path(path), attempt)
        with RecordingReader(self.path) as reader:
            # The name stands in a metadata record before the first chunk, and in every check record.
            for _ in reader.read():
                if reader.metadata:
                    break
            metadata = reader.metadata
        try:
            self.run_name = metadata["run"]
            self.attempt = int(metadata["attempt"])
            self.run_id = metadata.get("id")
            """The run's identity: see :attr:`offloop.bus.RunInfo.id`; ``None`` in a recording that does not say
            it."""
        except (KeyError, ValueError):
            raise RecordingError(
                f"{self.path} is not a recording: it does not say of which run; nothing in it can be read",
                path=self.path,
            ) from None
        reason = metadata.get("flight")
        self.flight = None if reason is None else (reason, metadata.get("flight_detail", ""))
        """Why a flight recorder wrote it, in one word and in several; ``None`` for every other recording."""
        self.run_dir = self.path.parent
        self._iterations: weakref.WeakSet[Generator[list[Snapshot], None, None]] = weakref.WeakSet()
        self._order = StreamOrder(self.run_name, self.attempt, None)
        self._begin = 0
        self._begin_after: Mapping[int, tuple[int, int]] = {}

    def __iter__(self) -> Iterator[Snapshot]:
        return self.snapshots()

    def close(self) -> None:
        """Ends all iterations and closes their files; a new iteration opens the file again."""
        for one in list(self._iterations):
            one.close()

    def __enter__(self) -> "Recording":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __aiter__(self) -> AsyncGenerator[Snapshot, None]:
        return in_turns(self.snapshots())

    def skip_to(self, offset: int, positions: Mapping[int, tuple[int, int]]) -> None:
        """As :meth:`offloop.bus.protocol.stream.RunStream.skip_to`, in every iteration from now on."""
        self._begin, self._begin_after = offset, positions

    def read(
        self, events: Collection[Event], after: Mapping[int, tuple[int, int]]
    ) -> AsyncGenerator[Sequence[Snapshot], None]:
        """As :meth:`batches`."""
        return in_turns(self.batches(events, after=after), 1)

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """Events that are missing in the recording, as far as the iteration has come."""
        return tuple(self._order.gaps)

    def snapshots(
        self, events: Iterable[Event] | None = None, *, after: Mapping[int, tuple[int, int]] | None = None
    ) -> Iterator[Snapshot]:
        """The snapshots of the given events, in the order in which the broker sent them out; all when ``events`` is
        ``None``. ``after`` is the position to continue from: of each rank ``(seq, base_seq)`` of the last snapshot that
        need not come again."""
        return itertools.chain.from_iterable(self.batches(events, after=after))

    def batches(
        self, events: Iterable[Event] | None = None, *, after: Mapping[int, tuple[int, int]] | None = None
    ) -> Iterator[list[Snapshot]]:
        """As :meth:`snapshots`, many at a time. What else the recording says, such as :attr:`gaps`, comes between the
        batches."""
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
        """The snapshots of one rank from one place of the file to another, many at a time: ``begin`` and ``end`` are
        offsets at which parts of the file begin, and the part at ``end`` is the last one."""
        order, topics = StreamOrder(self.run_name, self.attempt, None), f"/{rank}"
        with RecordingReader(self.path) as reader:
            reader.position = begin
            for records in reader.read():
                if reader.position > end:
                    return
                for batch in order.from_records(record for record in records if record.topic.endswith(topics)):
                    if not isinstance(batch, CheckpointMark):
                        yield batch

    def answered(self) -> tuple[Outcome, ...]:
        """The commands that the training answered, in order, as far as the iteration has come."""
        return tuple(self._order.outcomes)

    def checkpoints(self) -> tuple[CheckpointMark, ...]:
        """The checkpoints that were saved and loaded, in order, as far as the iteration has come."""
        return tuple(self._order.checkpoints)

    def read_endings(self) -> list[Ending]:
        """The endings of the ranks that have ended; faster than an iteration."""
        return self._read_marks(END).endings

    def has_all_ranks(self, found: Collection[int]) -> bool:
        """These are as many ranks as published to this recording's broker, by those that have ended."""
        order = self._read_marks(END)
        return bool(order.endings) and len(found) >= order.expected_ranks

    def read_commands(self) -> list[Outcome]:
        """The commands that its trainer answered, in order, and what became of each; faster than an iteration."""
        return self._read_marks(COMMAND).outcomes

    def read_checkpoints(self) -> list[CheckpointMark]:
        """The checkpoints that were saved and loaded, in order; faster than an iteration."""
        return self._read_marks(CHECKPOINT).checkpoints

    def _read_marks(self, name: str) -> StreamOrder:
        order = StreamOrder(self.run_name, self.attempt, None)
        with RecordingReader(self.path) as reader:
            for records in reader.read():
                for record in records:
                    if f"/{name}/" in record.topic:
                        order.from_record(record.topic, record.body)
        return order

    def __repr__(self) -> str:
        return f"<Recording {self.path} of {self.run_name}, attempt {self.attempt}>"


def _find(path: Path, attempt: int | None) -> Path:
    if not path.is_dir():
        return path
    if not (path / RUN_FILE).exists():
        raise RecordingError(
            f"{path} is a directory without a {RUN_FILE}, so it is not a run; 'offloop runs' lists the runs", path=path
        )
    run = read_run(path)
    for candidate in run.attempts:
        if attempt == candidate.number:
            return candidate.recording
    if attempt is not None:
        numbers = ", ".join(str(candidate.number) for candidate in run.attempts)
        raise RunNotFoundError(f"run {run.name!r} has no attempt {attempt}; there are {numbers}", run=run.name)
    return run.recording
