"""Interface of all streams of a run: live, recorded, replayed or simulated."""

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

SNAPSHOTS_PER_TURN = 256  # after so many snapshots without a wait, other tasks of the event loop run


class RunStream:
    """Snapshots of a run in order, by ``async for``, and further data of the run.

    The values here are those of given snapshots, such as a list, and defaults for all other streams."""

    run_name: str = "run"
    run_id: str | None = None
    attempt: int = 1
    run_dir: Path | None = None  # the run's directory, if it is on this machine
    recording: Path | None = None  # the recording, if all of it is in a file on this machine
    on_checkpoint: Callable[[CheckpointMark], object] = staticmethod(lambda mark: None)
    """Called at each checkpoint mark, between the snapshots before and after it."""
    name_sender: Callable[[], str | None] = staticmethod(lambda: None)
    """Returns the sender of a command that has no reason. Called when a snapshot sends one."""

    def __init__(self, snapshots: Iterable[Snapshot] | AsyncIterable[Snapshot] = ()) -> None:
        self._snapshots = snapshots

    def __aiter__(self) -> AsyncGenerator[Snapshot, None]:
        return _all_of(self._snapshots) if isinstance(self._snapshots, AsyncIterable) else in_turns(self._snapshots)

    async def read(
        self, events: Collection[Event], after: Mapping[int, tuple[int, int]]
    ) -> AsyncGenerator[Sequence[Snapshot], None]:
        """Yield snapshots in groups. Those of other events, and those up to the position ``after``, may be left out."""
        async with contextlib.aclosing(self.__aiter__()) as snapshots:
            async for snapshot in snapshots:
                yield (snapshot,)

    def skip_to(self, offset: int, positions: Mapping[int, tuple[int, int]]) -> None:
        """Start at an offset of :attr:`recording`, the end of a check record with these ``(seq, base_seq)`` by rank.

        Must be called before anything is read."""

    @property
    def ending(self) -> Ending | None:
        return None

    @property
    def gaps(self) -> Sequence[Gap]:
        """Events that are lost for good, so far."""
        return ()

    @property
    def damage(self) -> str | None:
        """Unreadable places of the recording, with their offsets."""
        return None

    @property
    def outcomes(self) -> Sequence[Outcome]:
        """Known outcomes of the commands sent through its snapshots."""
        return ()

    @property
    def commander(self) -> Callable[..., Outcome] | None:
        """Function that sends a command from any thread and waits for its outcome; ``None`` if the run takes none."""
        return None

    def answered(self) -> Sequence[Outcome]:
        """Return the commands answered so far, of all senders, in order. Any thread may call it."""
        return ()

    def checkpoints(self) -> Sequence[CheckpointMark]:
        """Return the checkpoints saved and loaded so far, in order. Any thread may call it."""
        return ()

    def host_windows(self) -> Sequence[HostWindow]:
        """Return the hosts' windows since the last call, each host's in order. One thread at a time may call it."""
        return ()

    def ask_for(self, demand: Demand, barrier_events: Iterable[Event] = ()) -> None:
        """Reduce the demand."""


def as_stream(snapshots: Iterable[Snapshot] | AsyncIterable[Snapshot]) -> RunStream:
    return snapshots if isinstance(snapshots, RunStream) else RunStream(snapshots)


async def _all_of(snapshots: AsyncIterable[Snapshot]) -> AsyncGenerator[Snapshot, None]:
    async for snapshot in snapshots:
        yield snapshot


async def in_turns(items: Iterable[Item], per_turn: int = SNAPSHOTS_PER_TURN) -> AsyncGenerator[Item, None]:
    """Iterate, and let other tasks of the event loop run now and then."""
    import asyncio

    for count, item in enumerate(items, 1):
        yield item
        if count % per_turn == 0:
            await asyncio.sleep(0)
