"""Passes a run through callbacks in a test."""

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from offloop.bus.errors import OffloopError
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.protocol.stream import as_stream
from offloop.bus.recording.recording import Recording
from offloop.bus.types.commands import Command
from offloop.consumers.api.callback import Callback, OnError
from offloop.consumers.api.logger import Histogram, Images, LoggerDestination, Row, Table, Text, Upload
from offloop.consumers.runner.dispatcher import CallbackError
from offloop.consumers.runner.entries import requested_events
from offloop.consumers.runner.runner import Runner
from offloop.consumers.runner.statistics import RunnerStatistics
from offloop.consumers.runner.without_effects import with_commands_to


def replay(
    callbacks: Callback | Sequence[Callback],
    source: Recording | str | os.PathLike[str] | Iterable[Snapshot],
    *,
    loggers: Sequence[LoggerDestination] = (),
    on_error: OnError = "stop",
) -> "Logged":
    """Pass a run through callbacks, as fast as it can be read, and return what they logged.

    The live code runs them, in this process, one after the other at each event; also a callback with ``background``, so
    that the order of logged values is always the same. Commands that they send are kept in :attr:`Logged.commands` and
    go nowhere. Within an event loop, as in an ``async`` test, they run in a separate loop and thread, for which the
    caller waits.

    Args:
        callbacks: one, or several; objects that have not run before.
        source: a recording, the path of one or of a run's directory, a
            :class:`~offloop.consumers.testing.MemoryStream`, or snapshots in order.
        loggers: further destinations for logged values.
        on_error: the consequence of an error in a callback. ``stop`` raises its exception here, with its traceback,
            also from ``close``; ``continue`` and ``disable`` count the errors in ``Logged.statistics.errors``.

    Raises:
        RecordingError: the recording is missing or malformed.
        ConfigurationError: a callback handles no event.
        OffloopError: one of ``loggers`` failed.
    """
    made = [callbacks] if isinstance(callbacks, Callback) else list(callbacks)
    requested_events(made)
    stream = as_stream(Recording(source) if isinstance(source, str | os.PathLike) else source)

    def keep(state: Snapshot, command: Command) -> None:
        logged.commands.append(msgspec.structs.replace(command, decided_at=int(state.timestamp.batch)))

    logged = Logged(lambda: runner.statistics())
    runner = _QuietRunner(
        with_commands_to(stream, keep),
        made,
        [Collector(logged), *loggers, *(further for callback in made for further in callback.destinations())],
        on_error,
    )
    with contextlib.suppress(CallbackError):
        _run(runner)
    if on_error == "stop" and runner.first_error is not None:
        raise runner.first_error
    statistics = logged.statistics
    if statistics.failed_destinations or statistics.undelivered:
        raise OffloopError("; ".join(statistics.problems) + "; what it raised is on standard error")
    return logged


def _run(runner: Runner) -> RunnerStatistics:
    """Run it here, or, in an ``async`` test, in a thread that is waited for."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return runner.run()
    with ThreadPoolExecutor(1, "offloop-testing") as thread:
        return thread.submit(runner.run).result()


class _QuietRunner(Runner):
    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        yield


class Logged:
    """Everything that callbacks logged, in order."""

    def __init__(self, statistics: Callable[[], RunnerStatistics]) -> None:
        self._statistics = statistics
        self.rows: list[Row] = []
        """Metrics: a row for each step that something was logged for during an event."""
        self.hyperparameters: dict[str, Any] = {}
        """Hyperparameters of callbacks and of the run."""
        self.images: list[Images] = []
        """Images, as destinations receive them."""
        self.tables: list[Table] = []
        self.histograms: list[Histogram] = []
        self.texts: list[Text] = []
        self.uploads: list[Upload] = []
        """Files, which the callback may have removed."""
        self.commands: list[Command] = []
        """Commands that callbacks sent, such as ``stop``, with the number of trained batches as ``decided_at``. They
        have no effect."""

    @property
    def statistics(self) -> RunnerStatistics:
        """Number of handled events, errors of callbacks, ending of the run, ..."""
        return self._statistics()

    @property
    def metrics(self) -> dict[str, list[tuple[int, Any]]]:
        """Name of each metric to its steps and values, in the order in which they were logged."""
        metrics: dict[str, list[tuple[int, Any]]] = {}
        for row in self.rows:
            for name, value in row.metrics.items():
                metrics.setdefault(name, []).append((row.step, value))
        return metrics

    @property
    def last(self) -> dict[str, Any]:
        """Name of each metric to its last logged value."""
        return {name: value for row in self.rows for name, value in row.metrics.items()}

    def __repr__(self) -> str:
        return f"<Logged {len(self.rows)} rows of {len(self.last)} metrics>"


class Collector(LoggerDestination):
    def __init__(self, logged: Logged) -> None:
        self._logged = logged

    def log_rows(self, rows: Sequence[Row], state: Snapshot) -> None:
        self._logged.rows += rows

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any], state: Snapshot) -> None:
        self._logged.hyperparameters |= hyperparameters

    def log_images(self, entry: Images, state: Snapshot) -> None:
        self._logged.images.append(entry)

    def log_table(self, entry: Table, state: Snapshot) -> None:
        self._logged.tables.append(entry)

    def log_histogram(self, entry: Histogram, state: Snapshot) -> None:
        self._logged.histograms.append(entry)

    def log_text(self, entry: Text, state: Snapshot) -> None:
        self._logged.texts.append(entry)

    def upload_file(self, entry: Upload, state: Snapshot) -> None:
        self._logged.uploads.append(entry)
