"""The sending end: what a training loop uses. Nothing here ever waits for a peer while the training goes on."""

import atexit
import logging
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import zmq

from bus.clock import wall_clock
from bus.deferred import Deferred, HeldEvents
from bus.demand import BASE_EVENTS
from bus.errors import ClosedError, ConfigurationError
from bus.event import Event
from bus.link import BrokerLink, connect
from bus.time import Timestamp
from bus.wire import END, Topic, event_encoder, pack_map

__all__ = ["BASE_EVENTS", "Deferred", "Publisher", "PublisherStatistics"]

_log = logging.getLogger("offloop")

_POLL_EVERY = 50_000_000
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
    """Events kept now because the broker does not read fast enough."""
    backlog_bytes: int
    """Their size."""
    backlog_bytes_high: int
    """The largest size that the backlog ever had."""
    dropped: int
    """Events given up because the backlog reached its bound."""


class _Lane:
    """What is kept for one event: its encoder, and whether it counts among the base events (1) or not (0)."""

    __slots__ = ("counts", "encode")

    def __init__(self, encode: Callable[..., bytes], counts: int) -> None:
        self.encode = encode
        self.counts = counts


class Publisher:
    """Publishes one rank's events to the broker of a run, and starts that broker when none is named.

    Publishing is bounded in time and memory: an event is encoded and handed to a socket that does not wait. While the
    broker does not read, events are kept (``backlog_bytes``, 64 MiB by default) and sent later; past that bound the
    oldest are dropped and counted.

    ``run_name`` defaults to a new name; ``broker`` is the address of a broker that stands alone
    (``tcp://127.0.0.1:5570``), by default one is started in the run's directory. ``events`` are published in any
    case, further ones while a consumer wants them; the live set is :attr:`wanted`. ``info`` goes into ``run.json``.
    ``clock`` gives nanoseconds since 1970.

    Raises:
        RunIsLiveError: the run has a live publisher already.
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
        info: dict[str, Any] | None = None,
        events: Iterable[Event] = BASE_EVENTS,
        clock: Callable[[], int] | None = None,
        backlog_bytes: int = _BACKLOG_BYTES,
    ) -> None:
        if backlog_bytes < 1:
            raise ConfigurationError(
                f"backlog_bytes is {backlog_bytes}; it bounds the memory for events on their way: 1 or more"
            )
        self._always = frozenset(events)
        self.wanted: set[Event] = set(self._always)
        """The events to publish now. It is changed in place, so that a loop can keep it at hand."""
        self._closed = True
        self._link: BrokerLink = connect(run_name, runs_dir, broker, rank, world_size, info or {}, self._always)
        self._closed = False
        welcome = self._link.welcome
        self.run_name: str = self._link.run_name
        self.run_dir: Path = Path(welcome["path"])
        """The run's directory, as the broker sees it."""
        self.recording: Path = self.run_dir / welcome["recording"]
        """Where the broker records this attempt."""
        self.attempt: int = welcome["attempt"]
        self._topic = Topic(self.run_name, END, rank)
        self._world_size = world_size
        self._clock = clock or wall_clock()
        self._began = self._clock()
        self._lanes = {event: _Lane(self._encoder(event.value), int(event in BASE_EVENTS)) for event in Event}
        self._socket_send = self._link.socket.send
        self._last_time = self._next_poll = 0
        self._seq = self._base_seq = self._acknowledged = self._dropped = 0
        self._held = HeldEvents()
        self._backlog: deque[bytes] = deque()
        self._backlog_limit = backlog_bytes
        self._backlog_bytes = self._backlog_high = 0
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
    ) -> None:
        """Publishes an event without asking whether it is wanted: the fast way, for loops that look into
        :attr:`wanted` themselves.

        ``timestamp`` and ``previous`` are the 14 values of a :class:`~bus.time.Timestamp`; ``fields`` is not kept, so
        the caller may use it again; ``context`` comes from :meth:`pack_context`."""
        if self._held:
            self.send_deferred(event, timestamp, previous, fields, context)
            return
        now = self._clock()
        if now < self._last_time:
            now = self._last_time
        lane = self._lanes[event]
        seq = self._seq + 1
        base_seq = self._base_seq + lane.counts
        frame = lane.encode(seq, base_seq, now, timestamp, previous, fields, context)
        # Numbers are given only now: a field that cannot be packed leaves no hole in them.
        self._last_time = now
        self._seq = seq
        self._base_seq = base_seq
        if self._backlog:
            self._keep(frame)
        else:
            try:
                self._socket_send(frame, zmq.NOBLOCK)
            except zmq.Again:
                self._keep(frame)
        if now >= self._next_poll:
            self.poll()

    def send_deferred(
        self,
        event: Event,
        timestamp: tuple[int, ...],
        previous: tuple[int, ...] | None,
        fields: dict[str, Any],
        context: bytes,
    ) -> None:
        """As :meth:`send`, with :class:`Deferred` values among the fields.

        The event, and every one after it, is held back in order until the values are there; that is looked up at
        later events and never waited for before the end."""
        now = self._last_time = max(self._clock(), self._last_time)
        lane = self._lanes[event]
        self._seq = seq = self._seq + 1
        self._base_seq = base_seq = self._base_seq + lane.counts

        def encode(complete: dict[str, Any]) -> bytes:
            return lane.encode(seq, base_seq, now, timestamp, previous, complete, context)

        self._held.hold(encode, dict(fields))
        self._release_held(wait=event is Event.FIT_END)
        if now >= self._next_poll:
            self.poll()

    def publish(self, event: Event | str, **fields: Any) -> None:
        """Publishes an event of a loop of your own, if anybody wants it.

        ``epoch``, ``batch``, ``sample``, ``token``, ``batch_in_epoch`` and the like say where the training stands;
        ``total_wct`` (a timedelta) is the time spent training, by default what has passed since this publisher was
        made. ``lr`` is a list of rates, or a map of optimizer name to rates; ``loss`` a number, whatever ``float``
        takes, or a :class:`~bus.deferred.Deferred`. Anything else becomes a field of the snapshot, if MessagePack can
        hold it.

        Raises:
            ConfigurationError: no such event, or a value that cannot be sent, such as a loss on a GPU: reading it
                would make the loop wait, and whether it may is yours to say.
            ClosedError: the publisher is closed.
        """
        event = Event(event)
        if self._closed:
            raise ClosedError(
                f"the publisher of run {self.run_name!r} is closed: publish before close(), or make a new one"
            )
        if event not in self.wanted:
            return
        fields.setdefault("total_wct", timedelta(microseconds=(self._clock() - self._began) // 1000))
        timestamp = Timestamp(**{name: fields.pop(name) for name in _TRAINING_TIME if name in fields}).values
        context = self._pack_plain_context({name: fields.pop(name) for name in _CONTEXT_NAMES if name in fields})
        loss = fields.get("loss")
        if getattr(loss, "is_cuda", False):
            raise ConfigurationError(
                "the loss is on a GPU: make gpu = trainer.GpuDevice() once and publish gpu.read_later(loss), "
                "or float(loss) if the loop may wait for it"
            )
        try:
            if "lr" in fields and not isinstance(fields["lr"], dict):
                fields["lr"] = {"optimizer": [float(rate) for rate in fields["lr"]]}
            if isinstance(loss, Deferred):
                self.send_deferred(event, timestamp, self._previous, fields, context)
            else:
                if loss is not None:
                    fields["loss"] = float(loss)
                self.send(event, timestamp, self._previous, fields, context)
        except (TypeError, ValueError, OverflowError) as error:
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
        """Reads what the broker said and sends what was kept, without waiting. :meth:`send` does it every 50 ms."""
        if self._closed:
            return
        self._next_poll = self._last_time + _POLL_EVERY
        self._release_held(wait=False)
        self._exchange()
        self._look_after_broker()

    def _exchange(self) -> None:
        while (message := self._link.receive()) is not None:
            if message.kind == "ack":
                self._acknowledged = max(self._acknowledged, int(message.content.get("seq", 0)))
            elif message.kind == "demand":
                self._want(message.content.get("events"))
        self._send_backlog()

    def _want(self, names: Any) -> None:
        known = {event for event in Event if event.value in (names if isinstance(names, list) else ())}
        self.wanted &= self._always | known
        self.wanted |= self._always | known

    def _keep(self, frame: bytes) -> None:
        self._backlog.append(frame)
        self._backlog_bytes += len(frame)
        while self._backlog_bytes > self._backlog_limit:
            self._backlog_bytes -= len(self._backlog.popleft())
            self._dropped += 1
        self._backlog_high = max(self._backlog_high, self._backlog_bytes)

    def _send_backlog(self) -> None:
        backlog = self._backlog
        try:
            while backlog:
                self._socket_send(backlog[0], zmq.NOBLOCK)
                self._backlog_bytes -= len(backlog.popleft())
        except zmq.Again:
            # The broker still does not read: the next poll tries again.
            return

    def _release_held(self, *, wait: bool) -> None:
        if self._held:
            for frame in self._held.release(wait=wait):
                self._keep(frame)
            self._send_backlog()

    def _look_after_broker(self) -> None:
        how = self._link.broker_ended()
        if how is not None:
            _log.warning(
                "the broker of run %s %s: the training goes on, nothing after event %d is recorded",
                *(self.run_name, how, self._acknowledged),
            )
            self._shut()

    def close(self, status: str = "finished", error: str | None = None) -> None:
        """Ends the stream: sends what is left and how the run ended (``finished``, ``failed`` or ``stopped``), and
        waits, at most five seconds, until the broker has it on disk. Can be called more than once."""
        if self._closed:
            return
        if status not in ("finished", "failed", "stopped"):
            raise ConfigurationError(f"a run cannot end {status!r}: use 'finished', 'failed' or 'stopped'")
        self._release_held(wait=True)
        self._keep(self._end_frame(status, error))
        self._flush()
        self._shut()

    def _end_frame(self, status: str, error: str | None) -> bytes:
        self._seq += 1
        self._base_seq += 1
        fields = {"status": status, "error": error}
        context = self.pack_context({"world_size": self._world_size})
        now = max(self._clock(), self._last_time)
        zero = Timestamp().values
        return self._encoder(END)(self._seq, self._base_seq, now, zero, None, fields, context)

    def _flush(self) -> None:
        """Waits, within bounds, until the broker has everything on disk; says what is missing if it does not come to
        that."""
        deadline = time.monotonic() + _FLUSH_PATIENCE
        while True:
            # Asked first: what a broker said before it ended is still to be read afterwards.
            over = self._link.broker_ended() is not None or time.monotonic() > deadline
            self._link.socket.poll(20)
            self._exchange()
            if self._acknowledged >= self._seq:
                return
            if over:
                break
        _log.warning(
            "the broker of run %s does not answer: events %d to %d may not be recorded",
            *(self.run_name, self._acknowledged + 1, self._seq),
        )

    def _shut(self) -> None:
        self._closed = True
        self.wanted.clear()
        self._backlog.clear()
        _open_publishers.discard(self)
        self._link.close()
        if self._dropped:
            _log.warning(
                "%d events of run %s were dropped: the broker did not read them in time", self._dropped, self.run_name
            )

    def statistics(self) -> PublisherStatistics:
        """How the sending end is doing."""
        return PublisherStatistics(
            published=self._seq,
            acknowledged=self._acknowledged,
            held=len(self._held),
            backlog=len(self._backlog),
            backlog_bytes=self._backlog_bytes,
            backlog_bytes_high=self._backlog_high,
            dropped=self._dropped,
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
