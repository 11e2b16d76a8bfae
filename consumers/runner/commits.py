"""Commits the progress of a runner, and restores that of an earlier one."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from offloop.bus.errors import ConfigurationError, RunDirectoryError
from offloop.bus.printing import say
from offloop.bus.protocol.order import Ending
from offloop.consumers.api.callback import Callback
from offloop.consumers.api.logger import LoggerDestination
from offloop.consumers.delivery.commit import CallbackState, Committed, DestinationState, pack_snapshot, unpack_snapshot
from offloop.consumers.delivery.fanout import Fanout
from offloop.consumers.runner.dispatcher import Dispatcher
from offloop.consumers.runner.state_file import StateFile
from offloop.consumers.runner.statistics import RunnerStatistics
from offloop.consumers.runner.worker import CallbackWorker

_COMMIT_SECONDS = 1.0


class Commits:
    """Keeps the progress of callbacks and destinations in ``progress``; without one, does nothing.

    ``shared`` runs the callbacks that share a stream, ``workers`` the others, which are complete at
    :meth:`restore`. After a destination has failed, or an error has ended the run before its stream, nothing is
    committed: the next consumer begins before that failure. The other destinations may send what they have all the
    same, unless there are workers."""

    def __init__(
        self,
        progress: StateFile | None,
        every: int,
        shared: Dispatcher,
        workers: Sequence[CallbackWorker],
        destinations: Mapping[str, LoggerDestination],
        fanout: Fanout,
        statistics: Callable[[], RunnerStatistics],
    ) -> None:
        self.restored: Committed | None = None
        self.problem: str | None = None  # why the last attempt to commit failed; None after a success
        self._progress = progress
        self._every = every
        self._shared = shared
        self._workers = workers
        self._destinations = destinations
        self._fanout = fanout
        self._statistics = statistics
        self._handled_at_commit = 0
        self._next_commit = 0.0

    def restore(self) -> bool:
        """Restore the committed progress; True if nothing is left to do.

        Raises ConfigurationError: it is of other callbacks or destinations; RecordingError: it is damaged."""
        committed = None if self._progress is None else self._progress.found
        if committed is None:
            return False
        shared, workers = self._shared, self._workers
        _check_same("callbacks", [known.name for known in committed.callbacks], [one.name for one in shared.entries])
        _check_same(
            "callbacks", [known.callback.name for known in committed.workers], [worker.name for worker in workers]
        )
        _check_same("loggers", [known.name for known in committed.destinations], list(self._destinations))
        self.restored = committed
        shared.last = None if committed.last is None else unpack_snapshot(committed.last)
        shared.handled = self._handled_at_commit = committed.handled
        shared.resume_from(committed.positions, committed.callbacks)
        self._fanout.named.update(committed.named)
        if committed.ending is not None:
            return True
        for entry, known in zip(shared.entries, committed.callbacks, strict=True):
            _load(entry.name, entry.callback, known.state)
        for name, state in committed.destinations:
            _load(name, self._destinations[name], state)
        for worker, reached in zip(workers, committed.workers, strict=True):
            worker.resume_at(reached)
            if reached.positions:
                _load(worker.name, worker.callback, reached.callback.state)
        return False

    def commit_if_due(self) -> None:
        """Commit after ``every`` events of the shared stream, or after a second with events."""
        handled = self._shared.handled - self._handled_at_commit
        if handled >= self._every or (handled > 0 and self._is_old):
            self.commit()

    def commit_if_old(self) -> None:
        """Commit after a second, for events that workers have handled."""
        if self._is_old:
            self.commit()

    def commit(self, ending: Ending | None = None) -> None:
        """Commit; ``ending`` says that nothing is left to do. A failure is shown once and tried again."""
        try:
            self.store(ending)
            self.problem = None
        except RunDirectoryError as error:
            if self.problem is None:
                say(f"{error}; continuing, and trying again", err=True)
            self.problem = str(error)

    def store(self, ending: Ending | None = None) -> None:
        """Commit, or raise where :meth:`commit` shows the failure.

        Raises RunDirectoryError: it cannot be stored now; ConfigurationError: the state of a callback or a destination
        cannot be stored."""
        self._handled_at_commit = self._shared.handled
        self._next_commit = time.monotonic() + _COMMIT_SECONDS
        if self._progress is None or self._shared.fatal is not None:
            return
        if self._fanout.failed:
            # A spool leaves out repeated entries by their number, which is stable only with one stream.
            if not self._workers:
                self._fanout.commit()
            return
        shared = self._shared
        with self._fanout.lock:
            callbacks: tuple[CallbackState, ...] | None
            destinations: dict[str, dict[str, Any]] | None
            if ending is None:
                callbacks, destinations = shared.callback_states(), self._fanout.states()
            else:
                callbacks = tuple(CallbackState(one.name, one.errors, one.disabled, {}) for one in shared.entries)
                destinations = {name: {} for name in self._destinations}
            if callbacks is None or destinations is None:
                return
            statistics = self._statistics()
            committed = Committed(
                run_name=shared.context.run_name,
                attempt=shared.context.attempt,
                positions=shared.positions,
                last=None if shared.last is None else pack_snapshot(shared.last),
                handled=shared.handled,
                callbacks=callbacks,
                destinations=tuple(DestinationState(*one) for one in destinations.items()),
                gaps=statistics.gaps,
                ending=ending,
                damage=statistics.damage if ending else None,
                workers=tuple(worker.progress for worker in self._workers),
                named=tuple(sorted(self._fanout.named)),
                run_id=shared.context.run_id,
            )
            self._progress.commit(committed)
            self._fanout.commit()

    @property
    def _is_old(self) -> bool:
        return self._progress is not None and time.monotonic() >= self._next_commit


def _check_same(kind: str, before: list[str], given: list[str]) -> None:
    if before != given:
        raise ConfigurationError(
            f"this consumer began with the {kind} {', '.join(before) or 'none'} and now has "
            f"{', '.join(given) or 'none'}: use the same ones, or choose another '--name'"
        )


def _load(name: str, owner: Callback | LoggerDestination, state: dict[str, Any]) -> None:
    try:
        owner.load_state_dict(state)
    except Exception as error:
        raise ConfigurationError(
            f"{name} cannot continue from what it committed, {type(error).__name__}: {error}; "
            "use the same options, or choose another '--name'"
        ) from error
