"""Takes a stream of snapshots through callbacks, and what they log to destinations.

receive -> run callbacks -> gather what they logged -> hand it to the destinations
"""

import asyncio
import contextlib
import inspect
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal, TypeAlias, get_args

from bus.commands import Outcome
from bus.errors import ClosedError, ConfigurationError, OffloopError, RunDirectoryError
from bus.event import Event
from bus.snapshot import Snapshot
from bus.stream import Ending, Gap
from consumers.callback import Callback, view_for
from consumers.delivery import Delivery, show_failure
from consumers.logger import Logger, LoggerDestination, RunPlace
from consumers.loggers.spool import spooled
from consumers.members import Member, numbered_names, wanted_events
from consumers.progress import CallbackState, Committed, DestinationState, LaneState, Progress

__all__ = ["COMMIT_EVENTS", "CallbackError", "OnError", "Runner", "RunnerStatistics", "wanted_events"]

OnError: TypeAlias = Literal["continue", "disable", "stop"]

COMMIT_EVENTS = 1000
"""After how many handled events the progress is committed, unless told otherwise."""

COMMIT_SECONDS = 1.0

_BREATH = 256
_LOOK_SECONDS = 0.05
_NOWHERE = (0, 0)


class CallbackError(OffloopError):
    """A callback raised and the runner was told to stop at that; the callback's own exception is the ``__cause__``."""


@dataclass(frozen=True)
class RunnerStatistics:
    """How a runner is doing, and the runners before it that committed to the same progress."""

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
    gaps: tuple[Gap, ...] = ()
    """Events that nobody has: published, but neither received nor recorded."""
    ending: Ending | None = None
    """How the run ended; ``None`` until then, and for streams that do not say it."""
    damage: str | None = None
    """What of the recording could not be read."""
    fields_since: Mapping[str, int] = field(default_factory=dict)
    """Of each field that was there because somebody asked: the number of the batch with which it came first, of those
    that this runner handled."""
    outcomes: tuple[Outcome, ...] = ()
    """What became of the commands that callbacks sent."""
    undelivered: Mapping[str, str] = field(default_factory=dict)
    """What each destination lacks that could not be sent to it until it was closed, in words that follow its name."""
    uncommitted: str | None = None
    """Why the last attempt to commit the progress failed; ``None`` when it did not."""

    @property
    def problems(self) -> list[str]:
        """What went wrong, a line for each callback and destination that failed; empty when all went well."""
        raised = [(name, count) for name, count in self.errors.items() if count]
        return [
            *(f"callback {name} raised {count} time{'s' if count > 1 else ''}" for name, count in raised),
            *(f"destination {name} failed and lacks what came after" for name in self.failed_destinations),
            *(f"destination {name} {problem}" for name, problem in self.undelivered.items()),
            *(f"command {outcome}" for outcome in self.outcomes if outcome.error is not None),
            *([self.uncommitted] if self.uncommitted else []),
        ]


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

    With ``progress``, such as a :class:`~consumers.state_file.StateFile`, it goes on from what was committed there, and
    commits after ``commit_every`` events handled, or when a second has gone by since the last commit, and at the end.
    Events up to the committed position are passed over; a stream that can start after it, should. At the end it commits
    before the callbacks are closed, and what they log then is written once more by a runner that goes on; when the run
    has ended, a last commit after that says that all is done, and later runners do nothing. While a destination has
    failed, and once ``stop`` has ended the run, nothing is committed: the next runner begins before that failure.

    SIGINT and SIGTERM, where they are not ignored, let the current event be finished and everything be closed; a second
    one interrupts at once.
    """

    def __init__(
        self,
        stream: Iterable[Snapshot] | AsyncIterable[Snapshot],
        callbacks: Sequence[Callback | tuple[str, Callback]],
        destinations: Sequence[LoggerDestination] = (),
        on_error: OnError = "continue",
        progress: Progress | None = None,
        commit_every: int = COMMIT_EVENTS,
    ) -> None:
        self._prepare(stream, _named(callbacks), on_error, progress, commit_every)
        # Named before they are wrapped: people know them by what they are.
        self._destinations = dict(zip(numbered_names(destinations), map(spooled, destinations), strict=True))
        self._delivery = Delivery(self._destinations, self._leave)

    def _prepare(
        self,
        stream: Iterable[Snapshot] | AsyncIterable[Snapshot],
        callbacks: Sequence[tuple[str, Callback]],
        on_error: OnError,
        progress: Progress | None,
        commit_every: int,
    ) -> None:
        if commit_every < 1:
            raise ConfigurationError(f"commit_every counts handled events and is at least 1, not {commit_every}")
        if on_error not in get_args(OnError):
            raise ConfigurationError(f"on_error {on_error!r} is not known: use {', '.join(get_args(OnError))}")
        self._stream = stream
        self._members = [Member(callback, name) for name, callback in callbacks]
        self._place = _place(stream)
        self._on_error = on_error
        self._progress = progress
        self._commit_every = commit_every
        self._next_commit = 0.0
        self._handled_at_commit = 0
        self._uncommitted: str | None = None
        self._positions: dict[int, tuple[int, int]] = {}
        self._gaps: tuple[Gap, ...] = ()
        self._ending: Ending | None = None
        self._damage: str | None = None
        self._fields_since: dict[str, int] = {}
        self._logger = Logger()
        self._table = self._make_table()
        self._last: Snapshot | None = None
        self._handled = 0
        self._lanes: list[_Lane] = []
        # Beside a runner that commits: where this one was when it last logged something.
        self._keeps_point = False
        self._point = LaneState({}, CallbackState(callbacks[0][0], 0, False, {})) if callbacks else None
        self._next_point = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._fatal: Exception | None = None
        self._started = False
        self._interrupted = False
        self._leaving = False
        self._waiting = False

    def statistics(self) -> RunnerStatistics:
        """What has been handled so far, and what went wrong."""
        return RunnerStatistics(
            handled=self._handled,
            errors={member.name: member.errors for one in self._all() for member in one._members},
            failed_destinations=self._delivery.failed,
            last_seq=None if self._last is None else self._last.seq,
            interrupted=self._interrupted,
            # What a reader that goes on finds again is the same gap.
            gaps=tuple(dict.fromkeys(gap for one in self._all() for gap in one._known_gaps())),
            ending=self._ending or getattr(self._stream, "ending", None),
            damage=self._damage or getattr(self._stream, "damage", None),
            fields_since={name: batch for one in self._all() for name, batch in tuple(one._fields_since.items())},
            undelivered={
                name: destination.problem
                for name, destination in self._destinations.items()
                if destination.problem is not None and name not in self._delivery.failed
            },
            uncommitted=self._uncommitted,
            outcomes=tuple(outcome for one in self._all() for outcome in getattr(one._stream, "outcomes", ())),
        )

    def _all(self) -> "Iterator[Runner]":
        yield self
        for lane in self._lanes:
            yield lane.runner

    def _known_gaps(self) -> Iterable[Gap]:
        return (*self._gaps, *getattr(self._stream, "gaps", ()))

    def run_beside(
        self,
        name: str,
        callback: Callback,
        stream: Iterable[Snapshot] | AsyncIterable[Snapshot],
    ) -> None:
        """Runs one more callback, over a stream of its own and in a thread of its own: it may take as long as it likes
        and delays nobody. What it logs goes to the same destinations, between that of the others, and its place in its
        stream is committed with theirs. To be called before :meth:`run`."""
        beside = Runner.__new__(Runner)
        beside._prepare(stream, [(name, callback)], self._on_error, None, self._commit_every)
        beside._destinations, beside._delivery = {}, self._delivery
        beside._keeps_point = self._progress is not None
        self._lanes.append(_Lane(beside, self))

    def run(self) -> RunnerStatistics:
        """Handles the stream to its end, in an event loop of its own.

        Raises:
            ConfigurationError: a destination cannot be opened, or what was committed is of other callbacks or
                destinations.
            RecordingError: what was committed is damaged.
            RunDirectoryError: nothing can be committed.
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
        if self._restore():
            return self.statistics()
        self._open_destinations()
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        with self._signals():
            try:
                for lane in self._lanes:
                    lane.start()
                await self._consume()
                await self._finish_lanes()
                # What callbacks log while they are closed comes after the position from which the next runner goes on.
                self._commit()
            except BaseException:
                self._leaving = True
                raise
            finally:
                self._dismiss_lanes()
                await self._close()
        if self._fatal is not None:
            raise self._fatal
        if self._is_over:
            self._commit(self.statistics().ending)
        return self.statistics()

    def _restore(self) -> bool:
        """Takes up what was committed; whether that was everything."""
        committed = None if self._progress is None else self._progress.load()
        if committed is None:
            return False
        _check_same(
            "callbacks", [known.name for known in committed.callbacks], [member.name for member in self._members]
        )
        _check_same(
            "callbacks",
            [lane.callback.name for lane in committed.lanes],
            [lane.runner._members[0].name for lane in self._lanes],
        )
        _check_same("loggers", [known.name for known in committed.destinations], list(self._destinations))
        self._positions = dict(committed.positions)
        self._last = committed.last
        self._handled = self._handled_at_commit = committed.handled
        self._gaps, self._ending, self._damage = committed.gaps, committed.ending, committed.damage
        for member, known in zip(self._members, committed.callbacks, strict=True):
            member.errors, member.disabled = known.errors, known.disabled
        self._table = self._make_table()
        if committed.ending is not None:
            return True
        for member, known in zip(self._members, committed.callbacks, strict=True):
            _load(member.name, member.callback, known.state)
        for name, state in committed.destinations:
            _load(name, self._destinations[name], state)
        for lane, point in zip(self._lanes, committed.lanes, strict=True):
            lane.runner._go_on_at(point)
        return False

    def _go_on_at(self, point: LaneState) -> None:
        (member,) = self._members
        self._point, self._positions = point, dict(point.positions)
        member.errors, member.disabled = point.callback.errors, point.callback.disabled
        self._table = self._make_table()
        if point.positions:
            _load(member.name, member.callback, point.callback.state)

    def _commit(self, ending: Ending | None = None) -> None:
        """Commits where everything stands, if nothing has failed; with ``ending``, that nothing is left to do."""
        try:
            self._store(ending)
            self._uncommitted = None
        except RunDirectoryError as error:
            if self._uncommitted is None:
                print(f"{error}; it goes on, and tries again to keep it", file=sys.stderr, flush=True)
            self._uncommitted = str(error)

    def _store(self, ending: Ending | None = None) -> None:
        self._handled_at_commit = self._handled
        self._next_commit = time.monotonic() + COMMIT_SECONDS
        if self._progress is None or self._fatal is not None or self._delivery.failed:
            return
        with self._delivery.lock:
            callbacks, destinations = self._callback_states(ending), self._destination_states(ending)
            if callbacks is None or destinations is None:
                return
            self._commit_states(self._progress, callbacks, destinations, ending)
            if self._destinations:
                self._delivery.committed()

    def _commit_states(
        self,
        progress: Progress,
        callbacks: tuple[CallbackState, ...],
        destinations: tuple[DestinationState, ...],
        ending: Ending | None,
    ) -> None:
        statistics = self.statistics()
        progress.commit(
            Committed(
                run_name=self._place.run_name,
                attempt=self._place.attempt,
                positions=self._positions,
                last=self._last,
                handled=self._handled,
                callbacks=callbacks,
                destinations=destinations,
                gaps=statistics.gaps,
                ending=ending,
                damage=statistics.damage if ending else None,
                lanes=tuple(lane.runner._point for lane in self._lanes if lane.runner._point is not None),
            )
        )

    def _callback_states(self, ending: Ending | None) -> tuple[CallbackState, ...] | None:
        states = []
        for member in self._members:
            try:
                state = {} if ending else member.callback.state_dict()
            except Exception as error:  # noqa: BLE001  a callback may raise anything, and is shown with its traceback
                self._note_error(member, error, "state_dict")
                return None
            states.append(CallbackState(member.name, member.errors, member.disabled, state))
        return tuple(states)

    def _destination_states(self, ending: Ending | None) -> tuple[DestinationState, ...] | None:
        if not self._destinations:
            return ()
        if ending is not None:
            return tuple(DestinationState(name, {}) for name in self._destinations)
        states = self._delivery.states()
        return None if states is None else tuple(DestinationState(*one) for one in states.items())

    def _is_commit_due(self) -> bool:
        handled = self._handled - self._handled_at_commit
        return handled >= self._commit_every or (handled > 0 and time.monotonic() >= self._next_commit)

    async def _consume(self) -> None:
        self._waiting = True
        if self._leaving:
            # Somebody asked for it before there was anything to interrupt.
            return
        try:
            async with contextlib.aclosing(self._snapshots()) as snapshots:
                async for snapshot in snapshots:
                    if self._progress is None and not self._keeps_point:
                        await self._handle(snapshot)
                    elif snapshot.seq > self._positions.get(snapshot.rank, _NOWHERE)[0]:
                        await self._handle(snapshot)
                        self._positions[snapshot.rank] = (snapshot.seq, snapshot.base_seq)
                    if not self._leaving and self._progress is not None and self._is_commit_due():
                        self._commit()
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
        selected = stream if select is None else select(set(self._table), after=self._positions)
        for count, snapshot in enumerate(selected, 1):
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
        for name in snapshot.on_demand:
            self._fields_since.setdefault(name, int(snapshot.timestamp.batch))
        for member in members:
            seen = view_for(member.demand, snapshot)
            if seen is None:
                continue
            try:
                result = member.callback.run_event(event, seen, logger)
                if result is not None and inspect.isawaitable(result):
                    await result
            except Exception as error:  # noqa: BLE001  a callback may raise anything, and is shown with its traceback
                self._note_error(member, error, event.value)
            if seen is not snapshot:
                seen.release()
        if logger.pending or self._keeps_point:
            with self._delivery.lock:
                has_logged = logger.pending
                self._delivery.deliver(logger, snapshot)
                if self._keeps_point:
                    self._note_point(snapshot, has_logged)
        snapshot.release()
        self._handled += 1
        self._waiting = True

    def _note_point(self, snapshot: Snapshot, has_logged: bool) -> None:
        """Notes where a runner beside another one is, for that one to commit: always when it has logged something,
        because the destinations' positions are past that."""
        if self._fatal is not None:
            # The next runner begins before what failed.
            return
        now = time.monotonic()
        if has_logged or now >= self._next_point:
            self._next_point = now + COMMIT_SECONDS
            states = self._callback_states(None)
            if states is not None:
                positions = {**self._positions, snapshot.rank: (snapshot.seq, snapshot.base_seq)}
                self._point = LaneState(positions, states[0])

    def _note_error(self, member: Member, error: Exception, where: str) -> None:
        member.errors += 1
        place = f"at {where}, seq {self._last.seq}" if self._last else f"at {where}, before any event"
        if member.errors == 1:
            show_failure(f"callback {member.name} raised {place}; what it raises from now on is only counted", error)
        if member.closed:
            return
        if self._on_error == "disable":
            member.disabled = True
            self._table = self._make_table()
        elif self._on_error == "stop":
            self._leave(CallbackError(f"callback {member.name} raised {type(error).__name__} {place}: {error}"), error)

    def _leave(self, fatal: Exception, cause: Exception | None = None) -> None:
        fatal.__cause__ = cause
        self._fatal = self._fatal or fatal
        self._leaving = True
        self._stop_waiting()

    async def _close(self) -> None:
        state = self._last or Snapshot.build(Event.INIT, run_name=self._place.run_name)
        self._logger.begin(state)
        ending = None if self._interrupted or self._fatal is not None else self.statistics().ending
        for member in self._members:
            member.closed = True
            await self._end(member, "run_ended", ending)
        closed = [member for member in self._members if await self._end(member, "close", state, self._logger)]
        self._delivery.deliver(self._logger, state)
        for member in closed:
            await self._end(member, "post_close")
        if self._destinations:
            if self._progress is not None and self._is_over:
                # Nothing follows: what callbacks logged while they were closed does not come again, either.
                self._delivery.committed()
            self._delivery.close()

    @property
    def _is_over(self) -> bool:
        """Whether the run has ended and everything of it was handled."""
        ending = self.statistics().ending
        # A run that is lost may be taken up again.
        return self._fatal is None and not self._interrupted and ending is not None and ending.status != "lost"

    async def _end(self, member: Member, method: str, *arguments: Any) -> bool:
        try:
            result: Awaitable[None] | None = getattr(member.callback, method)(*arguments)
            if result is not None and inspect.isawaitable(result):
                await result
        except Exception as error:  # noqa: BLE001  a callback may raise anything, and is shown with its traceback
            self._note_error(member, error, method)
            return False
        return True

    def _open_destinations(self) -> None:
        if not self._destinations:
            self._store()
            return
        self._delivery.open(self._place)
        try:
            # From here on what the destinations have written is known to be ours.
            self._store()
        except BaseException:
            self._delivery.close()
            raise

    async def _finish_lanes(self) -> None:
        """Waits until the callbacks with streams of their own are through, too."""
        while not self._leaving and not all(lane.is_through for lane in self._lanes):
            await asyncio.sleep(_LOOK_SECONDS)
            if self._progress is not None and time.monotonic() >= self._next_commit:
                self._commit()

    def _dismiss_lanes(self) -> None:
        for lane in self._lanes:
            if self._leaving:
                lane.runner.leave()
            lane.finish()

    async def _run_beside(self, lane: "_Lane") -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        try:
            await self._consume()
            if self._fatal is not None:
                lane.fail(self._fatal)
        except Exception as error:  # noqa: BLE001  whatever it is, the other runner raises it
            lane.fail(error)
        finally:
            lane.through.set()
            # What is logged while it is closed comes after what the other one commits.
            while not lane.may_close.is_set():
                await asyncio.sleep(_LOOK_SECONDS)
            await self._close()

    def leave(self) -> None:
        """Ends the running as SIGINT does: the event at hand is handled, and everything is closed. May be called from
        any thread."""
        self._interrupted = self._leaving = True
        self._stop_waiting()

    def _stop_waiting(self) -> None:
        def cancel() -> None:
            if self._waiting and self._task is not None:
                self._task.cancel()

        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended meanwhile
                self._loop.call_soon_threadsafe(cancel)

    def _make_table(self) -> dict[Event, list[Member]]:
        table: defaultdict[Event, list[Member]] = defaultdict(list)
        for member in self._members:
            if member.disabled:
                continue
            for event in member.wanted:
                table[event].append(member)
        return dict(table)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def on_signal(_number: int, _frame: FrameType | None) -> None:
            if self._interrupted:
                raise KeyboardInterrupt
            self.leave()

        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        taken = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
        for number in taken:
            signal.signal(number, on_signal)
        try:
            yield
        finally:
            for number, handler in taken.items():
                signal.signal(number, handler)


def _named(callbacks: Sequence[Callback | tuple[str, Callback]]) -> list[tuple[str, Callback]]:
    """The callbacks with those names that they have already, or that they get here."""
    named = [one for one in callbacks if isinstance(one, tuple)]
    rest = [one for one in callbacks if not isinstance(one, tuple)]
    return named or list(zip(numbered_names(rest), rest, strict=True))


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
    return RunPlace(
        getattr(stream, "run_name", "run"),
        getattr(stream, "attempt", 1),
        run_dir,
        getattr(stream, "command", None),
        getattr(stream, "answered", tuple),
    )


def _check_same(kind: str, before: list[str], given: list[str]) -> None:
    if before != given:
        raise ConfigurationError(
            f"this consumer has begun with the {kind} {', '.join(before) or 'none'} and is given "
            f"{', '.join(given) or 'none'}: give it those that it had, or choose another '--name'"
        )


def _load(name: str, owner: Callback | LoggerDestination, state: dict[str, Any]) -> None:
    try:
        owner.load_state_dict(state)
    except Exception as error:
        raise ConfigurationError(
            f"{name} cannot go on from what it committed, {type(error).__name__}: {error}; "
            "give it the options that it had, or choose another '--name'"
        ) from error


class _Lane:
    """A runner in a thread of its own, beside another one."""

    def __init__(self, runner: Runner, beside: Runner) -> None:
        self.runner = runner
        self.through = threading.Event()
        """Whether it has handled everything, or has given up."""
        self.may_close = threading.Event()
        self._beside = beside
        self._thread = threading.Thread(target=self._run, name="offloop-lane", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_through(self) -> bool:
        return self.through.is_set()

    def finish(self) -> None:
        """Lets it be closed, and waits for that."""
        self.may_close.set()
        if self._thread.ident is not None:
            self._thread.join()

    def fail(self, error: Exception) -> None:
        """Ends the whole for an error: it is raised by the other runner."""
        self._beside._leave(error, error.__cause__ if isinstance(error.__cause__, Exception) else None)

    def _run(self) -> None:
        try:
            asyncio.run(self.runner._run_beside(self))
        except Exception as error:  # noqa: BLE001  as above
            self.fail(error)
        finally:
            self.through.set()
