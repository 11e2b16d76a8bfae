"""The runner of tests, and what it logs to."""

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

from offloop.bus.errors import OffloopError
from offloop.bus.protocol.order import CheckpointMark, Ending, Gap
from offloop.bus.protocol.snapshot import CommandSender, Snapshot
from offloop.bus.protocol.stream import RunStream, as_stream
from offloop.bus.recording.recording import Recording
from offloop.bus.subscriber.subscriber import Subscriber
from offloop.bus.types.commands import Command, Outcome
from offloop.bus.types.event import Event
from offloop.consumers.api.callback import Callback, OnError
from offloop.consumers.api.logger import LoggerDestination
from offloop.consumers.runner.dispatcher import CallbackError
from offloop.consumers.runner.entries import CallbackEntry, EventForwarder, requested_events
from offloop.consumers.runner.runner import Runner
from offloop.consumers.testing.logged import Collector, Logged

Result = TypeVar("Result")


def as_callbacks(callbacks: Callback | Sequence[Callback]) -> list[Callback]:
    """One callback or several as a list.

    Raises:
        ConfigurationError: one of them handles nothing at all.
    """
    made = [callbacks] if isinstance(callbacks, Callback) else list(callbacks)
    requested_events(made)
    return made


def _outside_event_loops(function: Callable[..., Result], *arguments: Any) -> Result:
    """Calls a function that runs an event loop: here, or, in a test that is ``async``, in a thread that is waited
    for."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return function(*arguments)
    with ThreadPoolExecutor(1, "offloop-testing") as thread:
        return thread.submit(function, *arguments).result()


class Harness:
    """Callbacks with all that they log to, in the order of events: also those that would have a stream of their own.

    ``on_error`` is as for :class:`offloop.consumers.runner.runner.Runner`; with ``stop`` :meth:`check` raises what a
    callback raised."""

    def __init__(
        self,
        stream: Iterable[Snapshot] | AsyncIterable[Snapshot],
        callbacks: Sequence[Callback],
        loggers: Sequence[LoggerDestination],
        on_error: OnError,
    ) -> None:
        self._on_error = on_error
        made = as_stream(stream)
        # A live run is commanded itself, and a feed binds its snapshots.
        kept = made if isinstance(made, Subscriber | _Feed) else _CommandsKept(made, self.keep_command)
        watchers = [EventForwarder(logger) for logger in loggers if logger.watches]
        further = [destination for callback in callbacks for destination in callback.destinations()]
        self.logged = Logged(lambda: self.runner.statistics())
        destinations = [Collector(self.logged), *loggers, *further]
        self.runner = _StrictRunner(kept, [*callbacks, *watchers], destinations, on_error)

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
            _outside_event_loops(self.runner.run)
        self.check()
        return self.logged

    def keep_command(self, state: Snapshot, command: Command) -> None:
        """Takes a command that a callback sends."""
        self.logged.commands.append(command._replace(decided_at=int(state.timestamp.batch)))


class _Wrapped(RunStream):
    """What is known of a stream, for one that gives its snapshots in another way."""

    def __init__(self, source: RunStream) -> None:
        self._source = source
        self.run_name, self.run_id = source.run_name, source.run_id
        self.attempt, self.run_dir = source.attempt, source.run_dir

    @property
    def ending(self) -> Ending | None:
        return self._source.ending

    @property
    def gaps(self) -> Sequence[Gap]:
        return self._source.gaps

    @property
    def damage(self) -> str | None:
        return self._source.damage

    def answered(self) -> Sequence[Outcome]:
        return self._source.answered()

    def checkpoints(self) -> Sequence[CheckpointMark]:
        return self._source.checkpoints()


class _CommandsKept(_Wrapped):
    """A stream that cannot be commanded, made to hand the commands that its snapshots send to ``keep``."""

    def __init__(self, source: RunStream, keep: CommandSender) -> None:
        super().__init__(source)
        self._keep = keep

    async def read(
        self, events: Collection[Event], after: Mapping[int, tuple[int, int]]
    ) -> AsyncGenerator[Sequence[Snapshot], None]:
        async for batch in self._source.read(events, after):
            for snapshot in batch:
                snapshot.bind(self._keep)
            yield batch


class _StrictRunner(Runner):
    """Keeps what callbacks raised, also while they were closed, and leaves signals to the tests."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.raised: list[BaseException] = []

    def _note_error(self, entry: CallbackEntry, error: BaseException, where: str) -> None:
        self.raised.append(error)
        super()._note_error(entry, error, where)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        yield


class Stepper:
    """A runner whose event loop runs only within :meth:`handle`, until the callbacks have handled the event.

    ``source`` says what the run is called and how it ended. Use it as a context manager: at the end the callbacks are
    closed.

    Raises:
        ConfigurationError: a callback handles no event.
    """

    def __init__(
        self,
        source: RunStream,
        callbacks: Sequence[Callback],
        loggers: Sequence[LoggerDestination],
        on_error: OnError,
    ) -> None:
        made = as_callbacks(callbacks)
        self._feed = _Feed(source)
        self._harness = Harness(self._feed, made, loggers, on_error)
        self.logged = self._harness.logged

    def __enter__(self) -> "Stepper":
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self._harness.runner.run_async())
        self._turn()
        return self

    def handle(self, snapshot: Snapshot) -> None:
        """Takes a snapshot through the callbacks; raises what one of them raises."""
        snapshot.bind(self._harness.keep_command)
        self._feed.put(snapshot)
        self._turn()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._feed.put(None)
            self._turn(to_its_end=True)
        except Exception:
            # What the test raised says more than what comes of it while callbacks are closed.
            if error is None:
                raise
        finally:
            _outside_event_loops(self._loop.run_until_complete, self._loop.shutdown_asyncgens())
            self._loop.close()

    def _turn(self, to_its_end: bool = False) -> None:
        _outside_event_loops(self._loop.run_until_complete, self._next_turn(to_its_end))
        if self._task.done():
            error = self._task.exception()
            if error is not None and not isinstance(error, CallbackError):
                raise error
            self._harness.check()

    async def _next_turn(self, to_its_end: bool) -> None:
        if to_its_end:
            await asyncio.wait({self._task})
            return
        asked = self._loop.create_task(self._feed.asked_for())
        await asyncio.wait({self._task, asked}, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()


class _Feed(_Wrapped):
    """Snapshots for a runner, as they are put here; ``None`` ends them."""

    def __init__(self, source: RunStream) -> None:
        super().__init__(source)
        self._queue: asyncio.Queue[Snapshot | None] = asyncio.Queue()
        self._asked = asyncio.Event()

    def put(self, snapshot: Snapshot | None) -> None:
        self._asked.clear()
        self._queue.put_nowait(snapshot)

    async def asked_for(self) -> None:
        await self._asked.wait()

    async def __aiter__(self) -> AsyncGenerator[Snapshot, None]:
        while True:
            self._asked.set()
            snapshot = await self._queue.get()
            if snapshot is None:
                return
            yield snapshot


def replay(
    callbacks: Callback | Sequence[Callback],
    source: Recording | str | os.PathLike[str] | Iterable[Snapshot],
    *,
    loggers: Sequence[LoggerDestination] = (),
    on_error: OnError = "stop",
) -> Logged:
    """Takes a run through callbacks, as fast as it can be read, and returns what they logged.

    They are run by what runs them live, in this process, one after the other at each event; a callback with
    ``background`` too, so that the order of what is logged is always the same. Commands that they send are kept in
    :attr:`Logged.commands` and go nowhere. Within an event loop, as in a test that is ``async``, they run in a loop and
    a thread of their own, for which the caller waits.

    Args:
        callbacks: one, or several; objects that have not run before.
        source: a recording, the path of one or of a run's directory, a
            :class:`~offloop.consumers.testing.MemoryStream`, or snapshots in order.
        loggers: destinations of your own, to be given what is logged as well.
        on_error: what happens when a callback raises. ``stop`` raises its exception here, with its traceback, also when
            it comes from ``close``; with ``continue`` and ``disable`` the errors are counted in
            ``Logged.statistics.errors``.

    Raises:
        RecordingError: there is no such recording, or it is not one.
        ConfigurationError: a callback handles no event.
        OffloopError: one of ``loggers`` failed.
    """
    made = as_callbacks(callbacks)
    stream = Recording(source) if isinstance(source, str | os.PathLike) else source
    return Harness(stream, made, loggers, on_error).run()
