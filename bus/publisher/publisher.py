"""The sending end: what a training loop uses. Between start and close it waits for a peer only where the loop asks for
that (:meth:`Publisher.wait_until_handled`)."""

import atexit
import logging
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from threading import get_ident
from time import thread_time_ns
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

from offloop.bus.errors import ClosedError, ConfigurationError, ProtocolError
from offloop.bus.protocol import frames
from offloop.bus.protocol.frames import Topic, check_size, pack_map
from offloop.bus.protocol.order import Ending
from offloop.bus.publisher.audience import Audience
from offloop.bus.publisher.deferred import PendingEvent, PendingEvents
from offloop.bus.publisher.description import Info
from offloop.bus.publisher.logged import checked_step
from offloop.bus.publisher.own_loop import OwnLoop, check_loss
from offloop.bus.publisher.program_end import LEFT, error_at_exit, watch_main_thread
from offloop.bus.publisher.serial_calls import SerialCalls
from offloop.bus.publisher.session import POLL_SECONDS, connect
from offloop.bus.redaction import redact
from offloop.bus.types.commands import Command
from offloop.bus.types.deferred import LeftOut, is_deferred
from offloop.bus.types.demand import BASE_EVENTS, ConsumerProgress, Demand, check_max_delay
from offloop.bus.types.event import Event
from offloop.bus.types.intervals import EventPosition, batch_number
from offloop.bus.types.timeouts import Timeouts
from offloop.bus.types.timestamp import Timestamp, TrainingTime, wall_clock

if TYPE_CHECKING:
    from offloop.bus.protocol.flight_ring import FlightRing

_log = logging.getLogger("offloop")

BACKLOG_BYTES = 64 * 1024 * 1024
MIN_BACKLOG_BYTES = 64 * 1024

_FIT = frozenset((Event.FIT_START, Event.FIT_END))
_FLUSH_MASK = 0xFF
_SAMPLE_MASK = 0x3F
_EXCHANGE_NS = 50_000_000  # for which it publishes before it reads what the broker has sent
_REPORT_NS = 1_000_000_000
_REMEMBERED_COMMANDS = 1000
_ENDING = 10_000


class _EventEncoder(NamedTuple):
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


class Publisher(SerialCalls):
    """Publishes one rank's events to the broker of a run, and starts that broker when none is named.

    Publishing is bounded in time and memory: an event is encoded and handed to a socket that does not wait. While the
    broker does not read, events are kept (``backlog_bytes``, 64 MiB by default) and sent later; past that bound the
    oldest are dropped and counted. Inner events and ``batch_end`` are gathered, because waking other processes costs
    the loop more than the sending, and sent with the first event or :meth:`poll` that comes ``max_delay`` seconds or
    more after the last sending, or sooner where a consumer's demand has a shorter delay. All other events are sent at
    once, with what was gathered before.

    Any thread may call it, and so may signal handlers and finalizers, also in the middle of another call: nothing waits
    for that other call, which does what was requested as its last act. Only :meth:`close` waits for another thread.

    Where several hosts have brokers of their own, ``local_world_size`` is how many of the ranks publish to this one:
    its run ends with them. The first of them starts the broker, and the others join it at its :attr:`address`.
    ``attempt`` and ``run_id`` are what all hosts have agreed on, see :func:`offloop.bus.runs.writing.next_attempt`.

    ``run_name`` defaults to a new name. Where a run has that name already, this one gets it with a number,
    ``NAME-2``, as :attr:`run_name`; with ``resume`` it is the next attempt of the run of that name, if there is one, as
    it is where ``torchrun`` has started a failed process again. ``broker`` is the :attr:`address` of the
    first rank's publisher on this host, for further ranks; the first one starts the broker, which copies the run to the
    NATS servers at ``stream_to``, such as ``nats://HOST:4222``, by default ``$OFFLOOP_STREAM``. ``events`` are
    published in any case, further ones while a consumer requests them; the live set is :attr:`requested_events`.
    ``info``, or what a function ``info(run_name)`` returns, goes into ``run.json``; where it has ``unavailable``, such
    as ``{"events": ["epoch_end"], "fields": {"gradient_norm": "why"}}``, consumers that wait for these say so at once.
    ``clock`` gives nanoseconds since 1970. ``on_command`` is called with each
    :class:`~offloop.bus.types.commands.Command` that comes, once, while an event is published or in :meth:`poll`; it is
    to be answered with :meth:`answer`. Without it ``stop`` sets :attr:`stop_requested`, and others are refused.
    ``timeouts`` says how long it waits for the broker. ``flight`` is the memory of a flight recorder, which the caller
    fills, and from which the broker writes a recording when there is a reason.

    Raises:
        ConfigurationError: an argument cannot be what it is, or this is a Python without its global lock (GIL).
        RunIsLiveError: the run that is to be resumed has a live publisher.
        RunDirectoryError: the run's directory cannot be written.
        BrokerError: the broker did not start, or refused.
    """

    _closed = True  # until it is made

    def __init__(
        self,
        run_name: str | None = None,
        *,
        runs_dir: str | os.PathLike[str] | None = None,
        broker: str | None = None,
        rank: int = 0,
        world_size: int = 1,
        local_world_size: int | None = None,
        info: Info | None = None,
        events: Iterable[Event] = BASE_EVENTS,
        clock: Callable[[], int] | None = None,
        max_delay: float = 0.05,
        backlog_bytes: int = BACKLOG_BYTES,
        on_command: Callable[[Command], object] | None = None,
        timeouts: Timeouts | None = None,
        attempt: int | None = None,
        run_id: str | None = None,
        flight: "FlightRing | None" = None,
        stream_to: str | None = None,
        resume: bool = False,
    ) -> None:
        super().__init__()
        if not getattr(sys, "_is_gil_enabled", lambda: True)():
            raise ConfigurationError("a publisher needs Python's global lock: start this Python with PYTHON_GIL=1")
        check_max_delay(max_delay)
        check_backlog_bytes(backlog_bytes)
        timeouts = timeouts or Timeouts.default
        self._session = session = connect(
            *(run_name, runs_dir, broker, rank, world_size, info or {}),
            backlog_bytes=backlog_bytes,
            timeouts=timeouts,
            local_world_size=local_world_size,
            attempt=attempt,
            run_id=run_id,
            flight=None if flight is None else flight.to_wire(),
            stream_to=stream_to,
            resume=resume,
        )
        self.run_name: str = session.run_name
        """The run's name: another one than was given if that was taken."""
        self.attempt: int = session.welcome["attempt"]
        self.info = session.info
        """The run's description in ``run.json``: what was given as ``info``, and the process."""
        self.address = session.address
        """Address of the run's broker, for further ranks."""
        self.stop_requested = False
        """A command has requested the end of the training: a loop of your own looks here after each batch."""
        self.stop_reason: str | None = None
        """Why, and who has asked."""
        self.fit_has_ended = False
        """``FIT_END`` was published, and no further ``FIT_START``."""
        self._audience = audience = Audience(self.run_name, rank, events)
        self.requested_events = audience.requested_events
        """The events to publish now. It is changed in place, so that a loop can keep it at hand."""
        self.kept_events: frozenset[Event] = frozenset()
        """The events that stay in :attr:`requested_events` when no broker will take the run any more: for ranks that do
        something together at them."""
        self.demand = Demand()
        """The merged demand of all consumers."""
        self.demand_version = 0
        """A number that changes whenever :attr:`demand` does."""
        self.expected_consumers = audience.expected
        """Names of consumers that are waited for to come: a name is taken out when its consumer has come, also when it
        has left since."""
        self.left_out = LeftOut(self.run_name)
        """Values that could not be published."""
        self._on_command = on_command or self._take_stop
        self._commands: deque[str] = deque(maxlen=_REMEMBERED_COMMANDS)
        self._topic = Topic(self.run_name, frames.END, rank)
        self._world_size = world_size
        self._mark_context = frames.mark_context(world_size, local_world_size or world_size)
        self._encoders = {
            event: _EventEncoder(
                self._new_encoder(event.value),
                int(event in BASE_EVENTS),
                event in BASE_EVENTS and event is not Event.BATCH_END,
            )
            for event in Event
        }
        self._state = session.state
        self._outbox = self._state.outbox
        self._put = self._outbox.put
        self._pending = PendingEvents(self.left_out)
        self._own_delay = self._max_delay = round(max_delay * 1e9)
        self._last_time = self._flush_at = self._next_exchange = self._next_report = 0
        self._encoding_time = self._encodings_timed = self._flushing_time = 0
        self._patience = timeouts.flush
        self._closed = self._is_ending = self._is_left = False
        self._clock = clock or wall_clock()
        self._loop = OwnLoop(self._clock, self.info, world_size, self.left_out)
        self._take_report(session.welcome)
        watch_main_thread()
        _open_publishers.add(self)
        if rank == 0 and self.attempt == 1 and run_name not in (None, self.run_name):
            _log.warning("there is a run %s already, which is not resumed: this one is %s", run_name, self.run_name)

    def _new_encoder(self, name: str) -> Callable[..., bytes]:
        return frames.event_encoder(self._topic._replace(name=name), self.attempt)

    # -- loops of one's own -------------------------------------------------------------------------------------------

    def publish(self, event: Event | str, **fields: Any) -> None:
        """Publishes an event of a loop of your own, if it is requested.

        ``epoch``, ``batch``, ``sample``, ``token``, ``batch_in_epoch`` and the like say where the training stands;
        ``total_wct`` (a timedelta) is the time spent training, by default what has passed since this publisher was
        made. ``lr`` is a rate or a list of rates, or a map of optimizer name to rates; ``loss`` a number, whatever
        ``float`` takes, or a :class:`~offloop.bus.types.deferred.Deferred`. Anything else becomes a field of the
        snapshot, if MessagePack can hold it.

        Raises ConfigurationError: no such event, or a value that cannot be sent, such as a loss on a GPU: reading it
        would make the loop wait, and whether it may is yours to say; ClosedError: the publisher is closed."""
        event = Event(event)
        if self._closed:
            self._check_lost()
        if event not in self.requested_events:
            return
        loop, loss = self._loop, fields.get("loss")
        check_loss(loss)
        has_deferred = is_deferred(loss)
        try:
            timestamp = loop.take_timestamp(fields)
            if event not in self._audience.always and not self.demand.is_due(
                event, batch_number(event, timestamp), EventPosition(event, timestamp, loop.before(timestamp))
            ):
                return
            context = loop.prepare(fields)
            me = get_ident()
            if self._waiting or self._inside:  # as SerialCalls._in_turn, without a call
                if self._is_ending:
                    self._check_lost()
                    return
                # The caller may change a list in it before it is sent.
                fields = frames.copy_map(fields)
                if has_deferred:
                    fields["loss"] = loss
                self._postpone(partial(loop.publish, self.send, event, timestamp, fields, context, has_deferred))
                return
            if has_deferred:
                fields["loss"] = loss
            self._inside = me
            try:
                loop.publish(self.send, event, timestamp, fields, context, has_deferred)
            finally:
                self._inside = 0
                if self._waiting:
                    self._catch_up()
        except (TypeError, ValueError, OverflowError, AttributeError, BufferError, RuntimeError) as error:
            raise ConfigurationError(
                f"a field of {event.value} cannot be sent ({error}): use numbers, text, bytes, lists, maps and None"
            ) from None

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Logs numbers of a loop of your own under their names; the callback ``metrics`` hands them to loggers, and
        dashboards show them.

        Without ``step`` it is the number of batches that the last event counted. Before an event has counted any, the
        first step is 0, and a name that comes again begins the next. Values are numbers, NaN and infinities among
        them, whatever ``float`` takes, or a :class:`~offloop.bus.types.deferred.Deferred`. Of several values of a name
        for a step the last one counts.

        They travel with the next event that is published. In a loop whose events count no batches, each step is a
        batch, and travels when the next one is logged. :meth:`poll` and :meth:`close` send what waits.

        Raises ConfigurationError: a value that is not a number, such as text or an image, or one on a GPU; or more than
        an event can hold. Nothing of the call is logged then; ClosedError: the publisher is closed."""
        if self._closed:
            self._check_lost()
            return
        if step is not None:
            step = checked_step(step)
        checked = self._loop.check(values)
        if not checked:
            return
        me = get_ident()
        if self._waiting or self._inside:  # as SerialCalls._in_turn, without a call
            if self._is_ending:
                self._check_lost()
                return
            self._postpone(partial(self._loop.log, self.send, checked, step))
            return
        self._inside = me
        try:
            self._loop.log(self.send, checked, step)
        finally:
            self._inside = 0
            if self._waiting:
                self._catch_up()

    def _check_lost(self) -> None:
        """Raises :class:`ClosedError` unless it was closed because no broker would take the run any more, or because
        the program ends, beside a thread that is left."""
        if not self._state.lost and not self._is_left:
            raise ClosedError(
                f"the publisher of run {self.run_name!r} is closed: publish before close(), or make a new one"
            )

    def is_requested(self, event: Event | str, field: str, batch: int) -> bool:
        """Whether a consumer requests a field of an event at that batch, counted from 1: for loops of your own, which
        then compute it and pass it to :meth:`publish`."""
        return field in self.demand.due_fields(Event(event), batch)

    # -- events -------------------------------------------------------------------------------------------------------

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

    def _publish_mark(self, name: str, timestamp: TrainingTime, fields: dict[str, Any]) -> None:
        now = max(self._clock(), self._last_time)
        last = self._pending[-1] if self._pending else self._outbox
        numbers = last.seq + 1, last.base_seq + 1, now
        mark = PendingEvent(self._new_encoder(name), *numbers, timestamp, None, fields, self._mark_context)
        self._last_time = now
        if self._pending:
            self._pending.append(mark)
        else:
            self._put(mark.to_frame(self.left_out), mark.base_seq)

    def demand_in_effect(self, timestamp: TrainingTime) -> None:
        """Records in the stream that the demand is met from here on."""
        self._in_turn(partial(self._publish_mark, frames.DEMAND, timestamp, {"demand": self.demand.to_wire()}))

    def mark_checkpoint(self, action: Literal["save", "load"], timestamp: TrainingTime, run: str | None = None) -> None:
        """Records in the stream that a checkpoint of this training time is saved here, or was loaded: consumers keep
        the state that their callbacks have here, or continue from the one that they had there. ``run`` is the run that
        a loaded checkpoint is of, by default this one.

        To be called by the first rank, before it writes the file, so that a checkpoint that exists has its mark. It
        waits for values on a device that earlier events lack, as the copies for the file do."""

        def publish() -> None:
            self._publish_mark(frames.CHECKPOINT, timestamp, {"action": action, "run": run or self.run_name})
            self._flush(wait=True)

        if not self._closed:
            self._in_turn(publish)

    # Of calls that came while another one was at work, see SerialCalls.

    def _refuses_waiting(self) -> bool:
        if self._closed and not self._state.lost and not self._is_left:
            _log.warning("run %s was closed before %d further calls", self.run_name, len(self._waiting))
        return self._closed

    def _progress(self) -> object:
        return self._seq, self._loop.logged.count

    def _note_failed(self, error: Exception) -> None:
        self.left_out.add("what a signal handler or another thread published", error)

    # -- the broker ---------------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Sends what waits and reads what the broker said, without waiting. :meth:`send` does it by itself; this is for
        loops that pause."""
        if not self._closed and not self._inside:
            self._in_turn(self._poll)

    def _poll(self) -> None:
        if not self._closed:
            self._loop.publish_logged(self.send)
            self._next_exchange = 0
            self._flush(wait=False)

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
        if not command.id or command.id not in self._commands:
            self._commands.append(command.id)
            self._on_command(command)

    def _take_stop(self, command: Command) -> None:
        error = None
        if command.name == "stop":
            self.stop_requested, self.stop_reason = True, command.reason
        else:
            error = "this training loop takes no other command than 'stop'"
        self.answer(command, Event.BATCH_END, self._loop.reached, error)

    def answer(
        self, command: Command, event: Event, timestamp: TrainingTime, error: str | None = None, done: str | None = None
    ) -> None:
        """Reports to the sender, and records, that a command has taken effect at an event, or with ``error`` why it has
        not. ``timestamp`` is the training time of that, as for :meth:`send`; ``done`` is the file that was written."""
        outcome = {"event": event.value, "error": redact(error), **({} if done is None else {"done": done})}

        def publish() -> None:
            if self._closed:
                return
            self._publish_mark(frames.COMMAND, timestamp, {**command.to_wire(), **outcome})
            if command.id:
                self._session.say("applied", {"id": command.id, "batch": timestamp.batch, **outcome})

        self._in_turn(publish)

    def _take_report(self, report: dict[str, Any]) -> None:
        audience = self._audience
        audience.update(report)
        self.demand, self.demand_version = audience.demand, audience.version
        if "demand" in report:
            delay = self._own_delay if audience.max_delay is None else round(audience.max_delay * 1e9)
            self._max_delay = min(self._own_delay, delay)
            self._flush_at = min(self._flush_at, self._last_time + self._max_delay)

    # -- consumers ----------------------------------------------------------------------------------------------------

    @property
    def consumers(self) -> Collection[ConsumerProgress]:
        """The consumers that have barrier events or request further fields; as far as the broker has said."""
        return self._audience.consumers

    def is_handled(self, seq: int, field: str) -> bool:
        """Whether every consumer that asks for a field has handled an event, by its number: until then
        it may have borrowed memory with that field."""
        return self._audience.has_handled(seq, field)

    def wait_until_handled(
        self, event: Event, names: Collection[str] | None, seconds: float, leave: Callable[[], bool] = lambda: False
    ) -> set[str]:
        """Waits until each consumer with an event among its barrier events is through with everything published so far:
        those of these names, or all. No longer than ``seconds``, nor when ``leave`` says so; returns the names of those
        that are not.

        The one place where a publisher waits in the course of a training."""
        if self._closed or not self._audience.late(event, names, self._seq + 1):
            return set()
        self._next_exchange = 0
        self._in_turn(partial(self._flush, wait=True))
        seq, deadline = self._seq, time.monotonic() + seconds
        while not self._closed and (late := self._audience.late(event, names, seq)):
            if time.monotonic() >= deadline or leave():
                return late
            self.wait()
        return set()

    # -- its end ------------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Nothing is published any more."""
        return self._closed

    def close(self, status: str = "finished", error: str | None = None, reason: str | None = None) -> None:
        """Ends the stream: sends what is left and how the run ended (``finished``, ``failed`` or ``stopped``), and
        waits until the broker has it on disk, but no longer than five seconds without progress. ``reason`` says why
        it was stopped, by default :attr:`stop_reason`. Can be called more than once."""
        if self._closed:
            return
        if status not in ("finished", "failed", "stopped"):
            raise ConfigurationError(f"a run cannot end {status!r}: use 'finished', 'failed' or 'stopped'")
        self._in_turn(partial(self._close, status, error, reason))
        # Another thread may be at work here; nothing is waited for in a signal handler, which the call below it cannot
        # overtake.
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
                self._loop.publish_logged(self.send)
                self._flush(wait=True)
                # What others publish from here on is refused.
                self._is_ending = True
                self._do_waiting()
                self._loop.publish_logged(self.send)
            finally:
                # Whatever has failed before, such as a command of the user's, the stream comes to its end.
                self._is_ending = True
                if not self._closed:
                    self._pending.move(self._outbox, wait=True)
                    reason = reason or (self.stop_reason if status == "stopped" else None)
                    error, reason = redact(error), redact(reason)
                    ending = Ending(
                        status, error and frames.as_utf8(error[:_ENDING]), reason and frames.as_utf8(reason[:_ENDING])
                    )
                    self._publish_mark(frames.END, Timestamp().values, ending.to_fields())
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
        if not self._closed:
            self._closed = True
            self.requested_events &= self.kept_events
            _open_publishers.discard(self)
            self.left_out.report()
            self._session.close()

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

    # -- what has become of it ----------------------------------------------------------------------------------------

    @property
    def _seq(self) -> int:
        """The number of the last event."""
        return (self._pending[-1] if self._pending else self._outbox).seq

    @property
    def next_seq(self) -> int:
        """The number of the event that is published next."""
        return self._seq + 1

    @property
    def run_dir(self) -> Path:
        """The run's directory, as the broker sees it."""
        return self._state.run_dir

    @property
    def recording(self) -> Path:
        """The recording of this attempt."""
        return self._state.recording

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


def ending_for(error: BaseException | None) -> tuple[str, str | None, str | None]:
    """The status, error and reason for :meth:`Publisher.close` of a run that ``error`` has ended. What a
    ``KeyboardInterrupt`` carries is the reason."""
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return "finished", None, None
    if isinstance(error, KeyboardInterrupt):
        return "stopped", None, str(error) or "signal SIGINT"
    return "failed", f"{type(error).__name__}: {error}", None


def check_backlog_bytes(value: int) -> None:
    """Raises :class:`offloop.bus.errors.ConfigurationError` for a bound in which no event could be kept."""
    if not isinstance(value, int) or value < MIN_BACKLOG_BYTES:
        raise ConfigurationError(
            f"backlog_bytes is {value!r}: it bounds the memory for events that are not on disk yet, in bytes, "
            f"{MIN_BACKLOG_BYTES:,} or more; {BACKLOG_BYTES:,} is the default"
        )


_open_publishers: "weakref.WeakSet[Publisher]" = weakref.WeakSet()


def _close_forgotten() -> None:
    error = error_at_exit()
    for publisher in list(_open_publishers):
        publisher._is_left = True
        publisher.close_left(error)


def _forget_in_child() -> None:
    for publisher in list(_open_publishers):
        publisher._forget()


atexit.register(_close_forgotten)
os.register_at_fork(after_in_child=_forget_in_child)
