"""The runner of tests, and what it logs to."""

import contextlib
from collections.abc import AsyncIterable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from bus.commands import Command
from bus.errors import OffloopError
from bus.event import Event
from bus.snapshot import CommandSender, Snapshot
from consumers.callback import Callback
from consumers.logger import LoggerDestination
from consumers.members import Member, wanted_events
from consumers.runner import CallbackError, OnError, Runner
from consumers.testing.logged import Collector, Logged

__all__ = ["Harness", "as_callbacks"]


def as_callbacks(callbacks: Callback | Sequence[Callback]) -> list[Callback]:
    """One callback or several as a list.

    Raises:
        ConfigurationError: one of them handles nothing at all.
    """
    made = [callbacks] if isinstance(callbacks, Callback) else list(callbacks)
    wanted_events(made)
    return made


class Harness:
    """Callbacks with all that they log to, in the order of events: also those that would have a stream of their own.

    ``on_error`` is as for :class:`consumers.runner.Runner`; with ``stop`` :meth:`check` raises what a callback
    raised."""

    def __init__(
        self,
        stream: Iterable[Snapshot] | AsyncIterable[Snapshot],
        callbacks: Sequence[Callback],
        loggers: Sequence[LoggerDestination],
        on_error: OnError,
    ) -> None:
        self._on_error = on_error
        kept = stream if isinstance(stream, AsyncIterable) else _CommandsKept(stream, self.keep_command)
        companions = [companion for logger in loggers for companion in logger.companions()]
        further = [destination for callback in callbacks for destination in callback.destinations()]
        self.logged = Logged(lambda: self.runner.statistics())
        destinations = [Collector(self.logged), *loggers, *further]
        self.runner = _StrictRunner(kept, [*callbacks, *companions], destinations, on_error)

    def check(self) -> None:
        """Raises what a callback raised, as it raised it, unless that was to be passed over.

        Raises:
            OffloopError: one of the loggers failed.
        """
        if self._on_error == "stop" and self.runner.raised:
            raise self.runner.raised[0]
        statistics = self.runner.statistics()
        if statistics.failed_destinations or statistics.undelivered:
            raise OffloopError("; ".join(statistics.problems) + "; what it raised is on standard error")

    def run(self) -> Logged:
        """Handles the stream to its end."""
        with contextlib.suppress(CallbackError):
            self.runner.run()
        self.check()
        return self.logged

    def keep_command(self, state: Snapshot, command: Command) -> None:
        """Takes a command that a callback sends."""
        self.logged.commands.append(command._replace(decided_at=int(state.timestamp.batch)))


class _CommandsKept:
    """A stream that cannot be commanded, made to hand the commands that its snapshots send to ``keep``."""

    def __init__(self, source: Iterable[Snapshot], keep: CommandSender) -> None:
        self._source = source
        self._keep = keep

    def __iter__(self) -> Iterator[Snapshot]:
        return self.snapshots()

    def snapshots(
        self, events: Iterable[Event] | None = None, *, after: Mapping[int, tuple[int, int]] | None = None
    ) -> Iterator[Snapshot]:
        """As :meth:`bus.recording.Recording.snapshots`."""
        select = getattr(self._source, "snapshots", None)
        for snapshot in self._source if select is None else select(events, after=after):
            snapshot.bind(self._keep)
            yield snapshot

    def __getattr__(self, name: str) -> Any:
        # Name, attempt, path, ending, gaps and damage are those of the source, as it knows them by then.
        return getattr(self._source, name)


class _StrictRunner(Runner):
    """Keeps what callbacks raised, also while they were closed, and leaves signals to the tests."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.raised: list[Exception] = []

    def _note_error(self, member: Member, error: Exception, where: str) -> None:
        self.raised.append(error)
        super()._note_error(member, error, where)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        yield
