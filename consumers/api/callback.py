"""The base class of callbacks."""

import inspect
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import is_dataclass
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

import msgspec

from offloop.bus.errors import ConfigurationError
from offloop.bus.protocol.host_windows import HostWindow
from offloop.bus.protocol.order import Ending
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.protocol.stream import RunStream
from offloop.bus.types.demand import Demand, EventDemand, check_max_delay
from offloop.bus.types.event import CUSTOM, OWN, Event
from offloop.consumers.api.logger import Logger, LoggerDestination

OnError: TypeAlias = Literal["continue", "disable", "stop"]
"""The consequence of an error in a callback: later events, no more events, or the end of the consumer."""


_Handler = TypeVar("_Handler", bound=Callable[..., Any])

MaybeAwaitable: TypeAlias = Awaitable[None] | None
"""The result of a callback's method: nothing, or an awaitable of an ``async`` method."""


class CannotWorkError(ConfigurationError):
    """Raised by a callback that can never work in this run, such as one that watches a missing metric.

    It gets no more events and requests nothing of the training; other callbacks are not affected. A consumer
    without callbacks exits."""


class Callback:
    """Observes a run: override the method of each event that you want to see, and log through ``logger``.

    ``state`` is the read-only snapshot of that event. A class receives the events whose methods it overrides, which
    may be ``async``. Take time from ``state``, never from a clock: then a replay logs what the live run logged.
    ``logger.context`` names the run.

    Of several ranks a callback sees the events of the first one, whose times, losses and metrics are those of all
    ranks together; with :attr:`all_ranks` it sees the events of every rank, distinguished by ``state.rank``.

    Reference: ``composer/core/callback.py``."""

    all_ranks: bool = False
    """Send the events of every rank, not only those of the first one."""

    sees_actors: bool = False
    """Send the events with which processes besides the ranks log values, see :func:`offloop.join`."""

    events: Collection[Event | str] | None = None
    """The events that :meth:`run_event` requests, for a class that overrides it; ``None`` for all of them."""

    fields: Collection[str] = ()
    """Fields of ``state`` to compute for this callback, such as ``("gradient_norm",)``, at every event that has them.

    Other fields on demand are hidden from it."""

    every: int | str = 1
    """The interval of ``fields`` and of inner events, in batches or another unit.

    10 is for the batches 10, 20, ...; ``2ep`` and ``0.25dur`` are other units, see
    :func:`offloop.bus.types.intervals.is_due`. :data:`offloop.bus.BASE_EVENTS` are always published. An object may
    set its own interval in ``__init__``."""

    max_delay: float | None = None
    """Seconds, from 0 to 1, by which events may be late in a fast loop, which sends several together.

    ``None`` is the training's own ``max_delay``, 50 ms by default. The shortest delay of all consumers counts; a
    very short one slows the training down, see ``docs/performance.md``."""

    background: bool | None = None
    """Run with a separate stream, so that it delays no other callback.

    ``True`` gives it a thread, for slow methods. ``False`` lets it share a stream with other callbacks, which
    handle each event one after the other. ``None`` is ``False``, except for a callback with ``async`` methods: it
    runs in the shared event loop, and while it waits, the others continue."""

    barrier_events: Collection[Event | str] = ()
    """The events at which the callback may stop the training. A trainer with ``wait_for`` waits there for it."""

    resumes: bool = True
    """Restore :meth:`state_dict` in a later attempt, from the checkpoint from which that attempt resumes.

    ``False`` is for a state of one attempt, such as a position in its file."""

    keeps: Collection[str] = ()
    """Attributes that make up :meth:`state_dict`: plain values, dataclasses of them, or objects with these methods."""

    owns_terminal: bool = False
    """The callback draws on the whole terminal, so the command ``consumer`` logs nothing there."""

    @staticmethod
    def on(*names: str) -> Callable[[_Handler], _Handler]:
        """Make a method handle custom events of a training, from all of its processes.

            @Callback.on("rollout_end")
            def rewards(self, state, logger):
                logger.log_metrics({"reward": state.reward})

        A name is that of an event or a span, ``#completions`` is the addition of rows to a table; ``*`` stands for all
        events, ``#*`` for all tables. Raises ConfigurationError for an invalid name."""
        events = tuple(Event(name if name.startswith(OWN) else f"{CUSTOM}{name}") for name in names)

        def mark(method: _Handler) -> _Handler:
            method.own_events = events  # type: ignore[attr-defined]
            return method

        return mark

    def check(self) -> None:
        """Raise ConfigurationError for what cannot work, such as a missing terminal.

        The command ``consumer`` calls it before it looks for the run."""

    def destinations(self) -> Sequence[LoggerDestination]:
        """Return destinations for this callback, in addition to the consumer's. Called once, before the first event."""
        return ()

    def demand(self) -> Demand:
        """Return the events and fields to request of the training, and their intervals.

        By default the events whose methods the callback overrides, or :attr:`events` where it overrides
        :meth:`run_event`, with :attr:`fields` at intervals of :attr:`every`. Override it for other intervals.

        Raises :class:`offloop.bus.errors.ConfigurationError` for an invalid interval or name of a field."""
        if isinstance(self.fields, str):
            raise ConfigurationError(
                f"fields of callback {type(self).__name__} is the text {self.fields!r}: give a tuple of names, such as "
                f"({self.fields!r},)"
            )
        request = EventDemand(self.every, dict.fromkeys(self.fields, self.every))
        return Demand(dict.fromkeys(self._handled_events(), request))

    def prepare(self, stream: RunStream, logger: Logger) -> MaybeAwaitable:
        """Get ready before a stream of this callback alone is read from its start.

        It may skip known history: see :meth:`~offloop.bus.protocol.stream.RunStream.skip_to`."""

    def resumed(self, logger: Logger) -> MaybeAwaitable:
        """Continue in a restarted consumer, after :meth:`load_state_dict`; the next event may be far away."""

    def host_windows(self, windows: Sequence[HostWindow], logger: Logger) -> None:
        """Receive the state of each host's ranks, about once a second, between two events.

        With ``--stream`` all hosts of the run, from the run's directory one. Recordings do not have it, so a
        replay does not repeat what is logged here; log with the ``step`` of the windows. Not ``async``."""

    def run_event(self, event: Event, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        """Handle a requested event; calls the event's method. An override replaces those methods."""
        # Callbacks written for Composer have this method too, and nothing else of this class.
        method = self.method_for(event) if event.is_own else getattr(self, event.value)
        result: MaybeAwaitable = method(state, logger)
        return result

    def method_for(self, event: Event) -> Callable[[Snapshot, Logger], MaybeAwaitable]:
        """Return the method that handles an event."""
        methods = self._own_methods()
        name = methods.get(event) or methods[event.wildcard] if event.is_own else event.value
        method: Callable[[Snapshot, Logger], MaybeAwaitable] = getattr(self, name)
        return method

    def run_ended(self, ending: Ending | None) -> MaybeAwaitable:
        """Learn how the run ended, before :meth:`close`; ``None`` when the consumer leaves a live run."""

    def close(self, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        """Log at the end of the stream, for the last time. ``state`` is the last handled snapshot."""

    def post_close(self) -> MaybeAwaitable:
        """Release resources; every callback is closed. Not called after an error in :meth:`close`."""

    def hold_open(self) -> None:
        """Keep visible what the user should see; called by ``consumer`` at its end, unless it was stopped.

        The command ends when this returns. Ctrl-C raises ``KeyboardInterrupt`` here."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything that :meth:`load_state_dict` needs to continue from here.

        Plain values only: numbers, strings, bytes, lists, maps, ``None``. Called between two events, at least
        once a second in a busy run, so keep it small. By default the attributes in :attr:`keeps`."""
        kept = {name.lstrip("_"): getattr(self, name) for name in self.keeps}
        return {
            name: value.state_dict() if hasattr(value, "state_dict") else msgspec.to_builtins(value)
            for name, value in kept.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; tuples are lists by then.

        Called before the first event, and in an attempt that resumes from a checkpoint between ``BEFORE_LOAD``
        and ``AFTER_LOAD``."""
        for name in self.keeps:
            before, value = getattr(self, name), state[name.lstrip("_")]
            if hasattr(before, "load_state_dict"):
                before.load_state_dict(value)
                continue
            setattr(self, name, msgspec.convert(value, type(before)) if is_dataclass(before) else value)

    @property
    def runs_alone(self) -> bool:
        """True with a separate stream, see :attr:`background`."""
        if self.background is not None:
            return self.background
        if self.overrides("run_event"):
            return inspect.iscoroutinefunction(self.run_event)
        return any(inspect.iscoroutinefunction(self.method_for(event)) for event in self.demand().events)

    @property
    def has_state(self) -> bool:
        """True with a state that is kept with checkpoints."""
        return bool(self.keeps) or self.overrides("state_dict")

    def overrides(self, name: str) -> bool:
        """Return True if the class or the object overrides the method."""
        return name in vars(self) or getattr(type(self), name) is not getattr(Callback, name)

    def _handled_events(self) -> set[Event]:
        if self.overrides("run_event"):
            return set(Event) if self.events is None else {Event(event) for event in self.events}
        return {event for event in Event if self.overrides(event.value)} | self._own_methods().keys()

    @classmethod
    def _own_methods(cls) -> dict[Event, str]:
        if "_methods" not in vars(cls):
            methods = {name: getattr(cls, name, None) for name in dir(cls)}
            cls._methods = {
                event: name for name, method in methods.items() for event in getattr(method, "own_events", ())
            }
        return cls._methods

    _methods: ClassVar[dict[Event, str]]
    """Names of the methods for events of a training's own, of this class."""

    # A method for each event, of its name: :class:`offloop.bus.Event` says when each happens.
    def init(self, state: Snapshot, logger: Logger) -> MaybeAwaitable: ...
    def before_load(self, state: Snapshot, logger: Logger) -> MaybeAwaitable: ...
    def after_load(self, state: Snapshot, logger: Logger) -> MaybeAwaitable: ...
    def fit_start(self, state: Snapshot, logger: Logger) -> MaybeAwaitable: ...
    def iteration_start(self, state: Snapshot, logger: Logger) -> MaybeAwaitable: ...
    def epoch_start(self, state: Snapshot, logger: Logger) -> MaybeAwaitable: ...
    def before_dataloader(self, state: Snapshot, logger: Logger) -> MaybeAwaitable: ...
    def after_dataloader(self, state: Snapshot, logger: Logger) -> MaybeAwaitable: ...
    def batch_start(self, state: Snapshot, logger: Logger) -> MaybeAwaitable: ...
    def before_train_batch(self, state: Snapshot, logger: Logger) -> MaybeAwaitable: ...
    def before_forward(self, state: Snapshot, logger: Logger) -> MaybeAwaitable: ...
    def after_forward(self, state: Snapshot, logger: Logger) -> MaybeAwaitable: ...
    def before_loss(self, state: Snapshot, logger: Logger) -> MaybeAwaitable: ...
    def after_loss(self, state: Snapshot, logger: Logger) -> MaybeAwaitable: ...
    def before_backward(self, state: Snapshot, logger: Logger) -> MaybeAwaitable: ...
    def after_backward(self, state: Snapshot, logger: Logger) -> MaybeAwaitable: ...
    def after_train_batch(self, state: Snapshot, logger: Logger) -> MaybeAwaitable: ...
    def batch_end(self, state: Snapshot, logger: Logger) -> MaybeAwaitable: ...
    def batch_checkpoint(self, state: Snapshot, logger: Logger) -> MaybeAwaitable: ...
    def epoch_end(self, state: Snapshot, logger: Logger) -> MaybeAwaitable: ...
    def epoch_checkpoint(self, state: Snapshot, logger: Logger) -> MaybeAwaitable: ...
    def iteration_end(self, state: Snapshot, logger: Logger) -> MaybeAwaitable: ...
    def iteration_checkpoint(self, state: Snapshot, logger: Logger) -> MaybeAwaitable: ...
    def fit_end(self, state: Snapshot, logger: Logger) -> MaybeAwaitable: ...
    def eval_before_all(self, state: Snapshot, logger: Logger) -> MaybeAwaitable: ...
    def eval_start(self, state: Snapshot, logger: Logger) -> MaybeAwaitable: ...
    def eval_batch_start(self, state: Snapshot, logger: Logger) -> MaybeAwaitable: ...
    def eval_before_forward(self, state: Snapshot, logger: Logger) -> MaybeAwaitable: ...
    def eval_after_forward(self, state: Snapshot, logger: Logger) -> MaybeAwaitable: ...
    def eval_batch_end(self, state: Snapshot, logger: Logger) -> MaybeAwaitable: ...
    def eval_end(self, state: Snapshot, logger: Logger) -> MaybeAwaitable: ...
    def eval_after_all(self, state: Snapshot, logger: Logger) -> MaybeAwaitable: ...
    def eval_standalone_start(self, state: Snapshot, logger: Logger) -> MaybeAwaitable: ...
    def eval_standalone_end(self, state: Snapshot, logger: Logger) -> MaybeAwaitable: ...
    def predict_start(self, state: Snapshot, logger: Logger) -> MaybeAwaitable: ...
    def predict_batch_start(self, state: Snapshot, logger: Logger) -> MaybeAwaitable: ...
    def predict_before_forward(self, state: Snapshot, logger: Logger) -> MaybeAwaitable: ...
    def predict_after_forward(self, state: Snapshot, logger: Logger) -> MaybeAwaitable: ...
    def predict_batch_end(self, state: Snapshot, logger: Logger) -> MaybeAwaitable: ...
    def predict_end(self, state: Snapshot, logger: Logger) -> MaybeAwaitable: ...


def demand_of(callbacks: Iterable[Callback]) -> Demand:
    """Merge the demands of several callbacks. Raises ConfigurationError for an invalid one."""
    return Demand.merge(part for callback in callbacks for part in (callback.demand(), _delay_of(callback)))


def _delay_of(callback: Callback) -> Demand:
    delay, name = callback.max_delay, type(callback).__name__
    return Demand(max_delay=None if delay is None else check_max_delay(delay, f"max_delay of callback {name}"))
