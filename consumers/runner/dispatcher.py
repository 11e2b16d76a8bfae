"""Passes one stream of snapshots through the callbacks that share it."""

import asyncio
import contextlib
import inspect
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from offloop.bus.errors import OffloopError
from offloop.bus.printing import say
from offloop.bus.protocol.order import CheckpointMark
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.protocol.stream import RunStream
from offloop.bus.types.actor import FIRST_ACTOR
from offloop.bus.types.demand import barrier_events_of
from offloop.bus.types.event import Event
from offloop.bus.types.hyperparameters import EVENTS as WITH_HYPERPARAMETERS
from offloop.bus.types.hyperparameters import hyperparameters_in
from offloop.bus.types.source import Source
from offloop.consumers.api.callback import Callback, CannotWorkError, OnError, demand_of
from offloop.consumers.api.logger import Logger, RunContext
from offloop.consumers.api.view import view_for
from offloop.consumers.delivery.commit import CallbackState
from offloop.consumers.delivery.fanout import RAISED, Fanout, show_failure
from offloop.consumers.runner.entries import CallbackEntry, missing_lines

_NOWHERE = (0, 0)
_FLUSH_SECONDS = 0.05
_WINDOW_SECONDS = 0.25

AtCheckpoint: TypeAlias = Callable[[CheckpointMark, "Dispatcher"], None]


class CallbackError(OffloopError):
    """Raised when a callback raised and the runner was to stop; the callback's own exception is the ``__cause__``."""


class Handling:
    """Shared by the dispatchers of a runner: the handling of errors, and the known source of the run.

    ``keeps_positions`` keeps positions, skips events before them, and delivers after each event."""

    def __init__(
        self, on_error: OnError = "continue", keeps_positions: bool = False, at_checkpoint: AtCheckpoint | None = None
    ) -> None:
        self.on_error: OnError = on_error
        self.keeps_positions = keeps_positions
        self.at_checkpoint = at_checkpoint
        self.source: Source = Source()
        self.first_error: BaseException | None = None
        self.dispatchers: list[Dispatcher] = []  # the dispatcher of the shared stream is the first

    @property
    def entries(self) -> "list[CallbackEntry]":
        return [entry for dispatcher in self.dispatchers for entry in dispatcher.entries]

    def note_error(self, entry: CallbackEntry, error: BaseException, where: str) -> None:
        self.first_error = self.first_error or error
        if isinstance(error, CannotWorkError):
            show_failure(f"callback {entry.name} has ended", error)
        elif entry.errors == 1:
            show_failure(f"callback {entry.name} raised {where}; further errors are counted, not shown", error)

    def note_source(self, source: Source, run: str) -> None:
        """Store the source of the run's events, and report the callbacks that wait for what it never gives."""
        self.source = source
        for line in missing_lines(self.entries, source, run):
            say(line, err=True)

    def note_ended(self) -> None:
        if not any(entry.is_active for entry in self.entries):
            self.fail(CallbackError("no callback is left: this consumer ends"))

    def fail(self, error: Exception) -> None:
        """End the runner because of an error. Callable from any thread."""
        for dispatcher in self.dispatchers[:1]:
            dispatcher.fail(error)


class _Target(NamedTuple):
    entry: CallbackEntry
    call: Callable[[Snapshot, Logger], Awaitable[None] | None]
    sees_all: bool  # it receives every such event as it is, unless that has fields on demand


class _Table(dict[tuple[Event, int], "list[_Target] | None"]):
    """The targets of an event, by the event and its sender: 0 the first rank, 1 another one, 2 an actor.

    ``None`` without any."""

    def __init__(self, entries: Sequence[CallbackEntry]) -> None:
        super().__init__()
        self._entries = entries

    def __missing__(self, key: tuple[Event, int]) -> list[_Target] | None:
        event, sender = key
        found: list[_Target] = []
        for entry in self._entries:
            demand, events = entry.demand, entry.demand.events
            if event.is_own and event.is_in(events):
                found.append(_Target(entry, entry.handler_of(event), True))
            elif event in events and (True, entry.callback.all_ranks, entry.callback.sees_actors)[sender]:
                found.append(_Target(entry, entry.handler_of(event), demand.is_at_every_batch(event)))
        self[key] = targets = found or None
        return targets


class Dispatcher:
    """Passes each snapshot of a stream to the callbacks that request its event, one after the other.

    Ends with the stream, or at :meth:`stop` or :meth:`fail`; then closes the callbacks. ``fanout`` receives what
    was logged after each event, and is flushed when nothing more is ready, and from time to time before that. With
    ``logs_hyperparameters`` it logs the run's own hyperparameters."""

    def __init__(
        self,
        stream: RunStream,
        callbacks: Sequence[tuple[str, Callback]],
        fanout: Fanout,
        handling: Handling,
        logs_hyperparameters: bool = True,
    ) -> None:
        self.fanout = fanout
        self.deliver: Callable[[Logger, Snapshot], None] = fanout.deliver
        """Passes what was logged during an event to the destinations."""
        self.handling = handling
        self.entries: list[CallbackEntry] = [CallbackEntry(callback, name) for name, callback in callbacks]
        self.context: RunContext = RunContext(
            *(stream.run_name, stream.attempt, stream.run_dir, stream.commander, stream.answered),
            *(stream.run_id, stream.checkpoints, lambda: self.handling.source),
        )
        self.positions: dict[int, tuple[int, int]] = {}
        """Rank to ``(seq, base_seq)`` of the last event that need not come again."""
        self.last: Snapshot | None = None
        self.handled: int = 0  # events that at least one callback received
        self.fields_since: dict[str, int] = {}  # requested field to the number of the batch with which it came first
        self.fatal: Exception | None = None  # the error that ended it before its stream
        self.stopping: bool = False  # it stops after the current event
        self.interrupted: bool = False
        self.stream = stream
        self._keeps_positions = handling.keeps_positions
        self._with_hyperparameters = WITH_HYPERPARAMETERS if logs_hyperparameters else frozenset()
        self._logger = Logger(self.context)
        self._table = self._make_table()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._waiting = False
        self._looking: asyncio.TimerHandle | None = None
        self._running: CallbackEntry | None = None
        stream.name_sender = lambda: None if self._running is None else f"callback {self._running.name}"
        if handling.at_checkpoint is not None:
            stream.on_checkpoint = self._see_checkpoint

    def resume_from(self, positions: Mapping[int, tuple[int, int]], callbacks: Sequence[CallbackState]) -> None:
        """Resume from another dispatcher's positions and error counts; the callbacks' states are not loaded here."""
        self.positions = dict(positions)
        for entry, known in zip(self.entries, callbacks, strict=True):
            entry.errors, entry.disabled = known.errors, known.disabled
        self._table = self._make_table()

    def callback_states(self, entries: Sequence[CallbackEntry] | None = None) -> tuple[CallbackState, ...] | None:
        """States of the callbacks, or of ``entries``; ``None`` when ``state_dict`` of one of them raised."""
        states = []
        for entry in self.entries if entries is None else entries:
            try:
                state = entry.callback.state_dict()
            except RAISED as error:  # a callback may raise anything, and is shown with its traceback
                self._take_error(entry, error, "state_dict")
                return None
            states.append(CallbackState(entry.name, entry.errors, entry.disabled, state))
        return tuple(states)

    def load_state(self, entry: CallbackEntry, state: dict[str, Any]) -> None:
        try:
            entry.callback.load_state_dict(state)
        except RAISED as error:  # a callback may raise anything, and is shown with its traceback
            self._take_error(entry, error, "load_state_dict")

    async def consume(self, after_each: Callable[[], None] | None = None) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        if self.stopping:
            return
        self._waiting = True
        try:
            await self._prepare()
            demanded = (entry.demand.events for entry in self.entries if entry.is_active)
            events = set(self._with_hyperparameters).union(*demanded)
            self._look_for_windows()
            async with contextlib.aclosing(self.stream.read(events, self.positions)) as batches:
                async for batch in batches:
                    self._waiting = False
                    try:
                        await self._handle_all(batch, after_each)
                    finally:
                        self.fanout.flush()
                    self._waiting = True
                    if self.stopping:
                        break
            # The last windows come when the run has ended.
            self._give_windows()
        except asyncio.CancelledError:
            # Cancelled by ourselves while waiting for the next snapshot, or by the owner of the event loop.
            task = asyncio.current_task()
            if not self.stopping or task is None or task.uncancel() > 0:
                raise
        finally:
            self._waiting = False
            if self._looking is not None:
                self._looking.cancel()

    def _look_for_windows(self) -> None:
        """Pass the windows of hosts to callbacks whenever nothing else is being handled."""
        if not any(entry.callback.overrides("host_windows") for entry in self.entries):
            return
        if self._waiting:
            self._give_windows()
        assert self._loop is not None
        self._looking = self._loop.call_later(_WINDOW_SECONDS, self._look_for_windows)

    def _give_windows(self) -> None:
        entries = [entry for entry in self.entries if entry.is_active and entry.callback.overrides("host_windows")]
        # What is logged needs the time of an event.
        windows = self.stream.host_windows() if entries and self.last is not None else ()
        if not windows or self.last is None:
            return
        self._logger.begin(self.last)
        for entry in entries:
            try:
                entry.callback.host_windows(windows, self._logger)
            except RAISED as error:  # a callback may raise anything, and is shown with its traceback
                self._take_error(entry, error, "host_windows")
        if self._logger.pending:
            self.deliver(self._logger, self.last)
            self.fanout.flush()

    async def close(self) -> None:
        state = self.last or Snapshot.build(Event.INIT, run_name=self.context.run_name)
        self._logger.begin(state)
        ending = None if self.interrupted or self.fatal is not None else self.stream.ending
        for entry in self.entries:
            entry.closed = True
            await self._call(entry, "run_ended", ending)
        closed = [entry for entry in self.entries if await self._call(entry, "close", state, self._logger)]
        self.deliver(self._logger, state)
        self.fanout.flush()
        for entry in closed:
            await self._call(entry, "post_close")

    def stop(self) -> None:
        """Stop after the current event, on request. Callable from any thread."""
        self.interrupted = True
        self._interrupt()

    def fail(self, error: Exception) -> None:
        """End after the current event, because of an error: the first one counts. Callable from any thread."""
        self.fatal = self.fatal or error
        self._interrupt()

    def _interrupt(self) -> None:
        def cancel() -> None:
            if self._waiting and self._task is not None:
                self._task.cancel()

        self.stopping = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended meanwhile
                self._loop.call_soon_threadsafe(cancel)

    async def _prepare(self) -> None:
        # Of several streams of a runner, one brings the hyperparameters.
        logger = self._logger if self._with_hyperparameters else Logger()
        for entry in self.entries:
            if self.positions:
                await self._call(entry, "resumed", logger)
            elif len(self.entries) == 1:
                await self._call(entry, "prepare", self.stream, logger)

    async def _handle_all(self, batch: Sequence[Snapshot], after_each: Callable[[], None] | None) -> None:
        # One function without a call for each event: a million events a minute pass here.
        logger, positions = self._logger, self.positions
        next_flush = time.monotonic() + _FLUSH_SECONDS
        for snapshot in batch:
            event, rank = snapshot.event, snapshot.rank
            if self._keeps_positions and snapshot.seq <= positions.get(rank, _NOWHERE)[0]:
                continue
            targets = self._table[event, (rank > 0) + (rank >= FIRST_ACTOR)]
            if event in self._with_hyperparameters and rank == 0:
                self._note_hyperparameters(snapshot)
            if targets is not None:
                logger.begin(snapshot)
                self.last = snapshot
                is_plain = "on_demand" not in snapshot._body.fields
                if not is_plain:
                    for name in snapshot.on_demand:
                        self.fields_since.setdefault(name, int(snapshot.timestamp.batch))
                for entry, call, sees_all in targets:
                    seen = snapshot if sees_all and is_plain else view_for(entry.demand, snapshot)
                    if seen is None:
                        continue
                    self._running = entry
                    try:
                        result = call(seen, logger)
                        if result is not None and inspect.isawaitable(result):
                            await result
                    except RAISED as error:  # a callback may raise anything, and is shown with its traceback
                        self._take_error(entry, error, event.value)
                    if seen is not snapshot:
                        seen.release()
                self.deliver(logger, snapshot)
                if snapshot._opened is not None:
                    snapshot.release()
                self.handled += 1
            elif logger.pending:
                self.deliver(logger, snapshot)
            if self._keeps_positions:
                positions[rank] = (snapshot.seq, snapshot.base_seq)
            if self.stopping:
                return
            if after_each is not None:
                after_each()
            if time.monotonic() >= next_flush:
                self.fanout.flush()
                next_flush = time.monotonic() + _FLUSH_SECONDS

    def _note_hyperparameters(self, snapshot: Snapshot) -> None:
        self._logger.take_from_run(hyperparameters_in(snapshot.fields))
        if snapshot.event is Event.INIT:
            self.handling.note_source(Source.of(snapshot.fields), self.context.run_name)

    def _see_checkpoint(self, mark: CheckpointMark) -> None:
        at_checkpoint = self.handling.at_checkpoint  # marks before this position were handled by an earlier consumer
        if at_checkpoint is not None and mark.seq > self.positions.get(0, _NOWHERE)[0]:
            at_checkpoint(mark, self)

    async def _call(self, entry: CallbackEntry, method: str, *arguments: Any) -> bool:
        try:
            result: Awaitable[None] | None = getattr(entry.callback, method)(*arguments)
            if result is not None and inspect.isawaitable(result):
                await result
        except RAISED as error:  # a callback may raise anything, and is shown with its traceback
            self._take_error(entry, error, method)
            return False
        return True

    def _take_error(self, entry: CallbackEntry, error: BaseException, where: str) -> None:
        if isinstance(error, asyncio.CancelledError) and self._task is not None and self._task.cancelling():
            # The owner of the event loop has cancelled this consumer.
            raise error
        entry.errors += 1
        place = f"at {where}, seq {self.last.seq}" if self.last else f"at {where}, before any event"
        self.handling.note_error(entry, error, place)
        if entry.closed:
            return
        if self.handling.on_error == "stop":
            raised = CallbackError(f"callback {entry.name} raised {type(error).__name__} {place}: {error}")
            raised.__cause__ = error
            self.fail(raised)
        elif isinstance(error, CannotWorkError):
            entry.ended = True
            self._drop_inactive()
            self.handling.note_ended()
        elif self.handling.on_error == "disable":
            entry.disabled = True
            self._drop_inactive()

    def _drop_inactive(self) -> None:
        self._table = self._make_table()
        active = [entry.callback for entry in self.entries if entry.is_active]
        self.stream.ask_for(demand_of(active), barrier_events_of(active))

    def _make_table(self) -> "_Table":
        return _Table([entry for entry in self.entries if entry.is_active])
