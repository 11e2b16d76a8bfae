"""The base class of callbacks."""

import inspect
from collections.abc import Collection, Iterable, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

from offloop.bus.errors import ConfigurationError
from offloop.bus.protocol.host_windows import HostWindow
from offloop.bus.protocol.order import Ending
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.protocol.stream import RunStream
from offloop.bus.types.demand import Demand, EventDemand, check_max_delay
from offloop.bus.types.event import Event
from offloop.consumers.api.events import EventMethods, MaybeAwaitable
from offloop.consumers.api.logger import Logger, LoggerDestination

OnError: TypeAlias = Literal["continue", "disable", "stop"]
"""The consequence for a callback that raises: further events, none, or the end of the consumer."""


class CannotWorkError(ConfigurationError):
    """Raised by a callback that finds at an event that it can never do its work in this run, such as one that watches a
    metric that does not exist. It gets no more events, and requests nothing of the training; the others are not
    affected. A consumer without callbacks exits."""


class Callback(EventMethods):
    """Observes a run: override the method of each event that you want to see, and log through ``logger``.

    ``state`` is the read-only snapshot of that event. The methods that a class overrides are the events that it is
    sent. Any method may be ``async``. Take time from ``state`` and never from a clock of your own: then a replay logs
    what the live run logged. ``logger.context`` says which run it is.

    Of a training with several ranks a callback sees the first one, whose times, losses and metrics are those of all of
    them together. With :attr:`all_ranks` it sees the events of every rank; ``state.rank`` distinguishes them.

    Reference: ``composer/core/callback.py``.
    """

    all_ranks: ClassVar[bool] = False
    """Send the events of every rank, not only those of the first one."""

    events: ClassVar[Collection[Event | str] | None] = None
    """The events that :meth:`run_event` requests, for a class that overrides it; ``None`` for all of them."""

    fields: ClassVar[Collection[str]] = ()
    """Fields of ``state`` to compute for this callback, such as ``("gradient_norm",)``: attributes of every snapshot
    that it is sent and that they exist at. Of other fields that are not always there it sees none."""

    every: ClassVar[int | str] = 1
    """The interval, in batches of the training (or of the evaluation or prediction): 10 for the batches 10, 20, ..., or
    in another unit: ``2ep``, ``0.25dur``, see :func:`offloop.bus.types.intervals.is_due`. Holds for ``fields`` and for
    events that are not always published, such as ``AFTER_TRAIN_BATCH``; the others (:data:`offloop.bus.BASE_EVENTS`)
    come at every batch. An object may set its own in ``__init__``."""

    max_delay: ClassVar[float | None] = None
    """By how many seconds, from 0 to 1, events may be late in a fast loop, which sends them together; ``None`` for as
    late as the training sends them by itself: 50 ms, unless it was started with another ``max_delay``. The shortest
    delay of all consumers counts, and a very short one slows the training down: see ``docs/performance.md``."""

    background: ClassVar[bool | None] = None
    """Run in the background, with a stream of its own, so that it delays no other callback.

    ``True`` gives it a thread: for methods that may take long, because they write files, upload or call others.
    ``False`` lets it share a stream with others, and they handle each event one after the other. ``None`` is ``False``,
    but for a callback with ``async`` methods for events: it runs in the others' event loop, and while it waits, they
    continue."""

    barrier_events: ClassVar[Collection[Event | str]] = ()
    """The events at which the callback may decide to stop the training. A trainer with ``wait_for`` waits at each of
    them until the callback has handled it."""

    resumes: ClassVar[bool] = True
    """Continue :meth:`state_dict` in a later attempt of the run, from the checkpoint from which that resumes; ``False``
    for a state that is about one attempt, such as a position in its file or the time of its last event."""

    owns_terminal: ClassVar[bool] = False
    """The callback draws on the whole terminal: the command ``consumer`` then logs nothing there."""

    def check(self) -> None:
        """Find out what cannot work before anything is begun, such as a terminal that is not there. The command
        ``consumer`` calls it before it looks for the run. Raise :class:`offloop.bus.errors.ConfigurationError`."""

    def destinations(self) -> Sequence[LoggerDestination]:
        """Destinations for this callback, in addition to the consumer's: one that shows what others log gets it
        through them. Called once, before the first event."""
        return ()

    def demand(self) -> Demand:
        """The request to the training: the events whose methods the callback overrides, or, where :meth:`run_event` is
        overridden, :attr:`events`; with :attr:`fields`, every so many batches. Override it to request each event or
        field at an interval of its own.

        Raises :class:`offloop.bus.errors.ConfigurationError` for an interval, or a name of a field, that is not
        allowed."""
        if isinstance(self.fields, str):
            raise ConfigurationError(
                f"fields of callback {type(self).__name__} is the text {self.fields!r}: give a tuple of names, such as "
                f"({self.fields!r},)"
            )
        request = EventDemand(self.every, dict.fromkeys(self.fields, self.every))
        return Demand(dict.fromkeys(self._handled_events(), request))

    def prepare(self, stream: RunStream, logger: Logger) -> MaybeAwaitable:
        """Called before a stream that the callback shares with no other is read from its front. What the callback knows
        of the history in another way need not come: see :meth:`~offloop.bus.protocol.stream.RunStream.skip_to`."""

    def host_windows(self, windows: Sequence[HostWindow], logger: Logger) -> None:
        """Receive how the ranks of each host of a run on several hosts are doing, about once a second. Comes
        between two events, from a stream that has it: of all hosts with ``--stream``, of one from the run's directory.
        Recordings do not have it, so what is logged here does not come again in a replay; log with the ``step`` that it
        is about. Not ``async``."""

    def run_event(self, event: Event, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        """Called for every requested event; calls the event's method. An override replaces those methods."""
        result: MaybeAwaitable = getattr(self, event.value)(state, logger)
        return result

    def run_ended(self, ending: Ending | None) -> MaybeAwaitable:
        """The stream has ended, and :meth:`close` comes next. ``ending`` is how the run ended; ``None`` when the
        consumer leaves a live run."""

    def close(self, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        """The stream has ended: the last chance to log. ``state`` is the last snapshot that the consumer handled."""

    def post_close(self) -> MaybeAwaitable:
        """Every callback is closed: give back what is held. Not called when this callback's :meth:`close` raised."""

    def hold_open(self) -> None:
        """Called by the command ``consumer`` at its end, unless it was asked to stop: what is to be looked at stays
        visible until this returns. Ctrl-C raises ``KeyboardInterrupt`` here, which ends the command."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that :meth:`load_state_dict` needs to continue from here as if nothing had happened.

        Plain values only: numbers, strings, bytes, lists, maps, ``None``. Called between two events, at least
        once a second in a busy run, so it has to be small."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` gave; tuples are lists by then. Called before the first event, and, in an
        attempt that resumes from a checkpoint, between ``BEFORE_LOAD`` and ``AFTER_LOAD`` with the state from where the
        checkpoint was saved."""

    @property
    def runs_alone(self) -> bool:
        """True with a stream of its own beside the others, see :attr:`background`."""
        if self.background is not None:
            return self.background
        names = ["run_event"] if self.overrides("run_event") else [event.value for event in self.demand().events]
        return any(inspect.iscoroutinefunction(getattr(self, name)) for name in names)

    @property
    def has_state(self) -> bool:
        """True with a state that is kept with checkpoints."""
        return self.overrides("state_dict")

    def overrides(self, name: str) -> bool:
        """Return True if the class, or the object, has a method of that name of its own."""
        return name in vars(self) or getattr(type(self), name) is not getattr(Callback, name)

    def _handled_events(self) -> set[Event]:
        if self.overrides("run_event"):
            return set(Event) if self.events is None else {Event(event) for event in self.events}
        return {event for event in Event if self.overrides(event.value)}


def demand_of(callbacks: Iterable[Callback]) -> Demand:
    """The demand of several callbacks together.

    Raises :class:`offloop.bus.errors.ConfigurationError` for one whose demand is not allowed."""
    return Demand.merge(part for callback in callbacks for part in (callback.demand(), _delay_of(callback)))


def _delay_of(callback: Callback) -> Demand:
    delay, name = callback.max_delay, type(callback).__name__
    return Demand(max_delay=None if delay is None else check_max_delay(delay, f"max_delay of callback {name}"))
