"""The sending end: what a training loop uses. Nothing here ever waits for a peer while the training goes on."""

import atexit
import logging
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from bus.clock import wall_clock
from bus.deferred import Deferred, HeldEvent, HeldEvents
from bus.demand import BASE_EVENTS
from bus.errors import ClosedError, ConfigurationError
from bus.event import Event
from bus.link import BrokerLink, connect
from bus.outbox import Outbox
from bus.time import Timestamp
from bus.wire import END, MAX_DEPTH, Topic, event_encoder, is_shallow, pack_map

__all__ = ["BASE_EVENTS", "Deferred", "Publisher", "PublisherStatistics"]

_log = logging.getLogger("offloop")

_EXCHANGE_EVERY = 50_000_000
_FLUSH_MASK = 0xFF
_BACKLOG_BYTES = 64 * 1024 * 1024
_FLUSH_PATIENCE = 5.0
_CONTEXT_NAMES = ("max_duration", "dataloader_label", "dataloader_len")
_TRAINING_TIME = (
    *("iteration", "epoch", "batch", "sample", "token"),
    *("epoch_in_iteration", "token_in_iteration", "batch_in_epoch", "sample_in_epoch", "token_in_epoch"),
    *("total_wct", "iteration_wct", "epoch_wct", "batch_wct"),
)


@dataclass(frozen=True)
class PublisherStatistics:
    """How the sending end is doing; counts since it began."""

    published: int
    """Events accepted."""
    acknowledged: int
    """Events that the broker has on disk."""
    held: int
    """Events held back now for a value that is on its way."""
    backlog: int
    """Events kept now, to be sent together or because the broker does not read fast enough."""
    backlog_bytes: int
    """Their size."""
    backlog_bytes_high: int
    """The largest size that the backlog ever had."""
    dropped: int
    """Events given up because the backlog reached its bound."""


class _Lane:
    """What is kept for one event: its encoder, whether it counts among the base events (1) or not (0), and whether it
    is sent at once."""

    __slots__ = ("counts", "encode", "is_urgent")

    def __init__(self, event: Event, encode: Callable[..., bytes]) -> None:
        self.encode = encode
        self.counts = int(event in BASE_EVENTS)
        self.is_urgent = event in BASE_EVENTS and event is not Event.BATCH_END


class Publisher:
    """Publishes one rank's events to the broker of a run, and starts that broker when none is named.

    Publishing is bounded in time and memory: an event is encoded and handed to a socket that does not wait. While the
    broker does not read, events are kept (``backlog_bytes``, 64 MiB by default) and sent later; past that bound the
    oldest are dropped and counted. In a loop that is faster than ``max_delay`` (in seconds) the events of batches are
    sent in bursts, each at most that much later, or with the next event: waking other processes costs the loop more
    than the sending. All other events are sent at once.

    ``run_name`` defaults to a new name; ``broker`` is the address of a broker that stands alone
    (``tcp://127.0.0.1:5570``), by default one is started in the run's directory. ``events`` are published in any
    case, further ones while a consumer wants them; the live set is :attr:`wanted`. ``info`` goes into ``run.json``.
    ``clock`` gives nanoseconds since 1970. ``on_stop`` is called, while an event is published, when somebody asks for
    the training to end.

    Raises:
        RunIsLiveError: the run has a live publisher already.
        RunDirectoryError: the run's directory cannot be written.
        BrokerError: the broker did not start, or refused.
    """

    _closed = True  # until the broker has said welcome
    _lost = False

    def __init__(
        self,
        run_name: str | None = None,
        *,
        runs_dir: str | os.PathLike[str] | None = None,
        broker: str | None = None,
        rank: int = 0,
        world_size: int = 1,
        info: dict[str, Any] | None = None,
        events: Iterable[Event] = BASE_EVENTS,
        clock: Callable[[], int] | None = None,
        max_delay: float = 0.05,
        backlog_bytes: int = _BACKLOG_BYTES,
        on_stop: Callable[[], object] | None = None,
    ) -> None:
        if not 0 <= max_delay <= 1:
            raise ConfigurationError(f"max_delay is {max_delay}; it is in seconds: 0 to 1, 0 sends every event at once")
        if backlog_bytes < 1:
            raise ConfigurationError(
                f"backlog_bytes is {backlog_bytes}; it bounds the memory for events on their way: 1 or more"
            )
        self.stop_requested = False
        """Whether somebody has asked for the training to end: a loop of your own looks here after each batch."""
        self._on_stop = on_stop
        self._always = frozenset(events)
        self.wanted: set[Event] = set(self._always)
        """The events to publish now. It is changed in place, so that a loop can keep it at hand."""
        self._link: BrokerLink = connect(run_name, runs_dir, broker, rank, world_size, info or {}, self._always)
        self._closed = False
        welcome = self._link.welcome
        self.run_name: str = self._link.run_name
        self.run_dir: Path = Path(welcome["path"])
        """The run's directory, as the broker sees it."""
        self.recording: Path = self.run_dir / welcome["recording"]
        """Where the broker records this attempt."""
        self.attempt: int = welcome["attempt"]
        self.address = self._link.address
        """Where the run's broker is: further ranks join it there."""
        self._topic = Topic(self.run_name, END, rank)
        self._world_size = world_size
        self._clock = clock or wall_clock()
        self._began = self._clock()
        self._lanes = {event: _Lane(event, self._encoder(event.value)) for event in Event}
        self._outbox = Outbox(self._link.socket.send, backlog_bytes)
        self._held = HeldEvents()
        self._max_delay = round(max_delay * 1e9)
        self._last_time = self._flush_at = self._next_exchange = 0
        self._seq = self._base_seq = self._acknowledged = 0
        self._trouble: str | None = None
        self._context: tuple[dict[str, Any], bytes] = ({}, b"")
        self._previous: tuple[int, ...] | None = None
        self._want(welcome.get("events"))
        _open_publishers.add(self)

    def _encoder(self, name: str) -> Callable[..., bytes]:
        return event_encoder(self._topic._replace(name=name), self.attempt)

    @staticmethod
    def pack_context(context: dict[str, Any]) -> bytes:
        """Packs what changes rarely, once for many :meth:`send`."""
        return pack_map(context)

    def send(
        self,
        event: Event,
        timestamp: tuple[int, ...],
        previous: tuple[int, ...] | None,
        fields: dict[str, Any],
        context: bytes,
        has_deferred: bool = False,
    ) -> None:
        """Publishes an event without asking whether it is wanted: the fast way, for loops that look into
        :attr:`wanted` themselves.

        ``timestamp`` and ``previous`` are the 14 values of a :class:`~bus.time.Timestamp`; ``context`` comes from
        :meth:`pack_context`.

        With ``has_deferred`` there may be :class:`Deferred` values among the fields. The event, and every one after
        it, is then held back in order until they are there; that is looked up at later events, and waited for only at
        FIT_END and :meth:`close`. ``fields`` may be kept until then."""
        now = self._clock()
        if now < self._last_time:
            now = self._last_time
        lane = self._lanes[event]
        seq = self._seq + 1
        base_seq = self._base_seq + lane.counts
        if has_deferred or self._held:
            self._held.append(HeldEvent(lane.encode, seq, base_seq, now, timestamp, previous, fields, context))
        else:
            self._outbox.put(lane.encode(seq, base_seq, now, timestamp, previous, fields, context))
        # Numbers are given only now: a field that cannot be packed leaves no hole in them.
        self._last_time = now
        self._seq = seq
        self._base_seq = base_seq
        if now >= self._flush_at or lane.is_urgent or not seq & _FLUSH_MASK:
            self._flush(wait=event is Event.FIT_END)

    def publish(self, event: Event | str, **fields: Any) -> None:
        """Publishes an event of a loop of your own, if anybody wants it.

        ``epoch``, ``batch``, ``sample``, ``token``, ``batch_in_epoch`` and the like say where the training stands;
        ``total_wct`` (a timedelta) is the time spent training, by default what has passed since this publisher was
        made. ``lr`` is a rate or a list of rates, or a map of optimizer name to rates; ``loss`` a number, whatever
        ``float`` takes, or a :class:`~bus.deferred.Deferred`. Anything else becomes a field of the snapshot, if
        MessagePack can hold it.

        Raises:
            ConfigurationError: no such event, or a value that cannot be sent, such as a loss on a GPU: reading it
                would make the loop wait, and whether it may is yours to say.
            ClosedError: the publisher is closed.
        """
        event = Event(event)
        if self._closed and not self._lost:
            raise ClosedError(
                f"the publisher of run {self.run_name!r} is closed: publish before close(), or make a new one"
            )
        if event not in self.wanted:
            return
        fields.setdefault("total_wct", timedelta(microseconds=(self._clock() - self._began) // 1000))
        loss = fields.get("loss")
        if getattr(loss, "is_cuda", False):
            raise ConfigurationError(
                "the loss is on a GPU: make gpu = trainer.GpuDevice() once and publish gpu.read_later(loss), "
                "or float(loss) if the loop may wait for it"
            )
        has_deferred = isinstance(loss, Deferred)
        try:
            timestamp = Timestamp(**{name: fields.pop(name) for name in _TRAINING_TIME if name in fields}).values
            context = self._pack_plain_context({name: fields.pop(name) for name in _CONTEXT_NAMES if name in fields})
            if "lr" in fields and not isinstance(fields["lr"], dict):
                rates = fields["lr"] if isinstance(fields["lr"], list | tuple) else [fields["lr"]]
                fields["lr"] = {"optimizer": [float(rate) for rate in rates]}
            if not is_shallow(fields):
                raise ValueError(f"lists and maps are nested deeper than {MAX_DEPTH}")
            if loss is not None and not has_deferred:
                fields["loss"] = float(loss)
            self.send(event, timestamp, self._previous, fields, context, has_deferred)
        except (TypeError, ValueError, OverflowError, AttributeError) as error:
            raise ConfigurationError(
                f"a field of {event.value} cannot be sent ({error}): use numbers, text, bytes, lists, maps and None"
            ) from None
        self._previous = timestamp

    def _pack_plain_context(self, context: dict[str, Any]) -> bytes:
        if "max_duration" in context:
            context["max_duration"] = str(context["max_duration"])
        context["world_size"] = self._world_size
        if context != self._context[0]:
            self._context = (context, self.pack_context(context))
        return self._context[1]

    def poll(self) -> None:
        """Sends what waits and reads what the broker said, without waiting. :meth:`send` does it by itself; this is for
        loops that pause."""
        if not self._closed:
            self._next_exchange = 0
            self._flush(wait=False)

    def _flush(self, *, wait: bool) -> None:
        self._flush_at = self._last_time + self._max_delay
        if self._held:
            for frame in self._held.take(wait=wait):
                self._outbox.put(frame)
        self._outbox.send()
        if self._last_time >= self._next_exchange:
            self._next_exchange = self._last_time + _EXCHANGE_EVERY
            self._exchange()
            self._look_after_broker()

    def _exchange(self) -> None:
        while (message := self._link.receive()) is not None:
            if message.kind == "ack":
                self._acknowledged = max(self._acknowledged, int(message.content.get("seq", 0)))
            elif message.kind == "demand":
                self._want(message.content.get("events"))
            elif message.kind == "command":
                self._take_command(message.content.get("command"))
            elif message.kind == "refused":
                self._give_up(f"refuses events: {message.content.get('reason')}")
                return
            elif message.kind == "trouble":
                self._trouble = str(message.content.get("reason"))
                _log.warning(
                    "run %s goes on, but nothing after event %d is recorded: %s",
                    *(self.run_name, self._acknowledged, self._trouble),
                )
        self._outbox.send()

    def _take_command(self, command: Any) -> None:
        # Others may come from a newer broker: what is not understood is skipped.
        if command == "stop":
            self.stop_requested = True
            if self._on_stop is not None:
                self._on_stop()

    def _want(self, names: Any) -> None:
        known = {event for event in Event if event.value in (names if isinstance(names, list) else ())}
        self.wanted &= self._always | known
        self.wanted |= self._always | known

    def _look_after_broker(self) -> None:
        how = self._link.broker_ended()
        if how is not None and not self._closed:
            self._give_up(how)

    def _give_up(self, why: str) -> None:
        """The stream has ended without us: the training goes on, and what it publishes goes nowhere."""
        _log.warning(
            "the broker of run %s %s: the training goes on, nothing after event %d is recorded",
            *(self.run_name, why, self._acknowledged),
        )
        self._lost = True
        self._shut()

    def close(self, status: str = "finished", error: str | None = None) -> None:
        """Ends the stream: sends what is left and how the run ended (``finished``, ``failed`` or ``stopped``), and
        waits, at most five seconds, until the broker has it on disk. Can be called more than once."""
        if self._closed:
            return
        if status not in ("finished", "failed", "stopped"):
            raise ConfigurationError(f"a run cannot end {status!r}: use 'finished', 'failed' or 'stopped'")
        try:
            self._flush(wait=True)
            if not self._closed:
                self._outbox.put(self._end_frame(status, error))
                self._settle()
        finally:
            self._shut()

    def _end_frame(self, status: str, error: str | None) -> bytes:
        self._seq += 1
        self._base_seq += 1
        fields = {"status": status, "error": error}
        context = self.pack_context({"world_size": self._world_size})
        now = max(self._clock(), self._last_time)
        zero = Timestamp().values
        return self._encoder(END)(self._seq, self._base_seq, now, zero, None, fields, context)

    def _settle(self) -> None:
        """Waits, within bounds, until the broker has everything on disk; says what is missing if it does not come to
        that."""
        deadline = time.monotonic() + _FLUSH_PATIENCE
        while True:
            # Asked first: what a broker said before it ended is still to be read afterwards.
            over = self._link.broker_ended() is not None or time.monotonic() > deadline
            self._link.socket.poll(20)
            self._exchange()
            if self._acknowledged >= self._seq or self._trouble is not None or self._closed:
                return
            if over:
                break
        _log.warning(
            "the broker of run %s does not answer: events %d to %d may not be recorded",
            *(self.run_name, self._acknowledged + 1, self._seq),
        )

    def _shut(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.wanted.clear()
        self._outbox.clear()
        _open_publishers.discard(self)
        self._link.close()
        if self._outbox.dropped:
            _log.warning(
                "%d events of run %s were dropped: the broker did not read them in time",
                *(self._outbox.dropped, self.run_name),
            )

    @property
    def recorded_all(self) -> bool:
        """Whether the broker has everything that was published so far on disk."""
        return not self._lost and self._trouble is None and self._acknowledged >= self._seq

    def statistics(self) -> PublisherStatistics:
        """How the sending end is doing."""
        return PublisherStatistics(
            published=self._seq,
            acknowledged=self._acknowledged,
            held=len(self._held),
            backlog=len(self._outbox),
            backlog_bytes=self._outbox.size,
            backlog_bytes_high=self._outbox.size_high,
            dropped=self._outbox.dropped,
        )

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(*ending_for(error))

    def __del__(self) -> None:
        if not self._closed:
            self.close(*ending_for(None))

    def _forget(self) -> None:
        """In a forked child: the stream stays the parent's."""
        self._closed = True
        self.wanted.clear()


def ending_for(error: BaseException | None) -> tuple[str, str | None]:
    """How a run ends that ``error`` has ended: the status and the text for :meth:`Publisher.close`."""
    if error is None:
        return "finished", None
    if isinstance(error, KeyboardInterrupt):
        return "stopped", None
    if isinstance(error, SystemExit) and error.code in (None, 0):
        return "finished", None
    return "failed", f"{type(error).__name__}: {error}"


_open_publishers: "weakref.WeakSet[Publisher]" = weakref.WeakSet()


def _close_forgotten() -> None:
    """At exit, ends the streams that nobody closed, as failed if an exception ended the program."""
    for publisher in list(_open_publishers):
        publisher.close(*ending_for(getattr(sys, "last_value", None)))


def _forget_in_child() -> None:
    for publisher in list(_open_publishers):
        publisher._forget()


atexit.register(_close_forgotten)
os.register_at_fork(after_in_child=_forget_in_child)
