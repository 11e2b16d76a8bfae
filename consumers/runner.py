"""Takes a stream of snapshots through callbacks, and what they log to destinations.

receive -> run callbacks -> gather what they logged -> hand it to the destinations
"""

import asyncio
import contextlib
import difflib
import inspect
import signal
import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal, TypeAlias, get_args

from bus.errors import ClosedError, ConfigurationError, OffloopError
from bus.event import Event
from bus.snapshot import Snapshot
from consumers.callback import Callback
from consumers.logger import Logger, LoggerDestination, RunPlace

__all__ = ["CallbackError", "OnError", "Runner", "RunnerStatistics", "wanted_events"]

OnError: TypeAlias = Literal["continue", "disable", "stop"]

_BREATH = 256


class CallbackError(OffloopError):
    """A callback raised and the runner was told to stop at that; the callback's own exception is the ``__cause__``."""


@dataclass(frozen=True)
class RunnerStatistics:
    """How a runner is doing."""

    handled: int
    """Events that at least one callback was given."""
    errors: Mapping[str, int]
    """How often each callback raised."""
    failed_destinations: tuple[str, ...]
    """Destinations that raised and have been given nothing since."""
    last_seq: int | None
    """``seq`` of the event handled last; ``None`` before the first."""
    interrupted: bool
    """Whether SIGINT or SIGTERM ended it."""

    @property
    def problems(self) -> list[str]:
        """What went wrong, a line for each callback and destination that failed; empty when all went well."""
        raised = [(name, count) for name, count in self.errors.items() if count]
        return [
            *(f"callback {name} raised {count} time{'s' if count > 1 else ''}" for name, count in raised),
            *(f"destination {name} failed and lacks what came after" for name in self.failed_destinations),
        ]


def wanted_events(callbacks: Iterable[Callback]) -> set[Event]:
    """Every event that at least one of the callbacks wants.

    Raises:
        ConfigurationError: one of them handles nothing at all, which is a slip of the pen.
    """
    events: set[Event] = set()
    for callback in callbacks:
        wanted = callback.wanted_events()
        if not wanted and not _overrides(callback, "close", "post_close"):
            raise ConfigurationError(
                f"callback {type(callback).__name__} handles no event: its methods are named after events, "
                f"such as batch_end{_misspelt(callback)}"
            )
        events |= wanted
    return events


def _overrides(callback: Callback, *names: str) -> bool:
    return any(getattr(type(callback), name, None) is not getattr(Callback, name) for name in names)


def _misspelt(callback: Callback) -> str:
    methods = {event.value for event in Event}
    for name in vars(type(callback)):
        close = difflib.get_close_matches(name, methods, n=1, cutoff=0.75)
        if close:
            return f"; did you mean {close[0]} for {name}?"
    return ""


class _Member:
    """A callback and what the runner knows about it."""

    def __init__(self, callback: Callback, name: str) -> None:
        self.callback = callback
        self.name = name
        self.wanted = callback.wanted_events()
        self.all_ranks = callback.all_ranks
        self.errors = 0
        self.closed = False


class Runner:
    """Runs callbacks over a stream, once.

    ``stream`` is a :class:`~bus.subscriber.Subscriber`, a :class:`~bus.recording.Recording` or any iterable, plain or
    asynchronous, of snapshots in order. Each snapshot goes to every callback that wants its event, in the order in
    which they are given, those of further ranks only to callbacks with ``all_ranks``; then what they logged goes to the
    destinations. When the stream ends, every callback is closed, then ``post_close`` is called on each, and the
    destinations come last.

    A callback that raises is shown once, with its traceback, and counted; the others are not affected. ``on_error``
    says how it goes on: ``continue`` gives it the next event all the same, ``disable`` gives it none any more, ``stop``
    ends the run with :class:`CallbackError`. A destination that raises is shown and given nothing more, so that what it
    wrote has no holes.

    SIGINT and SIGTERM, where they are not ignored, let the current event be finished and everything be closed; a second
    one interrupts at once.
    """

    def __init__(
        self,
        stream: Iterable[Snapshot] | AsyncIterable[Snapshot],
        callbacks: Sequence[Callback],
        destinations: Sequence[LoggerDestination] = (),
        on_error: OnError = "continue",
    ) -> None:
        if on_error not in get_args(OnError):
            raise ConfigurationError(f"on_error {on_error!r} is not known: use {', '.join(get_args(OnError))}")
        self._stream = stream
        self._members = [_Member(callback, name) for callback, name in zip(callbacks, _names(callbacks), strict=True)]
        self._destinations = list(destinations)
        self._on_error = on_error
        self._logger = Logger()
        self._table = self._make_table(self._members)
        self._last: Snapshot | None = None
        self._handled = 0
        self._failed_destinations: list[str] = []
        self._fatal: Exception | None = None
        self._started = False
        self._interrupted = False
        self._leaving = False
        self._waiting = False

    def statistics(self) -> RunnerStatistics:
        """What has been handled so far, and what went wrong."""
        return RunnerStatistics(
            handled=self._handled,
            errors={member.name: member.errors for member in self._members},
            failed_destinations=tuple(self._failed_destinations),
            last_seq=None if self._last is None else self._last.seq,
            interrupted=self._interrupted,
        )

    def run(self) -> RunnerStatistics:
        """Handles the stream to its end, in an event loop of its own.

        Raises:
            ConfigurationError: a destination cannot be opened.
            CallbackError: a callback raised and ``on_error`` is ``stop``.
        """
        if _loop_is_running():
            raise ConfigurationError(
                "an event loop runs here already: write 'await runner.run_async()' instead of run()"
            )
        before = signal.getsignal(signal.SIGINT)
        try:
            return asyncio.run(self.run_async())
        finally:
            # asyncio leaves its own handler behind when a second signal ends the loop in the middle of a callback.
            if threading.current_thread() is threading.main_thread() and before is not None:
                signal.signal(signal.SIGINT, before)

    async def run_async(self) -> RunnerStatistics:
        """As :meth:`run`, within an event loop that runs already, such as a notebook's."""
        if self._started:
            raise ClosedError("a runner runs once: make a new one with new callbacks")
        self._started = True
        self._open_destinations()
        with self._signals():
            try:
                await self._consume()
            finally:
                await self._close()
        if self._fatal is not None:
            raise self._fatal
        return self.statistics()

    async def _consume(self) -> None:
        self._waiting = True
        try:
            async with contextlib.aclosing(self._snapshots()) as snapshots:
                async for snapshot in snapshots:
                    await self._handle(snapshot)
                    if self._leaving:
                        break
        except asyncio.CancelledError:
            # Cancelled by ourselves while it waited for the next snapshot, or by whoever owns the event loop.
            task = asyncio.current_task()
            if not self._leaving or task is None or task.uncancel() > 0:
                raise
        finally:
            self._waiting = False

    async def _snapshots(self) -> AsyncGenerator[Snapshot, None]:
        stream = self._stream
        if isinstance(stream, AsyncIterable):
            async for snapshot in stream:
                yield snapshot
            return
        # A recording reads faster when it knows what it need not decode.
        select = getattr(stream, "snapshots", None)
        for count, snapshot in enumerate(stream if select is None else select(set(self._table)), 1):
            yield snapshot
            if count % _BREATH == 0:
                # A stream that never has to wait would otherwise keep tasks that callbacks started from running.
                await asyncio.sleep(0)

    async def _handle(self, snapshot: Snapshot) -> None:
        event = snapshot.event
        members = self._table.get(event, ())
        if snapshot.rank:
            members = [member for member in members if member.all_ranks]
        if not members:
            return
        self._waiting = False
        logger = self._logger
        logger.begin(snapshot)
        self._last = snapshot
        for member in members:
            try:
                result = member.callback.run_event(event, snapshot, logger)
                if result is not None and inspect.isawaitable(result):
                    await result
            except Exception as error:  # noqa: BLE001  a callback may raise anything, and is shown with its traceback
                self._note_error(member, error, event.value)
        if logger.pending:
            self._deliver(snapshot)
        self._handled += 1
        self._waiting = True

    def _note_error(self, member: _Member, error: Exception, where: str) -> None:
        member.errors += 1
        place = f"at {where}, seq {self._last.seq}" if self._last else f"at {where}, before any event"
        if member.errors == 1:
            _show(f"callback {member.name} raised {place}; what it raises from now on is only counted", error)
        if member.closed:
            return
        if self._on_error == "disable":
            self._table = self._make_table([other for other in self._members if other.errors == 0])
        elif self._on_error == "stop":
            self._leave(CallbackError(f"callback {member.name} raised {type(error).__name__} {place}: {error}"), error)

    def _leave(self, fatal: Exception, cause: Exception | None = None) -> None:
        fatal.__cause__ = cause
        self._fatal = self._fatal or fatal
        self._leaving = True

    def _deliver(self, snapshot: Snapshot) -> None:
        hyperparameters, rows = self._logger.take_hyperparameters(), self._logger.take_rows(snapshot)

        def deliver_to(destination: LoggerDestination) -> None:
            if hyperparameters:
                destination.log_hyperparameters(hyperparameters, snapshot)
            if rows:
                destination.log_rows(rows, snapshot)

        self._for_each_destination(deliver_to)

    def _for_each_destination(self, action: Callable[[LoggerDestination], None]) -> None:
        for destination in tuple(self._destinations):
            try:
                action(destination)
            except Exception as error:  # noqa: BLE001  a destination may raise anything, and is shown with its traceback
                self._destinations.remove(destination)
                if isinstance(error, BrokenPipeError):
                    # Whoever read our output is gone: leave as every program in a pipe does.
                    self._leave(error)
                    continue
                name = type(destination).__name__
                self._failed_destinations.append(name)
                _show(f"destination {name} failed and is given nothing more", error)

    async def _close(self) -> None:
        state = self._last or Snapshot.build(Event.INIT, run_name=_place(self._stream).run_name)
        self._logger.begin(state)
        for member in self._members:
            member.closed = True
        closed = [member for member in self._members if await self._end(member, "close", state, self._logger)]
        if self._logger.pending:
            self._deliver(state)
        for member in closed:
            await self._end(member, "post_close")
        self._for_each_destination(lambda destination: destination.close())

    async def _end(self, member: _Member, method: str, *arguments: Any) -> bool:
        try:
            result: Awaitable[None] | None = getattr(member.callback, method)(*arguments)
            if result is not None and inspect.isawaitable(result):
                await result
        except Exception as error:  # noqa: BLE001  a callback may raise anything, and is shown with its traceback
            self._note_error(member, error, method)
            return False
        return True

    def _open_destinations(self) -> None:
        place, opened = _place(self._stream), []
        try:
            for destination in self._destinations:
                destination.open(place)
                opened.append(destination)
        except BaseException:
            for destination in opened:
                destination.close()
            raise

    def _make_table(self, members: Iterable[_Member]) -> dict[Event, list[_Member]]:
        table: defaultdict[Event, list[_Member]] = defaultdict(list)
        for member in members:
            for event in member.wanted:
                table[event].append(member)
        return dict(table)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        def stop_waiting() -> None:
            if self._waiting and task is not None:
                task.cancel()

        def on_signal(_number: int, _frame: FrameType | None) -> None:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = self._leaving = True
            loop.call_soon_threadsafe(stop_waiting)

        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        taken = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
        for number in taken:
            signal.signal(number, on_signal)
        try:
            yield
        finally:
            for number, handler in taken.items():
                signal.signal(number, handler)


def _loop_is_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _place(stream: Any) -> RunPlace:
    run_dir: Path | None = getattr(stream, "run_dir", None)
    if run_dir is None and isinstance(getattr(stream, "path", None), Path):
        run_dir = stream.path.parent
    return RunPlace(getattr(stream, "run_name", "run"), getattr(stream, "attempt", 1), run_dir)


def _names(callbacks: Iterable[Callback]) -> Iterator[str]:
    seen: defaultdict[str, int] = defaultdict(int)
    for callback in callbacks:
        name = type(callback).__name__
        seen[name] += 1
        yield name if seen[name] == 1 else f"{name}#{seen[name]}"


def _show(headline: str, error: Exception) -> None:
    # The first frame is the runner's own and says nothing to the author of the callback.
    own = error.__traceback__
    lines = traceback.format_exception(type(error), error, own and own.tb_next)
    print(f"{headline}:\n{''.join(lines)}", end="", file=sys.stderr, flush=True)
