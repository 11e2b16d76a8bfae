"""The callbacks of a runner: requested events, names, errors."""

import difflib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from offloop.bus.errors import ConfigurationError
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.demand import BASE_EVENTS, Demand, barrier_events_of
from offloop.bus.types.event import Event
from offloop.bus.types.hyperparameters import EVENTS as WITH_HYPERPARAMETERS
from offloop.bus.types.source import Source, shorten_names
from offloop.consumers.api.callback import Callback, MaybeAwaitable, demand_of
from offloop.consumers.api.logger import Logger


def requested_events(callbacks: Iterable[Callback]) -> set[Event]:
    """Return the events that callbacks request, and those with hyperparameters, which are always logged.

    Raises ConfigurationError for a callback that handles nothing, which is a misspelt method."""
    events: set[Event] = set(WITH_HYPERPARAMETERS)
    for callback in callbacks:
        requested = callback.demand().events
        if not requested and not (callback.overrides("close") or callback.overrides("post_close")):
            raise ConfigurationError(
                f"callback {type(callback).__name__} handles no event: its methods are named after events, "
                f"such as batch_end{_misspelt(callback)}"
            )
        events |= requested
    return events


@dataclass(frozen=True)
class Subscription:
    """The request of callbacks to a run's stream; the fields are arguments of :class:`~offloop.bus.Subscriber`."""

    events: frozenset[Event]
    demand: Demand
    barrier_events: frozenset[Event] = frozenset()  # the events at which a callback may stop the training
    name: str | None = None  # the consumer's
    after: Mapping[int, tuple[int, int]] | None = None
    """Rank to ``(seq, base_seq)`` of the last snapshot that need not come again."""
    max_delay: float | None = None  # seconds by which events may be late, whatever the callbacks request

    @classmethod
    def of(
        cls,
        callbacks: Sequence[Callback],
        name: str | None = None,
        after: Mapping[int, tuple[int, int]] | None = None,
        max_delay: float | None = None,
    ) -> "Subscription":
        events, barrier_events = frozenset(requested_events(callbacks)), frozenset(barrier_events_of(callbacks))
        return cls(events, demand_of(callbacks), barrier_events, name, after, max_delay)


def partition(callbacks: Sequence[Callback]) -> tuple[list[tuple[str, Callback]], list[tuple[str, Callback]]]:
    named = list(zip(unique_names(callbacks), callbacks, strict=True))
    shared = [one for one in named if not one[1].runs_alone] or named[:1]
    return shared, [one for one in named if one not in shared]


_OF_ITERATIONS = {Event.ITERATION_START, Event.ITERATION_END, Event.ITERATION_CHECKPOINT}
_SIGNS_OF_LIFE = BASE_EVENTS | {Event.EVAL_BATCH_END, Event.PREDICT_BATCH_END}


def missing_lines(entries: Sequence["CallbackEntry"], source: Source, run: str) -> list[str]:
    """Return a line for people about each callback that waits for what a run's source never gives.

    Base events, and batches of evaluations, do not count for a callback that receives all base events. Iterations never
    count: most trainings have none."""
    lines: list[str] = []
    waiting = [entry for entry in entries if entry.demand.events]
    idle = 0
    for entry in waiting:
        gets = entry.demand.without(source.fields.keys()).events - source.events
        events = (entry.demand.events & source.events) - _OF_ITERATIONS
        if entry.demand.events >= BASE_EVENTS:
            events -= _SIGNS_OF_LIFE
        fields = sorted(entry.demand.fields & source.fields.keys())
        idle += not gets
        if gets and not events and not fields:
            continue
        names = [event.value for event in Event if event in events]
        reasons = f" ({'; '.join(f'{field}: {source.fields[field]}' for field in fields)})" if fields else ""
        rest = "it gets the rest" if gets else "it gets nothing: leave it out"
        lines.append(
            f"callback {entry.name} waits for {shorten_names([*fields, *names])}, which {source.name} never gives"
            f"{reasons}; {rest}"
        )
    if idle and idle == len(waiting):
        lines.append(
            f"no callback of this consumer gets anything from run {run}: 'offloop show {run} --details' lists "
            f"what {source.name} never gives"
        )
    return lines


def _misspelt(callback: Callback) -> str:
    methods = {event.value for event in Event}
    for name in vars(type(callback)):
        close = difflib.get_close_matches(name, methods, n=1, cutoff=0.75)
        if close:
            return f"; did you mean {close[0]} for {name}?"
    return ""


@dataclass
class CallbackEntry:
    callback: Callback
    name: str
    errors: int = 0
    disabled: bool = False  # it raised (on_error), and gets no more events, also from the next consumer
    ended: bool = False  # it cannot work, and gets no more events; the next consumer tries it again
    closed: bool = False

    def __post_init__(self) -> None:
        self.demand: Demand = self.callback.demand()

    def handler_of(self, event: Event) -> Callable[[Snapshot, Logger], MaybeAwaitable]:
        callback = self.callback
        if callback.overrides("run_event"):
            return partial(callback.run_event, event)
        return callback.method_for(event)

    @property
    def is_active(self) -> bool:
        return not (self.disabled or self.ended)


def unique_names(entries: Iterable[object]) -> Iterator[str]:
    """Return names of objects, by default of their classes: ``SpeedMonitor``, ``SpeedMonitor#2``."""
    seen: defaultdict[str, int] = defaultdict(int)
    for entry in entries:
        name = getattr(entry, "shown_as", type(entry).__name__)
        seen[name] += 1
        yield name if seen[name] == 1 else f"{name}#{seen[name]}"
