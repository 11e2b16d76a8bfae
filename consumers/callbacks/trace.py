"""The run as a timeline, in a file that Perfetto opens."""

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from offloop.bus.errors import ConfigurationError, RunDirectoryError
from offloop.bus.protocol.order import Ending
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.trace.writer import TraceWriter
from offloop.bus.types.demand import BASE_EVENTS, Demand, EventDemand
from offloop.bus.types.event import Event
from offloop.consumers.api.callback import Callback
from offloop.consumers.api.logger import Logger, LoggerDestination, RunContext, Text
from offloop.consumers.loggers.files import FileDestination


class Trace(Callback):
    """Writes the run as a timeline that Perfetto (ui.perfetto.dev) and chrome://tracing open: Chrome trace JSON, by
    default ``trace.json`` in the run's directory (``trace-2.json`` for the second attempt of a run, and so on).

    There is a process for each rank with a track for each phase of a batch (waiting for data, forward, loss, backward,
    optimizer, publishing), for batches, epochs and evaluations; counters for loss, learning rates and throughput; and
    instants for commands, checkpoints, ends of epochs and the run's own end, and for texts that other callbacks of the
    same consumer log. See :class:`offloop.bus.trace.writer.TraceWriter`.

    The file can be opened while the run goes on, and after whatever ended it. An existing file that holds anything is
    refused unless ``overwrite`` is true, or unless this is a consumer that goes on: then the file is cut back to where
    that consumer had committed it. Equal streams give files with equal bytes.

    Args:
        path: where to write instead.
        every: measures the phases of the batches ``every``, 2 x ``every`` and so on alone, and draws batches in groups
            of so many: a smaller file.
        overwrite: whether an existing file is replaced.
    """

    all_ranks = True
    resumes = False
    fields = ("phases",)

    def __init__(self, path: str | None = None, every: int = 1, overwrite: bool = False) -> None:
        if path is not None and path.endswith(".gz"):
            raise ConfigurationError(
                f"path {path!r} asks for a compressed file, which cannot be gone on with: write {path[:-3]!r} and "
                "compress it when the run is over; Perfetto opens it either way"
            )
        self._file = _TraceFile(path, overwrite, self._note)
        self._writer = TraceWriter(self._file, every)
        self._every = every
        self._heard = 0

    def demand(self) -> Demand:
        phases = EventDemand(1, {"phases": self._every})
        return Demand({**dict.fromkeys(BASE_EVENTS, EventDemand()), Event.BATCH_END: phases})

    def destinations(self) -> Sequence[LoggerDestination]:
        return [self._file]

    def run_event(self, event: Event, state: Snapshot, logger: Logger) -> None:
        if self._file.problem is None:
            with self._file.lock:
                self._hear_of_commands()
                self._writer.see(state)

    def run_ended(self, ending: Ending | None) -> None:
        if self._file.problem is None:
            with self._file.lock:
                self._hear_of_commands()
                self._writer.close(ending)

    def state_dict(self) -> dict[str, Any]:
        with self._file.lock:
            return self._writer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._writer.load_state_dict(state)

    def _hear_of_commands(self) -> None:
        answered = self._file.context.answered()
        for outcome in answered[self._heard :]:
            self._writer.command(outcome)
        self._heard = len(answered)

    def _note(self, entry: Text, state: Snapshot) -> None:
        with self._file.lock:
            self._writer.note(entry.name, entry.text, state)


class _TraceFile(FileDestination):
    """The file of a timeline. What is written comes from the callback; as a destination it is opened, committed and cut
    back with what others of the consumer write."""

    name = "trace"
    shown_as = "Trace"

    def __init__(self, path: str | None, overwrite: bool, on_text: Callable[[Text, Snapshot], None]) -> None:
        super().__init__(path, overwrite)
        self._on_text = on_text
        self.context = RunContext("run", 1, None)
        """The run that it is the timeline of."""
        self.lock: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        """Held while anything is drawn: callbacks with a thread of their own may log texts."""

    def open(self, context: RunContext) -> None:
        self.context, self.lock = context, threading.Lock()
        super().open(context)

    def write(self, text: str) -> None:
        try:
            super().write(text)
        except OSError as error:
            self.problem = f"lacks what came after {self._path} could not be written: {error.strerror}"
            self._leave_whole_events()
            raise RunDirectoryError(
                f"{self._path} cannot be written: {error.strerror}; make room, or write elsewhere with "
                f"'-o {self.name}.path=FILE'"
            ) from None

    def log_text(self, entry: Text, state: Snapshot) -> None:
        if self._file is not None and self.problem is None:
            self._on_text(entry, state)

    def state_dict(self) -> dict[str, Any]:
        if self.problem is not None:
            raise RunDirectoryError(f"the timeline {self.problem}")
        return super().state_dict()

    def _leave_whole_events(self) -> None:
        file, self._file = self._file, None
        with contextlib.suppress(OSError):
            if file is not None:
                file.close()
        with contextlib.suppress(OSError):
            os.truncate(str(self._path), self._bytes)

    def _default_path(self, context: RunContext) -> Path:
        return (
            super()
            ._default_path(context)
            .with_name(f"trace{f'-{context.attempt}' if context.attempt > 1 else ''}.json")
        )
