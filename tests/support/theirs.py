"""Callbacks of other frameworks in a consumer: what their tests have in common."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from offloop.bus.protocol.snapshot import Snapshot
from offloop.consumers import Callback
from offloop.consumers.testing import Logged, MemoryStream


def trained(*callbacks: Callback, epochs: int, **options: Any) -> Logged:
    """What callbacks log and command in a made-up training of so many epochs."""
    stream = MemoryStream(max_duration=f"{epochs}ep", **options)
    with stream.attach(*callbacks) as logged:
        stream.train()
        stream.finish()
    return logged


def continued(make: Callable[[], Callback], stream: MemoryStream, at: int) -> tuple[Any, Any, Any]:
    """A callback that handles a whole training, one that handles so many events, and one that continues with its
    state."""
    whole, first, second = make(), make(), make()
    snapshots = list(stream)
    for _ in run(whole, snapshots):
        pass
    for _ in run(first, snapshots[:at]):
        pass
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    for _ in run(second, snapshots[at:]):
        pass
    return whole, first, second


def run(callback: Callback, snapshots: list[Snapshot]) -> Iterator[Snapshot]:
    """Gives a callback the snapshots that it wants, one after the other."""
    from offloop.consumers import Logger

    logger, wanted = Logger(), callback.wanted_events()
    for snapshot in snapshots:
        if snapshot.event in wanted:
            logger.begin(snapshot)
            callback.run_event(snapshot.event, snapshot, logger)
            yield snapshot


def rows(path: Path) -> list[dict[str, str]]:
    """The rows of a file with commas."""
    import csv

    with path.open() as file:
        return list(csv.DictReader(file))
