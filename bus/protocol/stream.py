"""The interface of all streams of a run: live, recorded, replayed or simulated."""

import contextlib
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from offloop.bus.protocol.host_windows import HostWindow
from offloop.bus.protocol.order import CheckpointMark, Ending, Gap
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.commands import Outcome
from offloop.bus.types.demand import Demand
from offloop.bus.types.event import Event

Item = TypeVar("Item")

SNAPSHOTS_PER_TURN = 256
"""After how many snapshots without a wait other tasks of the event loop have their turn."""


class RunStream:
    """The snapshots of a run in order, by ``async for``, and what else is known of the run. What a kind of stream does
    not know, or cannot do, is as it is here: for given snapshots, such as a list."""

    run_name: str = "run"
    run_id: str | None = None
    attempt: int = 1
    first_rank: int = 0
    """The rank that stands for the others."""
    run_dir: Path | None = None
    """The run's directory; ``None`` where there is none, or on another machine."""
    recording: Path | None = None
    """The recording, where all of it is read from a file on this machine."""
    on_checkpoint: Callable[[CheckpointMark], object] = staticmethod(lambda mark: None)
    """Called where the training has saved or loaded a checkpoint, between the snapshots before and after that."""
    name_sender: Callable[[], str | None] = staticmethod(lambda: None)
    """Who sends a command through a snapshot, where it gives no reason: asked within that call."""

    def __init__(self, snapshots: Iterable[Snapshot] | AsyncIterable[Snapshot] = ()) -> None:
        self._snapshots = snapshots

    def __aiter__(self) -> AsyncGenerator[Snapshot, None]:
        return _all_of(self._snapshots) if isinstance(self._snapshots, AsyncIterable) else in_turns(self._snapshots)

    async def read(
        self, events: Collection[Event], after: Mapping[int, tuple[int, int]]
    ) -> AsyncGenerator[Sequence[Snapshot], None]:
        """The snapshots, together those that are ready together; those of other events than ``events``, and those up to
        ``after``, of each rank ``(seq, base_seq)``, may be left out."""
        async with contextlib.aclosing(self.__aiter__()) as snapshots:
            async for snapshot in snapshots:
                yield (snapshot,)

    def skip_to(self, offset: int, positions: Mapping[int, tuple[int, int]]) -> None:
        """Begins at an offset of :attr:`recording`, the end of a check record, which is at these positions: of each
        rank ``(seq, base_seq)``. To be called before anything is read."""

    @property
    def ending(self) -> Ending | None:
        """The run's ending; ``None`` until then."""
        return None

    @property
    def gaps(self) -> Sequence[Gap]:
        """The events that are lost for good, as far as it was read."""
        return ()

    @property
    def damage(self) -> str | None:
        """The unreadable places of the recording with their offsets."""
        return None

    @property
    def outcomes(self) -> Sequence[Outcome]:
        """The outcomes of the commands that were sent through its snapshots, as far as they are known."""
        return ()

    @property
    def commander(self) -> Callable[..., Outcome] | None:
        """Sends a command from any thread and waits for its outcome; ``None`` where the run takes none."""
        return None

    def answered(self) -> Sequence[Outcome]:
        """The commands that the training has answered, from all senders, in order, as far as it was read; may be
        called from another thread."""
        return ()

    def checkpoints(self) -> Sequence[CheckpointMark]:
        """The checkpoints that were saved and loaded, in order, as far as it was read; may be called from another
        thread."""
        return ()

    def host_windows(self) -> Sequence[HostWindow]:
        """The windows of the hosts of a run on several hosts since the last call, each host's in order; may be called
        from another thread, but from one at a time."""
        return ()

    def ask_for(self, demand: Demand, barrier_events: Iterable[Event] = ()) -> None:
        """Asks the training for less than before."""


def as_stream(snapshots: Iterable[Snapshot] | AsyncIterable[Snapshot]) -> RunStream:
    """The stream of these snapshots: itself, or one of which nothing else is known."""
    return snapshots if isinstance(snapshots, RunStream) else RunStream(snapshots)


async def _all_of(snapshots: AsyncIterable[Snapshot]) -> AsyncGenerator[Snapshot, None]:
    async for snapshot in snapshots:
        yield snapshot


async def in_turns(items: Iterable[Item], per_turn: int = SNAPSHOTS_PER_TURN) -> AsyncGenerator[Item, None]:
    """Iterates without waiting, but lets other tasks of the event loop run."""
    import asyncio

    for count, item in enumerate(items, 1):
        yield item
        if count % per_turn == 0:
            await asyncio.sleep(0)
