"""A run's stream whose callbacks change nothing."""

import copy
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence

from offloop.bus.protocol.snapshot import CommandSender, Snapshot
from offloop.bus.protocol.stream import RunStream
from offloop.bus.types.event import Event


def with_commands_to(stream: RunStream, keep: CommandSender) -> RunStream:
    """Return a copy of the stream that passes the commands of its snapshots to ``keep``."""
    kept = copy.copy(stream)
    read_all = kept.read

    async def read(
        events: Collection[Event], after: Mapping[int, tuple[int, int]]
    ) -> AsyncGenerator[Sequence[Snapshot], None]:
        async for batch in read_all(events, after):
            for snapshot in batch:
                snapshot.bind(keep)
            yield batch

    kept.read = read  # type: ignore[method-assign]
    return kept


def without_effects(stream: RunStream, keep: CommandSender) -> RunStream:
    """Return a copy of the stream for callbacks that find no directory, and whose commands go to ``keep``."""
    kept = with_commands_to(stream, keep)
    kept.run_dir = None
    return kept
