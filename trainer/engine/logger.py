"""Where algorithms write down numbers."""

from collections.abc import Mapping
from typing import Any

from trainer.arguments.values import to_builtin
from trainer.engine.state import State


class Logger:
    """Collects what algorithms log; it travels with the next event that is published, as its field ``logged``.

    Reference: ``composer/loggers/logger.py``.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self.entries: list[list[Any]] = []
        """What has been logged and not published yet, as pairs of step and metrics; always the same list."""

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Logs numbers by name at a step, by default the number of batches so far.

        A tensor is read at once, which on a GPU waits for it: log numbers where that matters."""
        if step is None:
            step = self._state.timestamp.values[2]
        self.entries.append([step, {name: to_builtin(value) for name, value in metrics.items()}])

    def take(self) -> list[list[Any]]:
        """Everything logged since the last call, as pairs of step and metrics."""
        entries = list(self.entries)
        self.entries.clear()
        return entries
