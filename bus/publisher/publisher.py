"""The publisher: publishes the events of a training loop."""

import atexit
import logging
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from threading import get_ident
from time import thread_time_ns
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import msgspec

from offloop.bus.errors import ClosedError, ConfigurationError, ProtocolError
from offloop.bus.protocol import frames
from offloop.bus.protocol.frames import Topic, check_size, pack_map
from offloop.bus.protocol.order import Ending
from offloop.bus.publisher.audience import Audience
from offloop.bus.publisher.console import ConsoleCapture
from offloop.bus.publisher.deferred import PendingEvent, PendingEvents
from offloop.bus.publisher.description import Info
from offloop.bus.publisher.logged import checked_step
from offloop.bus.publisher.own_events import OwnEvents
from offloop.bus.publisher.own_loop import OwnLoop, check_loss
from offloop.bus.publisher.program_end import LEFT, error_at_exit, ignoring_sigterm, watch_main_thread
from offloop.bus.publisher.serial_calls import SerialCalls
from offloop.bus.publisher.session import POLL_SECONDS, connect
from offloop.bus.redaction import redact
from offloop.bus.runs.directory import is_over
from offloop.bus.types.actor import JOIN, ActorName
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
_SEND_MASK = 0xFF
_SAMPLE_MASK = 0x3F
_EXCHANGE_NS = 50_000_000  # between two reads of the broker's messages
_REPORT_NS = 1_000_000_000
_REMEMBERED_COMMANDS = 1000
_ENDING = 10_000
_new_tuple = tuple.__new__  # a named tuple's own is a Python function


class _Kinds(dict[Event, tuple[Callable[..., bytes], int, bool]]):
    """For each event its encoder, by how much it increases ``base_seq``, and whether it is sent at once."""

    # Plain tuples: unpacking a NamedTuple takes longer.

    def __init__(self, topic: Topic, attempt: int) -> None:
        super().__init__()
        self._topic, self._attempt = topic, attempt

    def __missing__(self, event: Event) -> tuple[Callable[..., bytes], int, bool]:
        encode = frames.event_encoder(self._topic._replace(name=event.value), self._attempt)
        is_base = event in BASE_EVENTS
        # Minutes may pass between two events of one's own.
        is_urgent = event.is_own or (is_base and event is not Event.BATCH_END)
        self[event] = found = (encode, int(is_base), is_urgent)
        return found


@dataclass(frozen=True)
class PublisherStatistics:
    """Counts of a publisher since its start."""

    published: int
    """Events passed to the publisher."""
    sent: int
    """Events handed to the broker's connection. Each counts once."""
    acknowledged: int
    """Events recorded by the broker."""
    lag: int
    """Events published and not yet acknowledged."""
    resent: int
    """Events sent again, to a broker that was restarted or has lost some."""
    dropped: int
    """Unsent events removed because the send buffer was full."""
    held: int
    """Events that wait for a value that is not computed yet."""
    backlog: int
    """Unsent events in the send buffer. They are gathered, or the broker reads slowly."""
    backlog_bytes: int
    """Size of the send buffer: all events without an acknowledgement, sent or not."""
    backlog_bytes_high: int
    """Maximum of :attr:`backlog_bytes` so far."""
    broker_restarts: int
    """Number of times that the broker was lost and found again or restarted."""
    values_left_out: int
    """Values and fields that could not be sent, such as text that is not UTF-8. The rest of their event was sent."""
    nanoseconds_per_event: float
    """Mean processor time of an event in the training thread: encoding (measured for one event in 64) plus sending and
    receiving (always measured). The caller's own work before it publishes is not included."""


class Publisher(SerialCalls, OwnEvents):
    """Publishes one rank's events to the run's broker. Starts the broker unless ``broker`` names one.

    Publishing takes bounded time and memory: each event is encoded and handed to a socket that does not wait. While the
    broker does not read, events stay in the send buffer. When that is full, the oldest are dropped and counted.

    Inner events and ``batch_end`` are gathered, because waking other processes costs the loop more than sending. They
    are sent at the first event or :meth:`poll` after ``max_delay``. All other events are sent at once, together with
    the gathered ones.

    Any thread, signal handler or finalizer may call the methods, also during another call. A call during another call
    returns at once, and the running call executes it last. Only :meth:`close` waits for another thread.

    Args:
        run_name: The run's name, by default a new one. If a run has this name already, the new run is ``NAME-2`` and so
            on, see :attr:`run_name`.
        runs_dir: Folder of the runs, by default that of :func:`offloop.bus.runs_dir`.
        broker: The :attr:`address` of the first rank's publisher on this host, for further ranks.
        rank: This process's rank, from 0.
        world_size: Number of ranks.
        local_world_size: Number of ranks that publish to this broker, where several hosts have brokers of their own.
            The broker's run ends with them.
        info: Contents for ``run.json``, or a function of the run's name that returns them. With ``unavailable``, such
            as ``{"events": ["epoch_end"], "fields": {"gradient_norm": "reason"}}``, consumers that request these report
            it at once.
        events: Events that are always published. Others are published while a consumer requests them.
        clock: Returns nanoseconds since 1970.
        max_delay: Longest delay of gathered events, in seconds. A consumer can request a shorter one.
        backlog_bytes: Size of the send buffer in bytes, by default 64 MiB.
        on_command: Called once with each :class:`~offloop.bus.types.commands.Command`, while an event is published or
            in :meth:`poll`. It must call :meth:`answer`. By default ``stop`` sets :attr:`stop_requested`, and other
            commands are refused.
        timeouts: How long to wait for the broker.
        attempt: Number of the attempt that all hosts agreed on, see :func:`offloop.bus.runs.writing.next_attempt`.
        run_id: Identity of the run that all hosts agreed on.
        flight: Memory of a flight recorder. The caller fills it; the broker writes it to a recording when triggered.
        stream_to: NATS servers that receive a copy, such as ``nats://HOST:4222``, by default ``$OFFLOOP_STREAM``.
        actor: Name and role of an actor, see :func:`offloop.join`.
        capture_console: Also write what this process prints into the run's directory, until the run ends. The traceback
            of an error that ends it, or of a crash, is always written.
        resume: Continue the run of that name, if it exists, with a new attempt. This is always so in a process that
            ``torchrun`` has restarted.

    Raises:
        ConfigurationError: An argument is invalid, or this Python runs without its global lock (GIL).
        RunIsLiveError: The run to resume has a live publisher.
        RunDirectoryError: The run's directory cannot be written.
        BrokerError: The broker did not start, or refused.
    """

    stop_requested: bool = False
    """A command requested the end of the training. Check it after each batch of your own loop."""
    stop_reason: str | None = None
    """Reason and sender of that command."""
    fit_has_ended: bool = False
    """``FIT_END`` was published, and no ``FIT_START`` after it."""
    kept_events: frozenset[Event] = frozenset()
    """Events that stay in :attr:`requested_events` after the broker is lost for good: ranks synchronize there."""
    _closed = True  # until __init__ has succeeded
    _is_ending = _is_left = False
    _console: ConsoleCapture | None = None

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
        actor: ActorName | None = None,
        capture_console: bool = False,
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
            actor=actor,
        )
        self.actor: ActorName | None = None if actor is None else actor._replace(name=str(session.welcome.get("name")))
        """Name and role of an actor, see :class:`offloop.bus.publisher.actor.Actor`; ``None`` for a rank."""
        if self.actor is not None:
            rank = int(session.welcome["rank"])
        self.published_before: int = session.welcome.get("published_before", 0)
        """Events that earlier actors of this name have published, without the first and the last one of each."""
        self.training_ended: bool = False
        """The ranks of the run have ended; an actor can send its last events for some seconds."""
        self.run_name: str = session.run_name
        """Name of the run. It differs from the given name if that was taken."""
        self.attempt: int = session.welcome["attempt"]
        self.info: dict[str, Any] = session.info
        """The run's description in ``run.json``: the given ``info`` and data of this process."""
        self.address: str = session.address
        """Address of the broker, for further ranks."""
        self._audience = audience = Audience(self.run_name, rank, events)
        self.requested_events: set[Event] = audience.requested_events
        """Events to publish now. The set is changed in place, so a loop can keep a reference."""
        self.demand: Demand = Demand()
        """Merged demand of all consumers."""
        self.demand_version: int = 0
        """Changes whenever :attr:`demand` does."""
        self.expected_consumers: set[str] = audience.expected
        """Names of awaited consumers that have not joined yet."""
        self.left_out: LeftOut = LeftOut(self.run_name)
        """Counts values that could not be published."""
        self._on_command = on_command or self._take_stop
        self._commands: deque[str] = deque(maxlen=_REMEMBERED_COMMANDS)
        self._topic = Topic(self.run_name, frames.END, rank)
        self._world_size = world_size
        self._mark_context = frames.mark_context(world_size, local_world_size or world_size)
        self._kinds = _Kinds(self._topic, self.attempt)
        self._state = session.state
        self._outbox = self._state.outbox
        self._pending = PendingEvents(self.left_out)
        self._own_delay = self._max_delay = round(max_delay * 1e9)
        self._last_time = self._flush_at = self._next_exchange = self._next_report = 0
        self._encoding_time = self._encodings_timed = self._flushing_time = 0
        self._patience = timeouts.flush
        self._closed = False
        self._clock = clock or wall_clock()
        self._loop = OwnLoop(self._clock, self.info, world_size, self.left_out, self.actor)
        self._take_report(session.welcome)
        watch_main_thread()
        _open_publishers.add(self)
        if self.actor is None:
            os.environ[JOIN] = str(self.run_dir)
        else:
            # Its first event shows who it is.
            self._in_turn(partial(self._loop.introduce, self.send))
        if rank == 0 and self.attempt == 1 and run_name not in (None, self.run_name):
            _log.warning("run %s exists already and is not resumed: this run is %s", run_name, self.run_name)
        if (pipe := session.welcome.get("console")) is not None:
            with suppress(OSError):  # the run's directory was removed
                self._console = ConsoleCapture(self.run_dir / str(pipe), streams=capture_console)

    @property
    def gathers_until(self) -> int:
        """Time until which events are gathered, in nanoseconds since 1970. The demand does not change before it."""
        return self._flush_at

    # -- loops of one's own -------------------------------------------------------------------------------------------

    def publish(self, event: Event | str, **fields: Any) -> None:
        """Publish an event of your own loop, if it is requested.

        ``epoch``, ``batch``, ``sample``, ``token``, ``batch_in_epoch`` and so on set the training time; without any of
        them it is that of the event before. ``total_wct`` (a timedelta) is the time spent training, by default the time
        since this publisher was made. ``lr`` is a rate, a list of rates, or a map of optimizer names to rates. ``loss``
        is a number, a value that ``float`` accepts, or a :class:`~offloop.bus.types.deferred.Deferred`. Other names
        become fields of the snapshot; MessagePack must be able to hold their values.

        Raises:
            ConfigurationError: The event is unknown, a value cannot be sent, or a name is one of offloop's own fields,
                such as ``logged``. A loss on a GPU is refused, because reading it would make the loop wait.
            ClosedError: The publisher is closed.
        """
        event = Event(event)
        if self._closed:
            self._check_lost()
        if event not in self.requested_events:
            return
        loop, loss = self._loop, fields.get("loss")
        check_loss(loss)
        has_deferred = is_deferred(loss)
        try:
            timestamp = loop.take_timestamp(event, fields)
            if event not in self._audience.always and not self.demand.is_due(
                event, batch_number(event, timestamp), EventPosition(event, timestamp, loop.before(timestamp))
            ):
                return
            context = loop.prepare(fields)
            me = get_ident()
            if self._waiting or self._inside:  # SerialCalls._in_turn, inlined
                if self._is_ending:
                    self._check_lost()
                    return
                # The caller may change a list in it before the event is sent.
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
        except ConfigurationError:
            raise
        except (TypeError, ValueError, OverflowError, AttributeError, BufferError, RuntimeError) as error:
            named = f"field {name!r}" if (name := frames.unsendable(fields)) else "a field"
            raise ConfigurationError(
                f"{named} of {event.value} cannot be sent ({error}): use numbers, text, bytes, lists, maps and None"
            ) from None

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Log numbers of your own loop by name, for dashboards and, with the callback ``metrics``, for loggers.

        Values travel with the next published event. In a loop whose events count no batches, each step becomes a batch,
        which is sent when the next step is logged. :meth:`poll` and :meth:`close` send waiting values.

        Args:
            values: Numbers, including NaN and infinities, values that ``float`` accepts, or
                :class:`~offloop.bus.types.deferred.Deferred`. The last value of a name at a step counts.
            step: By default the number of batches at the last event. Before an event has counted a batch, steps start
                at 0, and a repeated name starts the next step.

        Raises:
            ConfigurationError: A value is not a number or is on a GPU, or the values exceed the size of an event. No
                value of the call is logged.
            ClosedError: The publisher is closed.
        """
        if self._closed:
            self._check_lost()
            return
        if step is not None:
            step = checked_step(step)
        checked = self._loop.check(values)
        if not checked:
            return
        me = get_ident()
        if self._waiting or self._inside:  # SerialCalls._in_turn, inlined
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

    def publish_own(self, event: Event, fields: dict[str, Any]) -> None:
        if self._closed or self._is_ending:
            self._check_lost()
            return
        if self._waiting or self._inside:
            # The caller may change a list in it before the event is sent.
            fields = frames.copy_map(fields)
        self._in_turn(partial(self._loop.publish_own, self.send, event, fields))

    def room_for_rows(self) -> int:
        return self._outbox.limit // 2 - self._outbox.size

    def _default_step(self) -> int:
        return self._loop.reached.batch

    def _check_lost(self) -> None:
        """Raise ClosedError, unless the broker is lost for good or the program is ending while other threads run."""
        if not self._state.lost and not self._is_left:
            raise ClosedError(f"the publisher of run {self.run_name!r} is closed: publish before close()")

    def is_requested(self, event: Event | str, field: str, batch: int) -> bool:
        """Return whether a consumer requests a field of an event at a batch, counted from 1.

        Your own loop then computes the field and passes it to :meth:`publish`."""
        return field in self.demand.due_fields(Event(event), batch)

    # -- events -------------------------------------------------------------------------------------------------------

    @staticmethod
    def pack_context(context: dict[str, Any]) -> bytes:
        """Pack values that change rarely, once for many calls of :meth:`send`."""
        return pack_map(context)

    def send(
        self,
        event: Event,
        timestamp: TrainingTime,
        previous: TrainingTime | None,
        fields: dict[str, Any],
        context: bytes,
        has_deferred: bool = False,
        time: int | None = None,
        _in_turn: bool = False,
    ) -> None:
        """Publish an event without checking whether it is requested.

        This is the fast way, for loops that check :attr:`requested_events` themselves.

        Args:
            event: The event.
            timestamp: The 14 values of a :class:`~offloop.bus.types.timestamp.Timestamp`.
            previous: Those of the preceding batch's end, if known.
            fields: The snapshot's fields. With ``has_deferred`` they may be kept until the event is sent.
            context: Result of :meth:`pack_context`.
            has_deferred: Fields may contain :class:`Deferred` values. Then this event and all later ones are held, in
                order, until the values have arrived. Later events check for them; only FIT_END and :meth:`close` wait.
            time: When it happened, in nanoseconds since 1970, by default now.
        """
        if not _in_turn:
            me = get_ident()
            if self._waiting or self._inside:  # SerialCalls._in_turn, inlined
                if not has_deferred:
                    # Fields that cannot be sent are refused here, where the caller gets the error.
                    encode, *_ = self._kinds[event]
                    check_size(len(encode(1, 1, 0, timestamp, previous, fields, context)))
                self._postpone(
                    partial(self.send, event, timestamp, previous, fields, context, has_deferred, time, _in_turn=True)
                )
                return
            self._inside = me
        try:
            if self._closed:
                # By another thread or a signal handler, after the caller checked requested_events.
                return
            pending, outbox = self._pending, self._outbox
            now = self._clock() if time is None else time
            if now < self._last_time:
                now = self._last_time
            encode, counts, is_urgent = self._kinds[event]
            # The number is taken only when the event is queued: an event that cannot be packed, or is interrupted by a
            # signal handler, leaves no hole.
            last = pending[-1] if pending else outbox
            seq = last.seq + 1
            base_seq = last.base_seq + counts
            self._last_time = now
            if has_deferred or pending:
                values = (encode, seq, base_seq, now, timestamp, previous, fields, context)
                pending.append(_new_tuple(PendingEvent, values))
            elif seq & _SAMPLE_MASK:
                outbox.put(encode(seq, base_seq, now, timestamp, previous, fields, context), base_seq)
            else:
                began = thread_time_ns()
                outbox.put(encode(seq, base_seq, now, timestamp, previous, fields, context), base_seq)
                self._encoding_time += thread_time_ns() - began
                self._encodings_timed += 1
            if not seq & _SEND_MASK:
                pending.move(outbox, wait=False)
                outbox.send()
            if now >= self._flush_at or is_urgent:
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
        encode = frames.event_encoder(self._topic._replace(name=name), self.attempt)
        mark = PendingEvent(encode, *numbers, timestamp, None, fields, self._mark_context)
        self._last_time = now
        if self._pending:
            self._pending.append(mark)
        else:
            self._outbox.put(mark.to_frame(self.left_out), mark.base_seq)

    def demand_in_effect(self, timestamp: TrainingTime) -> None:
        """Record in the stream that the current demand is met from here on."""
        self._in_turn(partial(self._publish_mark, frames.DEMAND, timestamp, {"demand": self.demand.to_wire()}))

    def mark_checkpoint(self, action: Literal["save", "load"], timestamp: TrainingTime, run: str | None = None) -> None:
        """Record in the stream that a checkpoint of this training time is saved here or was loaded.

        Consumers store their callbacks' states here, or restore them. The first rank calls this before it writes the
        file, so that each existing checkpoint has its mark. The call waits for values of earlier events that are still
        on a device. ``run`` is the loaded checkpoint's run, by default this one."""

        def publish() -> None:
            self._publish_mark(frames.CHECKPOINT, timestamp, {"action": action, "run": run or self.run_name})
            self._flush(wait=True)

        if not self._closed:
            self._in_turn(publish)

    # -- calls that arrived during another call, see SerialCalls ------------------------------------------------------

    def _refuses_waiting(self) -> bool:
        if self._closed and not self._state.lost and not self._is_left:
            _log.warning("run %s was closed before %d further calls", self.run_name, len(self._waiting))
        return self._closed

    def _progress(self) -> object:
        return self._seq, self._loop.logged.count

    def _note_failed(self, error: Exception) -> None:
        self.left_out.add("an event of a signal handler or another thread", error)

    # -- the broker ---------------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Send waiting events and read the broker's messages, without waiting.

        :meth:`send` does this by itself. A loop that pauses calls it."""
        if not self._closed and not self._inside:
            self._in_turn(self._poll)

    def _poll(self) -> None:
        if not self._closed:
            self._loop.publish_logged(self.send)
            self._next_exchange = 0
            self._flush(wait=False)

    def wait(self) -> None:
        """Wait a moment for a message, then :meth:`poll`."""
        if self._inside:
            # The running call reads the socket, which only one thread may use.
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
        # One message at a time: a command may publish an event, and that reads messages too.
        while not self._closed and (message := self._session.receive()) is not None:
            if message.kind == "command":
                self._take_command(message.content)
            elif message.kind == "training_ended":
                self.training_ended = True
            else:
                self._take_report(message.content)
        if self._closed:
            return
        self._session.tick()
        if self.actor is not None and self._state.is_silent(time.monotonic()) and is_over(self.run_dir):
            self._state.end_with_training()
        if self._state.lost:
            self.training_ended = True
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
        # A command is sent again after a broker's death or a lost answer.
        if not command.id or command.id not in self._commands:
            self._commands.append(command.id)
            self._on_command(command)

    def _take_stop(self, command: Command) -> None:
        error = None
        if command.name == "stop":
            self.stop_requested, self.stop_reason = True, command.reason
        else:
            error = "this training loop accepts only the command 'stop'"
        self.answer(command, Event.BATCH_END, self._loop.reached, error)

    def answer(
        self, command: Command, event: Event, timestamp: TrainingTime, error: str | None = None, done: str | None = None
    ) -> None:
        """Report to the sender, and record, that a command took effect at an event, or with ``error`` why it failed.

        ``timestamp`` is the training time of the event, as for :meth:`send`. ``done`` is the file that was written."""
        outcome = {"event": event.value, "error": redact(error), **({} if done is None else {"done": done})}

        def publish() -> None:
            if self._closed:
                return
            self._publish_mark(frames.COMMAND, timestamp, {**command.to_wire(), **outcome})
            # A training that hangs now publishes no event that takes it along.
            self._pending.move(self._outbox, wait=False)
            self._outbox.send()
            if command.id:
                self._session.say("applied", {"id": command.id, "batch": timestamp.batch, **outcome})

        self._in_turn(publish)

    def _take_report(self, report: dict[str, Any]) -> None:
        if self.actor is not None and report.get("timestamp") is not None:
            with suppress(msgspec.ValidationError):
                self._loop.reached = msgspec.convert(report["timestamp"], TrainingTime)
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
        """Consumers with barrier events or requested fields, as reported by the broker."""
        return self._audience.consumers

    def is_handled(self, seq: int, field: str) -> bool:
        """Return whether every consumer that requests a field has handled an event, given by number.

        Until then a consumer may use borrowed memory with that field."""
        return self._audience.has_handled(seq, field)

    def wait_until_handled(
        self, event: Event, names: Collection[str] | None, seconds: float, leave: Callable[[], bool] = lambda: False
    ) -> set[str]:
        """Wait until consumers have handled all published events at their barrier event; return the names of late ones.

        This is the only method that makes a running training wait. ``names`` limits it to some consumers. It waits at
        most ``seconds``, and only while ``leave()`` is false."""
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
        """End the stream: send waiting events and the run's end, and wait until the broker has recorded them.

        The wait lasts at most five seconds without progress. Further calls have no effect.

        Args:
            status: ``finished``, ``failed`` or ``stopped``.
            error: The error of a failed run.
            reason: Why the run was stopped, by default :attr:`stop_reason`.
        """
        if self._closed:
            return
        if status not in ("finished", "failed", "stopped"):
            raise ConfigurationError(f"a run cannot end {status!r}: use 'finished', 'failed' or 'stopped'")
        self._in_turn(partial(self._close, status, error, reason))
        # Another thread may be inside a call. A signal handler does not wait: the call it interrupted cannot continue.
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
                # Calls from other threads are refused from here on.
                self._is_ending = True
                self._do_waiting()
                self._loop.publish_logged(self.send)
            finally:
                # The stream ends properly, whatever failed above, such as a user's command handler.
                self._is_ending = True
                if not self._closed:
                    self._pending.move(self._outbox, wait=True)
                    reason = reason or (self.stop_reason if status == "stopped" else None)
                    if self._console is not None:
                        self._console.end(self._cause(error) if status == "failed" else None)
                    error, reason = redact(error), redact(reason)
                    ending = Ending(
                        status, error and frames.as_utf8(error[:_ENDING]), reason and frames.as_utf8(reason[:_ENDING])
                    )
                    self._publish_mark(frames.END, Timestamp().values, ending.to_fields())
                    self._session.flush(self._seq)
        finally:
            self._shut()

    def _cause(self, error: str | None) -> BaseException | None:
        """Return the exception that ended the run, unless Python has printed it into what is captured."""
        cause = sys.exc_info()[1]
        if cause is None and self._console is not None and not self._console.has_streams:
            printed: BaseException | None = getattr(sys, "last_value", None)
            return printed if ending_for(printed)[1] == error else None
        return cause

    def close_left(self, error: BaseException | None) -> None:
        """Close a run that the program left without :meth:`close`, by this error.

        Errors after the end of the training (``FIT_END``) do not change the run's status."""
        if self.fit_has_ended and isinstance(error, KeyboardInterrupt):
            error = None
        if error is None and self.stop_requested:
            error = KeyboardInterrupt(self.stop_reason or "")
        self.close(*ending_for(error))

    def _shut(self) -> None:
        if not self._closed:
            self._closed = True
            self.requested_events &= self.kept_events
            if self.actor is None and os.environ.get(JOIN) == str(self.run_dir):
                del os.environ[JOIN]
            _open_publishers.discard(self)
            self.left_out.report()
            self._session.close()
            if self._console is not None:
                # Until here the pipe keeps its content while a broker is restarted.
                self._console.close()

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
        """Release the stream in a forked child: it belongs to the parent."""
        self._closed = True
        self._waiting.clear()
        self.requested_events.clear()

    # -- what has become of it ----------------------------------------------------------------------------------------

    @property
    def _seq(self) -> int:
        return (self._pending[-1] if self._pending else self._outbox).seq

    @property
    def next_seq(self) -> int:
        """Number of the next event."""
        return self._seq + 1

    @property
    def run_dir(self) -> Path:
        """Directory of the run, as the broker sees it."""
        return self._state.run_dir

    @property
    def recording(self) -> Path:
        """Recording of this attempt."""
        return self._state.recording

    @property
    def recorded_all(self) -> bool:
        """The broker has recorded all published events."""
        state = self._state
        return not state.lost and state.write_error is None and state.acknowledged >= self._seq

    def statistics(self) -> PublisherStatistics:
        """Return counts of published, sent and recorded events."""
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
    """Return status, error and reason for :meth:`Publisher.close` after ``error`` ended the run.

    The text of a ``KeyboardInterrupt`` is the reason."""
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return "finished", None, None
    if isinstance(error, KeyboardInterrupt):
        return "stopped", None, str(error) or "signal SIGINT"
    return "failed", f"{type(error).__name__}: {error}", None


def check_backlog_bytes(value: int) -> None:
    if not isinstance(value, int) or value < MIN_BACKLOG_BYTES:
        raise ConfigurationError(
            f"backlog_bytes is {value!r}: it bounds the memory for events that are not on disk yet, in bytes, "
            f"{MIN_BACKLOG_BYTES:,} or more; {BACKLOG_BYTES:,} is the default"
        )


_open_publishers: "weakref.WeakSet[Publisher]" = weakref.WeakSet()


def _close_forgotten() -> None:
    error = error_at_exit()
    with ignoring_sigterm():
        for publisher in list(_open_publishers):
            publisher._is_left = True
            publisher.close_left(error)


def _forget_in_child() -> None:
    for publisher in list(_open_publishers):
        publisher._forget()


atexit.register(_close_forgotten)
os.register_at_fork(after_in_child=_forget_in_child)
