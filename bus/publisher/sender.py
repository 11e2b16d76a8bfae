"""Sends one rank's events and marks to the broker of its run, and hears what consumers request."""

import atexit
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from threading import get_ident
from time import thread_time_ns
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

from offloop.bus.errors import ConfigurationError, ProtocolError
from offloop.bus.protocol.frames import (
    CHECKPOINT,
    COMMAND,
    DEMAND,
    END,
    Topic,
    as_utf8,
    check_size,
    event_encoder,
    mark_context,
    pack_map,
)
from offloop.bus.protocol.order import Ending
from offloop.bus.publisher.deferred import PendingEvent, PendingEvents
from offloop.bus.publisher.program_end import LEFT, error_at_exit, watch_main_thread
from offloop.bus.publisher.serial_calls import SerialCalls
from offloop.bus.publisher.session import POLL_SECONDS, BrokerSession
from offloop.bus.redaction import redact
from offloop.bus.types.commands import Command
from offloop.bus.types.deferred import LeftOut
from offloop.bus.types.demand import BASE_EVENTS, ConsumerProgress, Demand
from offloop.bus.types.event import Event
from offloop.bus.types.timeouts import Timeouts
from offloop.bus.types.timestamp import Timestamp, TrainingTime

_log = logging.getLogger("offloop")

UNNAMED = "a consumer without a name"

_FIT = frozenset((Event.FIT_START, Event.FIT_END))
_FLUSH_MASK = 0xFF
_SAMPLE_MASK = 0x3F
_EXCHANGE_NS = 50_000_000
"""For which it publishes before it reads what the broker has sent."""
_REPORT_NS = 1_000_000_000
_REMEMBERED_COMMANDS = 1000
_ENDING = 10_000


class _EventEncoder(NamedTuple):
    """The encoder and properties of one event."""

    encode: Callable[..., bytes]
    counts: int
    """1 for base events, 0 for others."""
    is_urgent: bool
    """It is sent at once."""


@dataclass(frozen=True)
class PublisherStatistics:
    """Counts of a publisher since it began."""

    published: int
    """Events passed to the publisher."""
    sent: int
    """Events handed to the broker's connection, each counted once."""
    acknowledged: int
    """Events that the broker has recorded."""
    lag: int
    """Events published and not acknowledged yet."""
    resent: int
    """Events sent once more, to a broker that was started again or that had lost something."""
    dropped: int
    """Events given up unsent because the send buffer reached its bound."""
    held: int
    """Events that wait now for a value that is not computed yet."""
    backlog: int
    """Events in the send buffer that are not sent yet: they are gathered to be sent together, or the broker does not
    read fast enough."""
    backlog_bytes: int
    """Size of the send buffer: all events that are not acknowledged, sent or not."""
    backlog_bytes_high: int
    """The largest size that the send buffer has had."""
    broker_restarts: int
    """Number of times that the broker was lost and found or started again."""
    values_left_out: int
    """Values and fields that could not be sent, such as a text that is not UTF-8: all else of their event was."""
    nanoseconds_per_event: float
    """Processor time that publishing costs the thread that trains: the mean of encoding (measured at one event in 64)
    and of sending and listening (measured always). Without what the caller does before it publishes."""


class EventSender(SerialCalls):
    """The part of a publisher that trainers use; :class:`offloop.bus.Publisher` adds methods for loops of your own."""

    _closed = True  # until it is made

    def __init__(
        self,
        session: BrokerSession,
        rank: int,
        world_size: int,
        local_world_size: int,
        events: Iterable[Event],
        *,
        clock: Callable[[], int],
        max_delay: float,
        on_command: Callable[[Command], object] | None,
        timeouts: Timeouts,
    ) -> None:
        super().__init__()
        self.stop_requested = False
        """A command has requested the end of the training: a loop of your own looks here after each batch."""
        self.stop_reason: str | None = None
        """Why, and who has asked."""
        self.fit_has_ended = False
        """``FIT_END`` was published, and no further ``FIT_START``."""
        self._on_command = on_command or self._take_stop
        self._commands: deque[str] = deque(maxlen=_REMEMBERED_COMMANDS)
        self._always = frozenset(events)
        self.requested_events: set[Event] = set(self._always)
        """The events to publish now. It is changed in place, so that a loop can keep it at hand."""
        self.demand = Demand()
        """The merged demand of all consumers."""
        self.demand_version = 0
        """A number that changes whenever :attr:`demand` does."""
        self._closed = False
        self.run_name: str = session.run_name
        """The run's name: another one than was given if that was taken."""
        self.attempt: int = session.welcome["attempt"]
        self.info = session.info
        """The run's description in ``run.json``: what was given as ``info``, and the process."""
        self.address = session.address
        """Address of the run's broker, for further ranks."""
        self._topic = Topic(self.run_name, END, rank)
        self._world_size = world_size
        self._local_world_size = local_world_size
        self._clock = clock
        self._encoders = {
            event: _EventEncoder(
                self._new_encoder(event.value),
                int(event in BASE_EVENTS),
                event in BASE_EVENTS and event is not Event.BATCH_END,
            )
            for event in Event
        }
        self._session = session
        self._state = session.state
        self._outbox = self._state.outbox
        self._put = self._outbox.put
        self.left_out = LeftOut(self.run_name)
        """Values that could not be published."""
        self._pending = PendingEvents(self.left_out)
        self._own_delay = self._max_delay = round(max_delay * 1e9)
        self._last_time = self._flush_at = self._next_exchange = self._next_report = 0
        self._encoding_time = self._encodings_timed = self._flushing_time = 0
        self._patience = timeouts.flush
        self._is_ending = self._is_left = False
        self._at = Timestamp().values
        self._consumers: dict[str, ConsumerProgress] = {}
        self.expected_consumers: set[str] = set()
        """Names of consumers that are waited for to come: a name is taken out when its consumer has come, also when it
        has left since."""
        self.kept_events: frozenset[Event] = frozenset()
        """The events that stay in :attr:`requested_events` when no broker will take the run any more: for ranks that do
        something together at them."""
        self._take_report(session.welcome)
        watch_main_thread()
        _open_senders.add(self)

    def _new_encoder(self, name: str) -> Callable[..., bytes]:
        return event_encoder(self._topic._replace(name=name), self.attempt)

    @staticmethod
    def pack_context(context: dict[str, Any]) -> bytes:
        """Packs what changes rarely, once for many :meth:`send`."""
        return pack_map(context)

    def send(
        self,
        event: Event,
        timestamp: TrainingTime,
        previous: TrainingTime | None,
        fields: dict[str, Any],
        context: bytes,
        has_deferred: bool = False,
        *,
        _in_turn: bool = False,
    ) -> None:
        """Publishes an event without checking whether it is requested: the fast way, for loops that look into
        :attr:`requested_events` themselves.

        ``timestamp`` and ``previous`` are the 14 values of a :class:`~offloop.bus.types.timestamp.Timestamp`;
        ``context`` comes from :meth:`pack_context`.

        With ``has_deferred`` there may be :class:`Deferred` values among the fields. The event, and every one after
        it, is then held back in order until they are there; that is looked up at later events, and waited for only at
        FIT_END and :meth:`close`. ``fields`` may be kept until then."""
        if not _in_turn:
            me = get_ident()
            if self._waiting or self._inside:  # as SerialCalls._in_turn, without a call
                if not has_deferred:
                    # What cannot be sent is refused where it is given.
                    check_size(len(self._encoders[event].encode(1, 1, 0, timestamp, previous, fields, context)))
                self._postpone(
                    partial(self.send, event, timestamp, previous, fields, context, has_deferred, _in_turn=True)
                )
                return
            self._inside = me
        try:
            if self._closed:
                # By another thread or a signal handler, after the caller has checked whether the event is requested.
                return
            now = self._clock()
            if now < self._last_time:
                now = self._last_time
            encode, counts, is_urgent = self._encoders[event]
            # An event has its number once it is in one of these: one that cannot be packed leaves no hole, nor does one
            # in which a signal handler raises.
            last = self._pending[-1] if self._pending else self._outbox
            seq = last.seq + 1
            base_seq = last.base_seq + counts
            self._last_time = now
            if has_deferred or self._pending:
                self._pending.append(PendingEvent(encode, seq, base_seq, now, timestamp, previous, fields, context))
            elif seq & _SAMPLE_MASK:
                self._put(encode(seq, base_seq, now, timestamp, previous, fields, context), base_seq)
            else:
                began = thread_time_ns()
                self._put(encode(seq, base_seq, now, timestamp, previous, fields, context), base_seq)
                self._encoding_time += thread_time_ns() - began
                self._encodings_timed += 1
            if now >= self._flush_at or is_urgent or not seq & _FLUSH_MASK:
                if is_urgent and event in _FIT:
                    self.fit_has_ended = event is Event.FIT_END
                self._flush(wait=event is Event.FIT_END)
        finally:
            if not _in_turn:
                self._inside = 0
                if self._waiting:
                    self._catch_up()

    def _refuses_waiting(self) -> bool:
        if self._closed and not self._state.lost and not self._is_left:
            _log.warning("run %s was closed before %d further calls", self.run_name, len(self._waiting))
        return self._closed

    def _progress(self) -> object:
        return self._seq

    def _note_failed(self, error: Exception) -> None:
        self.left_out.add("what a signal handler or another thread published", error)

    def poll(self) -> None:
        """Sends what waits and reads what the broker said, without waiting. :meth:`send` does it by itself; this is for
        loops that pause."""
        if not self._closed and not self._inside:
            self._in_turn(self._poll)

    def _publish_waiting(self) -> None:
        """Publishes what waits for an event to travel with."""

    def _poll(self) -> None:
        if self._closed:
            return
        self._publish_waiting()
        self._next_exchange = 0
        self._flush(wait=False)

    @property
    def _seq(self) -> int:
        """The number of the last event."""
        return (self._pending[-1] if self._pending else self._outbox).seq

    @property
    def run_dir(self) -> Path:
        """The run's directory, as the broker sees it."""
        return self._state.run_dir

    @property
    def recording(self) -> Path:
        """The recording of this attempt."""
        return self._state.recording

    @property
    def closed(self) -> bool:
        """Nothing is published any more."""
        return self._closed

    def wait(self) -> None:
        """As :meth:`poll`, after a moment in which something may come."""
        if self._inside:
            # Who is at work there listens; the socket is for one at a time.
            time.sleep(POLL_SECONDS)
        elif not self._closed:
            self._in_turn(self._wait)

    def _wait(self) -> None:
        if not self._closed:
            self._session.wait()
            self._poll()

    def _flush(self, *, wait: bool) -> None:
        began = thread_time_ns()
        self._flush_at = self._last_time + self._max_delay
        if self._pending:
            self._pending.move(self._outbox, wait=wait)
        self._outbox.send()
        if self._last_time >= self._next_exchange:
            self._next_exchange = self._last_time + _EXCHANGE_NS
            self._exchange()
        self._flushing_time += thread_time_ns() - began

    def _exchange(self) -> None:
        # One at a time, because a command may have another event published, and that reads messages too.
        while not self._closed and (message := self._session.receive()) is not None:
            if message.kind == "command":
                self._take_command(message.content)
            else:
                self._take_report(message.content)
        if self._closed:
            return
        self._session.tick()
        if self._state.lost:
            self._shut()
            return
        self._outbox.send()
        if self._last_time >= self._next_report:
            self._next_report = self._last_time + _REPORT_NS
            self._session.report(asdict(self.statistics()))

    def _take_command(self, content: dict[str, Any]) -> None:
        try:
            command = Command.from_wire(content)
        except ProtocolError as error:
            _log.warning("run %s: skipped a command: %s", self.run_name, error)
            return
        # One that is sent again, because a broker died or its answer was lost, may have come before.
        if command.id and command.id in self._commands:
            return
        self._commands.append(command.id)
        self._on_command(command)

    def _take_stop(self, command: Command) -> None:
        if command.name == "stop":
            self.stop_requested = True
            self.stop_reason = command.reason
            self.answer(command, Event.BATCH_END, self._at)
        else:
            self.answer(command, Event.BATCH_END, self._at, "this training loop takes no other command than 'stop'")

    def answer(
        self, command: Command, event: Event, timestamp: TrainingTime, error: str | None = None, done: str | None = None
    ) -> None:
        """Reports to the sender, and records, that a command has taken effect at an event, or with ``error`` why it has
        not. ``timestamp`` is the training time of that, as for :meth:`send`; ``done`` is the file that was written."""
        self._in_turn(partial(self._answer, command, event, timestamp, error, done))

    def _answer(
        self, command: Command, event: Event, timestamp: TrainingTime, error: str | None, done: str | None
    ) -> None:
        if self._closed:
            return
        batch, error = timestamp.batch, redact(error)
        written = {} if done is None else {"done": done}
        self._publish_mark(COMMAND, timestamp, {**command.to_wire(), "event": event.value, "error": error, **written})
        if command.id:
            outcome = {"id": command.id, "event": event.value, "batch": batch, "error": error, **written}
            self._session.say("applied", outcome)

    def _take_report(self, report: dict[str, Any]) -> None:
        """Takes what the broker reports of consumers: ``demand`` and all of them, or those that have come further."""
        self._take_progress(report)
        if "demand" in report:
            self._take_demand(report)

    def _take_progress(self, report: dict[str, Any]) -> None:
        rank = self._topic.rank
        try:
            consumers = {key: ConsumerProgress.from_wire(one, rank) for key, one in report.get("consumers", {}).items()}
        except (ProtocolError, AttributeError) as error:
            _log.warning("run %s: what the broker says of consumers is malformed: %s", self.run_name, error)
            return
        if "demand" in report:
            self._consumers = {}
        self._consumers.update(consumers)
        self.expected_consumers.difference_update(one.name for one in consumers.values() if one.name is not None)

    def is_handled(self, seq: int, field: str) -> bool:
        """Whether every consumer that asks for a field has handled an event, by its number: until then
        it may have borrowed memory with that field."""
        rank = self._topic.rank
        return all(one.handled[rank] >= seq for one in self._consumers.values() if field in one.fields)

    @property
    def consumers(self) -> Collection[ConsumerProgress]:
        """The consumers that have barrier events or request further fields; as far as the broker has said."""
        return self._consumers.values()

    @property
    def next_seq(self) -> int:
        """The number of the event that is published next."""
        return self._seq + 1

    def wait_until_handled(
        self,
        event: Event,
        names: Collection[str] | None,
        seconds: float,
        leave: Callable[[], bool] = lambda: False,
    ) -> set[str]:
        """Waits until each consumer with an event among its barrier events is through with everything published so far:
        those of these names, or all. No longer than ``seconds``, nor when ``leave`` says so; returns the names of those
        that are not.

        The one place where a publisher waits in the course of a training."""
        if self._closed or not self._late(event, names, self._seq + 1):
            return set()
        self._next_exchange = 0
        self._in_turn(partial(self._flush, wait=True))
        seq, deadline = self._seq, time.monotonic() + seconds
        while not self._closed and (late := self._late(event, names, seq)):
            if time.monotonic() >= deadline or leave():
                return late
            self.wait()
        return set()

    def _late(self, event: Event, names: Collection[str] | None, seq: int) -> set[str]:
        rank = self._topic.rank
        return {
            one.name or UNNAMED
            for one in self._consumers.values()
            if event.value in one.barrier_events
            and one.handled[rank] < seq
            and (names is None or (one.name or UNNAMED) in names)
        }

    def _take_demand(self, report: dict[str, Any]) -> None:
        try:
            demand = Demand.from_wire(report["demand"] or {})
        except ProtocolError as error:
            _log.warning("run %s: the demand that the broker sent is malformed: %s", self.run_name, error)
            return
        self._use_delay(demand.max_delay)
        demand = demand.content
        if demand != self.demand:
            self.demand = demand
            self.demand_version += 1
            self.requested_events &= self._always | demand.events
            self.requested_events |= demand.events

    def _use_delay(self, delay: float | None) -> None:
        """Sends as soon as consumers ask for it, from now on."""
        self._max_delay = self._own_delay if delay is None else min(self._own_delay, round(delay * 1e9))
        self._flush_at = min(self._flush_at, self._last_time + self._max_delay)

    def demand_in_effect(self, timestamp: TrainingTime) -> None:
        """Records in the stream that the demand is met from here on."""
        self._in_turn(partial(self._publish_mark, DEMAND, timestamp, {"demand": self.demand.to_wire()}))

    def mark_checkpoint(self, action: Literal["save", "load"], timestamp: TrainingTime, run: str | None = None) -> None:
        """Records in the stream that a checkpoint of this training time is saved here, or was loaded: consumers keep
        the state that their callbacks have here, or continue from the one that they had there. ``run`` is the run that
        a loaded checkpoint is of, by default this one.

        To be called by the first rank, before it writes the file, so that a checkpoint that exists has its mark. It
        waits for values on a device that earlier events lack, as the copies for the file do."""
        if not self._closed:
            fields = {"action": action, "run": run or self.run_name}
            self._in_turn(partial(self._publish_checkpoint_mark, timestamp, fields))

    def _publish_checkpoint_mark(self, timestamp: TrainingTime, fields: dict[str, Any]) -> None:
        self._publish_mark(CHECKPOINT, timestamp, fields)
        self._flush(wait=True)

    def _publish_mark(self, name: str, timestamp: TrainingTime, fields: dict[str, Any]) -> None:
        context = mark_context(self._world_size, self._local_world_size)
        now = max(self._clock(), self._last_time)
        last = self._pending[-1] if self._pending else self._outbox
        mark = PendingEvent(
            self._new_encoder(name), last.seq + 1, last.base_seq + 1, now, timestamp, None, fields, context
        )
        self._last_time = now
        if self._pending:
            self._pending.append(mark)
        else:
            self._put(mark.to_frame(self.left_out), mark.base_seq)

    def close(self, status: str = "finished", error: str | None = None, reason: str | None = None) -> None:
        """Ends the stream: sends what is left and how the run ended (``finished``, ``failed`` or ``stopped``), and
        waits until the broker has it on disk, but no longer than five seconds without progress. ``reason`` says why
        it was stopped, by default :attr:`stop_reason`. Can be called more than once."""
        if self._closed:
            return
        if status not in ("finished", "failed", "stopped"):
            raise ConfigurationError(f"a run cannot end {status!r}: use 'finished', 'failed' or 'stopped'")
        self._in_turn(partial(self._close, status, error, reason))
        self._await_close()

    def _await_close(self) -> None:
        """Waits until another thread has closed this object that was at work in it; nothing is waited for in a signal
        handler, which the call below it cannot overtake."""
        deadline = time.monotonic() + self._patience
        while not self._closed and self._inside != get_ident():
            if time.monotonic() > deadline and not self._is_ending:
                _log.warning(
                    "run %s is not closed: another thread has been at work in its publisher for %g s",
                    *(self.run_name, self._patience),
                )
                return
            time.sleep(POLL_SECONDS)
            self._catch_up()

    def _close(self, status: str, error: str | None, reason: str | None) -> None:
        if self._closed or self._is_ending:
            return
        try:
            try:
                self._publish_waiting()
                self._flush(wait=True)
                # What others publish from here on is refused.
                self._is_ending = True
                self._do_waiting()
                self._publish_waiting()
            finally:
                # Whatever has failed before, such as a command of the user's, the stream comes to its end.
                self._is_ending = True
                if not self._closed:
                    self._pending.move(self._outbox, wait=True)
                    reason = reason or (self.stop_reason if status == "stopped" else None)
                    error, reason = redact(error), redact(reason)
                    ending = Ending(status, error and as_utf8(error[:_ENDING]), reason and as_utf8(reason[:_ENDING]))
                    self._publish_mark(END, Timestamp().values, ending.to_fields())
                    self._session.flush(self._seq)
        finally:
            self._shut()

    def close_left(self, error: BaseException | None) -> None:
        """As :meth:`close`, for a run that the program has left, by this error. What comes after the end of the
        training (``FIT_END``) does not change how it ended."""
        if self.fit_has_ended and isinstance(error, KeyboardInterrupt):
            error = None
        if error is None and self.stop_requested:
            error = KeyboardInterrupt(self.stop_reason or "")
        self.close(*ending_for(error))

    def _shut(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.requested_events &= self.kept_events
        _open_senders.discard(self)
        self.left_out.report()
        self._session.close()

    @property
    def recorded_all(self) -> bool:
        """The broker has all published events on disk."""
        state = self._state
        return not state.lost and state.write_error is None and state.acknowledged >= self._seq

    def statistics(self) -> PublisherStatistics:
        """Counts of what was published, sent and recorded."""
        state, outbox = self._state, self._outbox
        encoding = self._encoding_time / max(1, self._encodings_timed)
        return PublisherStatistics(
            published=self._seq,
            sent=outbox.sent,
            acknowledged=state.acknowledged,
            lag=self._seq - state.acknowledged,
            resent=outbox.resent,
            dropped=outbox.dropped,
            held=len(self._pending),
            backlog=len(outbox),
            backlog_bytes=outbox.size,
            backlog_bytes_high=outbox.size_high,
            broker_restarts=state.restarts,
            values_left_out=self.left_out.count,
            nanoseconds_per_event=encoding + self._flushing_time / max(1, self._seq),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(*ending_for(error))

    def __del__(self) -> None:
        if not self._closed:
            self.close_left(KeyboardInterrupt(LEFT))

    def _forget(self) -> None:
        """In a forked child: the stream stays the parent's."""
        self._closed = True
        self._waiting.clear()
        self.requested_events.clear()


def ending_for(error: BaseException | None) -> tuple[str, str | None, str | None]:
    """The status, error and reason for :meth:`EventSender.close` of a run that ``error`` has ended. What a
    ``KeyboardInterrupt`` carries is the reason."""
    if error is None:
        return "finished", None, None
    if isinstance(error, KeyboardInterrupt):
        return "stopped", None, str(error) or "signal SIGINT"
    if isinstance(error, SystemExit) and error.code in (None, 0):
        return "finished", None, None
    return "failed", f"{type(error).__name__}: {error}", None


_open_senders: "weakref.WeakSet[EventSender]" = weakref.WeakSet()


def _close_forgotten() -> None:
    """At exit, ends the streams that were not closed."""
    error = error_at_exit()
    for publisher in list(_open_senders):
        publisher._is_left = True
        publisher.close_left(error)


def _forget_in_child() -> None:
    for publisher in list(_open_senders):
        publisher._forget()


atexit.register(_close_forgotten)
os.register_at_fork(after_in_child=_forget_in_child)
