"""Passes what was logged to every destination that works."""

import asyncio
import errno
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from offloop.bus import errors
from offloop.bus.errors import OffloopError
from offloop.bus.printing import say
from offloop.bus.protocol.snapshot import Snapshot
from offloop.consumers.api.logger import Logger, LoggerDestination, NonMetrics, Row, RunContext

RAISED = (Exception, asyncio.CancelledError)
"""Errors of callbacks and destinations. A cancelled task of theirs is an error like any other."""

_FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG
_OUR_FOLDERS = str(Path(errors.__file__).parent), str(Path(__file__).parents[1])


class Fanout:
    """Several destinations, by name, for several threads.

    One that raises is shown with its traceback, once, and gets nothing more until it is closed: its output has no
    holes. A ``BrokenPipeError`` (no reader of our output) is not shown: ``on_broken_pipe`` gets it."""

    def __init__(
        self, destinations: Mapping[str, LoggerDestination], on_broken_pipe: Callable[[BrokenPipeError], None]
    ) -> None:
        self._destinations = dict(destinations)
        self._each = tuple(self._destinations.items())
        self._on_broken_pipe = on_broken_pipe
        self._failed: dict[str, LoggerDestination] = {}
        self.only_sends = False  # true while closing, when only servers are left to wait for
        self.named: set[str] = set()  # the hyperparameters that callbacks have logged, which replace those of the run
        self.lock: threading.RLock = threading.RLock()
        """Held while anything is delivered, and by the thread that stores positions from the first to the last,
        so that they belong together."""

    @property
    def names(self) -> list[str]:
        return list(self._destinations)

    @property
    def failed(self) -> tuple[str, ...]:
        return tuple(self._failed)

    def open(self, context: RunContext) -> None:
        """Open all destinations, or none. Raises ConfigurationError."""
        opened: list[LoggerDestination] = []
        try:
            for destination in self._destinations.values():
                destination.check()
            for destination in self._destinations.values():
                destination.open(context)
                opened.append(destination)
        except BaseException:
            for destination in opened:
                destination.close()
            raise

    def deliver(self, logger: Logger, state: Snapshot) -> None:
        """Pass on what was logged during an event, if anything was."""
        rows, non_metrics = logger.take_rows(state), logger.take_non_metrics(state)
        if non_metrics is not None:
            self._deliver_all(rows, non_metrics, state)
        elif rows:
            # As for_each, without its call for each destination: a million events a minute pass here.
            # As "with self.lock", which takes three times as long.
            self.lock.acquire()
            try:
                for name, destination in self._each:
                    try:
                        destination.log_rows(rows, state)
                    except RAISED as error:  # a destination may raise anything, and is shown with its traceback
                        self._fail(name, destination, error)
            finally:
                self.lock.release()

    def _deliver_all(self, rows: list[Row], non_metrics: NonMetrics, state: Snapshot) -> None:
        hyperparameters = non_metrics.hyperparameters

        def deliver(destination: LoggerDestination) -> None:
            if hyperparameters:
                destination.log_hyperparameters(hyperparameters, state)
            if rows:
                destination.log_rows(rows, state)
            for entry in non_metrics.entries:
                destination.log_entry(entry, state)

        with self.lock:
            self.named |= hyperparameters.keys()
            hyperparameters |= {name: value for name, value in non_metrics.of_run.items() if name not in self.named}
            self.for_each(deliver)

    def flush(self) -> None:
        self.for_each(lambda destination: destination.flush())

    def states(self) -> dict[str, dict[str, Any]] | None:
        """Name to ``state_dict()`` of each; ``None`` after a failure, because nothing can be resumed then."""
        states: list[dict[str, Any]] = []
        with self.lock:
            self.for_each(lambda destination: states.append(destination.state_dict()))
            return None if self._failed else dict(zip(self._destinations, states, strict=True))

    def commit(self) -> None:
        """Call ``on_commit`` of each, or ``on_abandon`` if one has failed, for which everything has to come again."""
        if self._failed:
            self.for_each(lambda destination: destination.on_abandon())
        else:
            self.for_each(lambda destination: destination.on_commit())

    def close(self) -> None:
        """Close each, also after a failure; those that may wait for a server come last."""
        failed = list(self._failed.values())

        def close(destination: LoggerDestination) -> None:
            self.only_sends = destination.background
            try:
                destination.close()
            except RAISED:
                # Its first error was shown already.
                if destination not in failed:
                    raise

        with self.lock:
            everyone = self._destinations | self._failed
            self._destinations = dict(sorted(everyone.items(), key=lambda one: one[1].background))
            self._each = tuple(self._destinations.items())
        self.for_each(close)

    def for_each(self, action: Callable[[LoggerDestination], object]) -> None:
        with self.lock:
            for name, destination in self._each:
                try:
                    action(destination)
                except RAISED as error:  # a destination may raise anything, and is shown with its traceback
                    self._fail(name, destination, error)

    def _fail(self, name: str, destination: LoggerDestination, error: BaseException) -> None:
        del self._destinations[name]
        self._each = tuple(self._destinations.items())
        if isinstance(error, BrokenPipeError):
            self._on_broken_pipe(error)
            return
        self._failed[name] = destination
        show_failure(f"destination {name} failed and gets no more values", error)


def show_failure(headline: str, error: BaseException) -> None:
    """Print an error of other code with its traceback, an error of ours with the last line of other code.

    A full disk has no traceback either."""
    if isinstance(error, OffloopError) or (isinstance(error, OSError) and error.errno in _FULL):
        frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(_OUR_FOLDERS)]
        where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        say(f"{headline}: {error}{where}", err=True)
        return
    own = error.__traceback__
    lines = traceback.format_exception(type(error), error, own and own.tb_next)
    say(f"{headline}:", err=True)
    for line in "".join(lines).removesuffix("\n").split("\n"):
        say(line, err=True)
