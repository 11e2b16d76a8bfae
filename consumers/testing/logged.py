"""Entries that callbacks logged in a test."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.commands import Command
from offloop.consumers.api.logger import Images, LoggerDestination, LogValue, Row, Table, Text, Upload
from offloop.consumers.runner.statistics import RunnerStatistics


class Logged:
    """Everything that callbacks logged, in the order in which they did."""

    def __init__(self, statistics: Callable[[], RunnerStatistics]) -> None:
        self._statistics = statistics
        self.rows: list[Row] = []
        """Metrics: a row for each step that something was logged for during an event."""
        self.hyperparameters: dict[str, Any] = {}
        """Hyperparameters of callbacks and of the run."""
        self.images: list[Images] = []
        """Images, as destinations get them."""
        self.tables: list[Table] = []
        """Tables."""
        self.texts: list[Text] = []
        """Texts."""
        self.uploads: list[Upload] = []
        """Files; whether one is still there is up to the callback."""
        self.commands: list[Command] = []
        """Commands that callbacks sent, such as ``stop``; ``decided_at`` is how many batches were trained then. They
        end here."""

    @property
    def statistics(self) -> RunnerStatistics:
        """Number of handled events, errors of callbacks, ending of the run, ..."""
        return self._statistics()

    @property
    def metrics(self) -> dict[str, list[tuple[int, LogValue]]]:
        """Name of each metric to its steps and values, in the order in which they were logged."""
        metrics: dict[str, list[tuple[int, LogValue]]] = {}
        for row in self.rows:
            for name, value in row.metrics.items():
                metrics.setdefault(name, []).append((row.step, value))
        return metrics

    @property
    def last(self) -> dict[str, LogValue]:
        """Name of each metric to the value that was logged last."""
        return {name: value for row in self.rows for name, value in row.metrics.items()}

    def __repr__(self) -> str:
        return f"<Logged {len(self.rows)} rows of {len(self.last)} metrics>"


class Collector(LoggerDestination):
    """The destination that fills a :class:`Logged`."""

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

    def log_text(self, entry: Text, state: Snapshot) -> None:
        self._logged.texts.append(entry)

    def upload_file(self, entry: Upload, state: Snapshot) -> None:
        self._logged.uploads.append(entry)
