"""The sending end: what a training loop uses. Between start and close it waits for a peer only where the loop asks for
that (:meth:`Publisher.wait_until_handled`)."""

import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any

from offloop.bus.errors import ClosedError, ConfigurationError
from offloop.bus.protocol.frames import check_plain, copy_map
from offloop.bus.publisher.description import Info
from offloop.bus.publisher.logged import MAX_LOGGED, LoggedValues, check_values, checked_step
from offloop.bus.publisher.sender import EventSender
from offloop.bus.publisher.session import connect
from offloop.bus.redaction import redact
from offloop.bus.types.commands import Command
from offloop.bus.types.deferred import Deferred
from offloop.bus.types.demand import BASE_EVENTS, check_max_delay
from offloop.bus.types.event import Event
from offloop.bus.types.hyperparameters import FIELD as HYPERPARAMETERS
from offloop.bus.types.intervals import EventPosition, batch_number
from offloop.bus.types.source import FIELDS as SOURCE_FIELDS
from offloop.bus.types.timeouts import Timeouts
from offloop.bus.types.timestamp import Timestamp, TrainingTime, wall_clock

if TYPE_CHECKING:
    from offloop.bus.protocol.flight_ring import FlightRing

_log = logging.getLogger("offloop")

LOG_VALUES = 1000
_LOG_NS = 1_000_000_000
"""For which logged values wait for an event that they travel with."""
BACKLOG_BYTES = 64 * 1024 * 1024
MIN_BACKLOG_BYTES = 64 * 1024
_CONTEXT_NAMES = ("max_duration", "dataloader_label", "dataloader_len")
_TRAINING_TIME = TrainingTime._fields


class Publisher(EventSender):
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
    ``attempt`` and ``run_id`` are what all hosts have agreed on, see :func:`offloop.bus.runs.directory.next_attempt`.

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
    ``timeouts`` says how long it waits for the broker. ``flight`` is the memory of a flight recorder, from which the
    broker writes a recording when there is a reason; what is put there is the caller's affair.

    Raises:
        ConfigurationError: an argument cannot be what it is, or this is a Python without its global lock (GIL).
        RunIsLiveError: the run that is to be resumed has a live publisher.
        RunDirectoryError: the run's directory cannot be written.
        BrokerError: the broker did not start, or refused.
    """

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
        if not getattr(sys, "_is_gil_enabled", lambda: True)():
            raise ConfigurationError("a publisher needs Python's global lock: start this Python with PYTHON_GIL=1")
        check_max_delay(max_delay)
        check_backlog_bytes(backlog_bytes)
        timeouts = timeouts or Timeouts.default
        events = frozenset(events)
        session = connect(
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
        super().__init__(
            *(session, rank, world_size, local_world_size or world_size, events),
            clock=clock or wall_clock(),
            max_delay=max_delay,
            on_command=on_command,
            timeouts=timeouts,
        )
        if rank == 0 and self.attempt == 1 and run_name not in (None, self.run_name):
            _log.warning("there is a run %s already, which is not resumed: this one is %s", run_name, self.run_name)
        self._began = self._clock()
        self._introduction = {name: self.info[name] for name in SOURCE_FIELDS if name in self.info}
        self._context: tuple[dict[str, Any], bytes] = ({}, b"")
        self._planned: str | None = None
        """The latest ``max_duration``."""
        self._previous: TrainingTime | None = None
        self._counts_batches = False
        self._logged = LoggedValues(self.left_out)
        self._logged_names: set[str] = set()
        self._logged_at = 0

    def _progress(self) -> object:
        return self._seq, self._logged.count

    def _publish_waiting(self) -> None:
        if self._logged.count:
            self._publish_logged()

    def publish(self, event: Event | str, **fields: Any) -> None:
        """Publishes an event of a loop of your own, if it is requested.

        ``epoch``, ``batch``, ``sample``, ``token``, ``batch_in_epoch`` and the like say where the training stands;
        ``total_wct`` (a timedelta) is the time spent training, by default what has passed since this publisher was
        made. ``lr`` is a rate or a list of rates, or a map of optimizer name to rates; ``loss`` a number, whatever
        ``float`` takes, or a :class:`~offloop.bus.types.deferred.Deferred`. Anything else becomes a field of the
        snapshot, if MessagePack can hold it.

        Raises:
            ConfigurationError: no such event, or a value that cannot be sent, such as a loss on a GPU: reading it
                would make the loop wait, and whether it may is yours to say.
            ClosedError: the publisher is closed.
        """
        event = Event(event)
        if self._closed:
            self._check_lost()
        if event not in self.requested_events:
            return
        fields.setdefault("total_wct", timedelta(microseconds=(self._clock() - self._began) // 1000))
        loss = fields.get("loss")
        if getattr(loss, "is_cuda", False):
            raise ConfigurationError(
                "the loss is on a GPU: make gpu = offloop.trainer.device.GpuDevice() once and publish "
                "gpu.read_later(loss), or float(loss) if the loop may wait for it"
            )
        has_deferred = isinstance(loss, Deferred)
        try:
            timestamp = Timestamp(**{name: fields.pop(name) for name in _TRAINING_TIME if name in fields}).values
            if event not in self._always and not self.demand.is_due(
                event, batch_number(event, timestamp), EventPosition(event, timestamp, self._before(timestamp))
            ):
                return
            context = self._pack_plain_context({name: fields.pop(name) for name in _CONTEXT_NAMES if name in fields})
            if "lr" in fields and not isinstance(fields["lr"], dict):
                rates = fields["lr"] if isinstance(fields["lr"], list | tuple) else [fields["lr"]]
                fields["lr"] = {"optimizer": [float(rate) for rate in rates]}
            if loss is not None:
                fields["loss"] = None if has_deferred else _read_loss(loss)
            if HYPERPARAMETERS in fields:
                fields[HYPERPARAMETERS] = redact(fields[HYPERPARAMETERS])
            check_plain(fields)
            me = get_ident()
            if self._waiting or self._inside:  # as SerialCalls._in_turn, without a call
                if self._is_ending:
                    self._check_lost()
                    return
                # The caller may change a list in it before it is sent.
                fields = copy_map(fields)
                if has_deferred:
                    fields["loss"] = loss
                self._postpone(partial(self._publish, event, timestamp, fields, context, has_deferred))
                return
            if has_deferred:
                fields["loss"] = loss
            self._inside = me
            try:
                self._publish(event, timestamp, fields, context, has_deferred)
            finally:
                self._inside = 0
                if self._waiting:
                    self._catch_up()
        except (TypeError, ValueError, OverflowError, AttributeError, BufferError, RuntimeError) as error:
            raise ConfigurationError(
                f"a field of {event.value} cannot be sent ({error}): use numbers, text, bytes, lists, maps and None"
            ) from None

    def _before(self, timestamp: TrainingTime) -> TrainingTime | None:
        """The training time of the event before one of this training time."""
        # The first batch begins where every training does, also in a loop that says nothing before its end.
        return self._previous or (Timestamp().values if timestamp.batch == 1 else None)

    def _publish(
        self, event: Event, timestamp: TrainingTime, fields: dict[str, Any], context: bytes, has_deferred: bool
    ) -> None:
        if self._introduction:
            self._introduce(event, fields, context)
        carries = self._logged.count and event in BASE_EVENTS and "logged" not in fields
        self._at = timestamp
        if carries:
            fields["logged"] = self._logged.entries()
            has_deferred = has_deferred or self._logged.has_late
        self.send(event, timestamp, self._before(timestamp), fields, context, has_deferred, _in_turn=True)
        if carries:
            self._logged.clear()
        self._previous = timestamp
        self._counts_batches = self._counts_batches or timestamp.batch > 0

    def _introduce(self, event: Event, fields: dict[str, Any], context: bytes) -> None:
        """Says what the events come from, with the first one or before it: consumers look for that at INIT."""
        introduction = self._introduction
        if event is Event.INIT:
            fields.update(introduction)
        else:
            self.send(Event.INIT, Timestamp().values, None, introduction, context, _in_turn=True)
        self._introduction = {}

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Logs numbers of a loop of your own under their names; the callback ``metrics`` hands them to loggers, and
        dashboards show them.

        Without ``step`` it is the number of batches that the last event counted. Before an event has counted any, the
        first step is 0, and a name that comes again begins the next. Values are numbers, NaN and infinities among
        them, whatever ``float`` takes, or a :class:`~offloop.bus.types.deferred.Deferred`. Of several values of a name
        for a step the last one counts.

        They travel with the next event that is published. In a loop whose events count no batches, each step is a
        batch, and travels when the next one is logged. :meth:`poll` and :meth:`close` send what waits.

        Raises:
            ConfigurationError: a value that is not a number, such as text or an image, or one on a GPU; or more than an
                event can hold. Nothing of the call is logged then.
            ClosedError: the publisher is closed.
        """
        if self._closed:
            self._check_lost()
            return
        if step is not None:
            step = checked_step(step)
        checked = check_values(values, self._logged_names)
        if not checked:
            return
        me = get_ident()
        if self._waiting or self._inside:  # as SerialCalls._in_turn, without a call
            if self._is_ending:
                self._check_lost()
                return
            self._postpone(partial(self._log, checked, step))
            return
        self._inside = me
        try:
            self._log(checked, step)
        finally:
            self._inside = 0
            if self._waiting:
                self._catch_up()

    def _log(self, values: dict[str, Any], step: int | None) -> None:
        logged = self._logged
        if step is None:
            step = self._at[2] if self._counts_batches else logged.step_for(values)
        if logged.count and (self._is_due(step) or (logged.bound > MAX_LOGGED and logged.is_full())):
            self._publish_logged()
        if not logged.count:
            self._logged_at = self._clock()
        logged.add(values, step)

    def _is_due(self, step: int) -> bool:
        """Whether what was logged goes out before something is logged for that step."""
        if not self._counts_batches:
            return self._logged.has_other_than(step)
        return self._logged.count >= LOG_VALUES or self._clock() - self._logged_at >= _LOG_NS

    def _publish_logged(self) -> None:
        """Publishes what was logged with an event of its own."""
        fields, has_late, step = {"logged": self._logged.entries()}, self._logged.has_late, self._logged.step
        context = self._context[1] or self._pack_plain_context({})
        if self._introduction:
            self._introduce(Event.BATCH_END, fields, context)
        if self._counts_batches:
            # An event at which nothing is done but what was asked for: the batch has ended already.
            self.send(Event.ITERATION_CHECKPOINT, self._at, None, fields, context, has_late, _in_turn=True)
        else:
            before = Timestamp.from_values(self._at)
            began = max(step, int(before.batch))
            total = timedelta(microseconds=(self._clock() - self._began) // 1000)
            self._at = Timestamp(batch=began + 1, total_wct=total).values
            previous = Timestamp(batch=began, total_wct=before.total_wct).values
            self.send(Event.BATCH_END, self._at, previous, fields, context, has_late, _in_turn=True)
        # What is sent twice, where a signal handler has raised, is logged once.
        self._logged.clear()

    def _check_lost(self) -> None:
        """Raises :class:`ClosedError` unless it was closed because no broker would take the run any more, or because
        the program ends, beside a thread that is left."""
        if not self._state.lost and not self._is_left:
            raise ClosedError(
                f"the publisher of run {self.run_name!r} is closed: publish before close(), or make a new one"
            )

    def _pack_plain_context(self, context: dict[str, Any]) -> bytes:
        planned = context.pop("max_duration", None)
        if planned is not None:
            self._planned = str(planned)
        if self._planned is not None:
            context["max_duration"] = self._planned
        context["world_size"] = self._world_size
        known, packed = self._context
        if context != known:
            check_plain(context)
            packed = self.pack_context(context)
            self._context = (context, packed)
        return packed

    def is_requested(self, event: Event | str, field: str, batch: int) -> bool:
        """Whether a consumer requests a field of an event at that batch, counted from 1: for loops of your own, which
        then compute it and pass it to :meth:`publish`."""
        return field in self.demand.due_fields(Event(event), batch)


def _read_loss(loss: Any) -> float:
    try:
        return float(loss.detach() if hasattr(loss, "detach") else loss)
    except Exception as error:  # noqa: BLE001  float() calls what the value brings
        raise ValueError(f"loss: {error}") from None


def check_backlog_bytes(value: int) -> None:
    """Raises :class:`offloop.bus.errors.ConfigurationError` for a bound in which no event could be kept."""
    if not isinstance(value, int) or value < MIN_BACKLOG_BYTES:
        raise ConfigurationError(
            f"backlog_bytes is {value!r}: it bounds the memory for events that are not on disk yet, in bytes, "
            f"{MIN_BACKLOG_BYTES:,} or more; {BACKLOG_BYTES:,} is the default"
        )
