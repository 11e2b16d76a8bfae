"""What a callback logs over a stream of snapshots, call by call."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgpack

from offloop.bus.protocol.snapshot import Snapshot
from offloop.consumers import Callback, Logger
from offloop.consumers.api.view import view_for


class CallLog(Logger):
    """A logger that keeps every call by itself: metrics as ``[step, event, metrics]``."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[Any]] = []
        self.hyperparameters: list[dict[str, Any]] = []
        self._handled: Snapshot | None = None

    def begin(self, state: Snapshot) -> None:
        super().begin(state)
        self._handled = state

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        super().log_metrics(metrics, step)
        assert self._handled is not None
        used = self._handled.timestamp.batch.value if step is None else step
        if metrics:
            self.calls.append([used, self._handled.event.name, dict(metrics)])

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        super().log_hyperparameters(hyperparameters)
        self.hyperparameters.append(dict(hyperparameters))


def handle(callback: Callback, snapshots: Iterable[Snapshot], logger: Logger) -> Logger:
    """Shows a callback what it requests of each snapshot, as a consumer does."""
    for snapshot in snapshots:
        seen = view_for(callback.demand(), snapshot)
        if seen is not None:
            logger.begin(seen)
            callback.run_event(seen.event, seen, logger)
            seen.release()
    return logger


def calls_of(callback: Callback, snapshots: Iterable[Snapshot]) -> CallLog:
    """Every log call that a callback makes over a stream."""
    logger = CallLog()
    for snapshot in snapshots:
        if snapshot.event in callback.demand().events:
            logger.begin(snapshot)
            callback.run_event(snapshot.event, snapshot, logger)
    return logger


def goes_on_alike(make: Callable[[], Callback], snapshots: Sequence[Snapshot], step: int = 1) -> None:
    """Kills a consumer at every so many places of a stream, and finds that the next one logs the rest alike."""
    expected = calls_of(make(), snapshots).calls
    assert expected
    for place in range(1, len(snapshots), step):
        first, second = make(), make()
        before = calls_of(first, snapshots[:place]).calls
        second.load_state_dict(msgpack.unpackb(msgpack.packb(first.state_dict()), strict_map_key=False))
        assert before + calls_of(second, snapshots[place:]).calls == expected
