"""Demand: the events and fields that consumers request, and how often; and the progress of each consumer."""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, Self, TypeAlias

import msgspec

from offloop.bus.errors import ConfigurationError, ProtocolError
from offloop.bus.types.event import Event
from offloop.bus.types.intervals import BATCH_EVENTS, EventPosition, check_interval, is_due

MAX_EVENTS = 256
MAX_FIELDS = 64
MAX_FIELD_NAME = 100
MAX_INTERVALS = 64
MAX_DELAY = 1.0
_DELAY_KEY = "max_delay"

BASE_EVENTS: frozenset[Event] = frozenset(Event) - (BATCH_EVENTS - {Event.BATCH_END})
"""Events that are always published and recorded, so that late readers have a complete history.

All others occur several times a batch, or once in each batch besides ``BATCH_END``, and are published on request."""


@dataclass(frozen=True)
class EventDemand:
    """The demand of a consumer for one event.

    Args:
        every: The interval. 10 means batches 10, 20, ... of the training, or of the evaluation or prediction that the
            event belongs to. A text such as ``2ep``, ``0.25dur`` or ``1ep+end`` is a share of the training time, see
            :func:`offloop.bus.types.intervals.is_due`. Base events are due every time; so are, with a number, events
            that belong to no batch. With ``None`` the event is requested only for its fields, and is not published
            where none of them is available.
        fields: Further fields, and the interval of each. A field that is due makes its event due.

    Raises:
        ConfigurationError: An interval or the name of a field is invalid."""

    every: int | str | None = 1
    fields: Mapping[str, int | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        intervals: dict[str, Any] = {} if self.every is None and self.fields else {"every": self.every}
        intervals |= {f"every of field {name!r}": every for name, every in self.fields.items()}
        for what, interval in intervals.items():
            try:
                check_interval(interval)
            except ConfigurationError as error:
                raise ConfigurationError(f"{what}: {error}") from None
        for name in self.fields:
            if not _is_field_name(name):
                raise ConfigurationError(
                    f"{name!r} cannot be the name of a field: use an identifier of at most {MAX_FIELD_NAME} characters"
                )
        if len(self.fields) > MAX_FIELDS:
            raise ConfigurationError(
                f"{len(self.fields)} fields are requested of one event: request at most {MAX_FIELDS}"
            )


def check_max_delay(seconds: Any, argument: str = "max_delay") -> float:
    """Return a delay of events in seconds. Raises ConfigurationError unless it is a number from 0 to 1."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= MAX_DELAY:
        raise ConfigurationError(
            f"{argument} is {seconds!r}; it is in seconds: use 0 to {MAX_DELAY:g}, 0 sends every event at once"
        )
    return float(seconds)


def shortest_delay(delays: Iterable[float | None]) -> float | None:
    return min((delay for delay in delays if delay is not None), default=None)


_Intervals: TypeAlias = tuple[int | str, ...]
"""Sorted numbers, none a multiple of another, then sorted times. Due when one of them is."""
_EVERY_BATCH: _Intervals = (1,)


def _simplify(intervals: Iterable[int | str]) -> _Intervals:
    every = set(intervals)
    numbers: list[int] = []
    for number in sorted(one for one in every if not isinstance(one, str)):
        if not any(number % other == 0 for other in numbers):
            numbers.append(number)
    return *numbers, *sorted(one for one in every if isinstance(one, str))


def _are_due(intervals: _Intervals, number: int, position: EventPosition | None) -> bool:
    for interval in intervals:
        if isinstance(interval, str):
            if position is not None and is_due(interval, position):
                return True
        elif number % interval == 0:
            return True
    return False


class _EventIntervals(NamedTuple):
    """The merged demand for one event: the intervals of the event itself, of its fields, and of both."""

    own: _Intervals
    fields: Mapping[str, _Intervals]
    intervals: _Intervals

    @classmethod
    def merge(cls, event: Event, own: Iterable[int | str], fields: Mapping[str, Iterable[int | str]]) -> Self:
        of_fields = MappingProxyType({name: _simplify(every) for name, every in fields.items()})
        if event in BASE_EVENTS:  # always due
            return cls(_EVERY_BATCH, of_fields, _EVERY_BATCH)
        own = _simplify(own)
        return cls(own, of_fields, _simplify(chain(own, *of_fields.values())))

    @classmethod
    def check(cls, event: Event, own: Iterable[int | str], fields: Mapping[str, Iterable[int | str]]) -> Self:
        """As :meth:`merge`, for intervals of a peer. Raises ConfigurationError for an invalid one."""
        checked = {name: [check_interval(one, event) for one in every] for name, every in fields.items()}
        return cls.merge(event, [check_interval(one, event) for one in own], checked)


class Demand:
    """The requested events and fields, how often each, and how soon. Immutable.

    Merged demands keep their intervals: consumers that request every 10th and every 15th batch cause 10, 15, 20, 30,
    ... and no more. The shortest delay applies."""

    __slots__ = ("_by_event", "max_delay")
    _by_event: Mapping[Event, _EventIntervals]
    max_delay: float | None
    """Maximum delay in seconds of events that a fast loop sends together; ``None``: the publisher's default."""

    def __init__(self, events: Mapping[Event, EventDemand] | None = None, max_delay: float | None = None) -> None:
        self._by_event = {
            event: _EventIntervals.check(
                event, [] if one.every is None else [one.every], {name: [every] for name, every in one.fields.items()}
            )
            for event, one in (events or {}).items()
        }
        self.max_delay = None if max_delay is None else check_max_delay(max_delay)

    @classmethod
    def of(cls, events: Iterable[Event]) -> "Demand":
        return cls(dict.fromkeys(events, EventDemand()))

    @classmethod
    def merge(cls, demands: Iterable["Demand"]) -> "Demand":
        """Return a demand that is due exactly when one of these is."""
        demands = tuple(demands)
        own: dict[Event, list[int | str]] = {}
        fields: dict[Event, dict[str, list[int | str]]] = {}
        for event, found in chain.from_iterable(demand._by_event.items() for demand in demands):
            own.setdefault(event, []).extend(found.own)
            of_event = fields.setdefault(event, {})
            for name, every in found.fields.items():
                of_event.setdefault(name, []).extend(every)
        merged = {event: _EventIntervals.merge(event, every, fields[event]) for event, every in own.items()}
        return cls._of(merged, shortest_delay(demand.max_delay for demand in demands))

    @classmethod
    def _of(cls, by_event: Mapping[Event, _EventIntervals], max_delay: float | None) -> "Demand":
        demand = cls(max_delay=max_delay)
        demand._by_event = by_event
        return demand

    @property
    def content(self) -> "Demand":
        return self._of(self._by_event, None)

    @property
    def events(self) -> frozenset[Event]:
        return frozenset(self._by_event)

    @property
    def fields(self) -> frozenset[str]:
        return frozenset(name for found in self._by_event.values() for name in found.fields)

    def without(self, fields: Set[str]) -> "Demand":
        """Return the demand without events that are requested only for these fields."""
        return self._of(
            {event: found for event, found in self._by_event.items() if found.own or not fields >= found.fields.keys()},
            self.max_delay,
        )

    def is_due(self, event: Event, number: int, position: EventPosition | None = None) -> bool:
        """Return whether the event is due at a batch number; intervals other than numbers need a ``position``."""
        found = self._by_event.get(event)
        return found is not None and _are_due(found.intervals, number, position)

    def due_fields(self, event: Event, number: int, position: EventPosition | None = None) -> tuple[str, ...]:
        found = self._by_event.get(event)
        if found is None:
            return ()
        return tuple(name for name, intervals in found.fields.items() if _are_due(intervals, number, position))

    def has_field(self, event: Event, name: str) -> bool:
        found = self._by_event.get(event)
        return found is not None and name in found.fields

    def is_at_every_batch(self, event: Event) -> bool:
        return self._by_event[event].intervals == _EVERY_BATCH

    def is_always_same(self, event: Event) -> bool:
        return self.is_at_every_batch(event) and not self._by_event[event].fields

    def is_timed(self, event: Event) -> bool:
        found = self._by_event.get(event)
        return found is not None and any(isinstance(one, str) for one in chain(found.intervals, *found.fields.values()))

    def to_wire(self) -> dict[str, Any]:
        """Return ``max_delay``, and event to ``every`` and ``fields``, lists of intervals; ``every`` may be empty."""
        delay = {} if self.max_delay is None else {_DELAY_KEY: self.max_delay}
        return delay | {
            event.value: {
                "every": list(found.own),
                "fields": {name: list(intervals) for name, intervals in found.fields.items()},
            }
            for event, found in self._by_event.items()
        }

    @classmethod
    def from_wire(cls, value: Any) -> "Demand":
        """Read the form of :meth:`to_wire`, without unknown events. Raises ProtocolError, also above a limit."""
        try:
            parts = dict(msgspec.convert(value, dict[Any, Any]))
            delay = parts.pop(_DELAY_KEY, None)
            if len(parts) > MAX_EVENTS:
                raise ProtocolError(f"a demand for {len(parts)} events is over the limit of {MAX_EVENTS}")
            known = {Event(name): msgspec.convert(part, _Part) for name, part in parts.items() if _is_known(name)}
            return cls._of({event: part.read(event) for event, part in known.items()}, delay)
        except (msgspec.ValidationError, ConfigurationError, RecursionError) as error:
            raise ProtocolError(f"malformed demand: {str(error)[:150]}") from None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Demand):
            return NotImplemented
        return (self._by_event, self.max_delay) == (other._by_event, other.max_delay)

    def __hash__(self) -> int:
        return hash(self.events)

    def __bool__(self) -> bool:
        return bool(self._by_event)

    def __repr__(self) -> str:
        return f"Demand.from_wire({self.to_wire()!r})"


def _is_known(name: Any) -> bool:
    try:
        Event(name)
    except (ConfigurationError, TypeError):
        return False
    return True


def barrier_events_of(callbacks: Iterable[Any]) -> set[Event]:
    """Return the callbacks' ``barrier_events``. Raises ConfigurationError if one does not handle its events."""
    events: set[Event] = set()
    for callback in callbacks:
        barrier_events = {Event(event) for event in getattr(callback, "barrier_events", ())}
        if unhandled := sorted(event.value for event in barrier_events - callback.demand().events):
            raise ConfigurationError(
                f"callback {type(callback).__name__} has {', '.join(unhandled)} in barrier_events and does "
                "not handle it: add the method, or correct barrier_events"
            )
        events |= barrier_events
    return events


def _is_field_name(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_FIELD_NAME and value.isidentifier()


_EveryOnWire: TypeAlias = Annotated[list[int | str], msgspec.Meta(max_length=MAX_INTERVALS)]


class _Part(msgspec.Struct):
    every: _EveryOnWire = msgspec.field(default_factory=lambda: [1])
    fields: Annotated[dict[str, _EveryOnWire], msgspec.Meta(max_length=MAX_FIELDS)] = {}

    def read(self, event: Event) -> _EventIntervals:
        if not all(self.fields.values()) or not (self.every or self.fields):
            raise ConfigurationError(f"no interval for {event.value} or one of its fields")
        for name in self.fields:
            if not _is_field_name(name):
                raise ConfigurationError(f"{name!r} cannot be the name of a field")
        return _EventIntervals.check(event, self.every, self.fields)


class ConsumerProgress(NamedTuple):
    """Progress of a consumer that has barrier events or borrows memory."""

    name: str | None
    barrier_events: frozenset[str]  # events at which it may decide to stop the training
    fields: frozenset[str]  # the fields on demand that it requests
    handled: Mapping[int, int]

    def to_wire(self, rank: int) -> list[Any]:
        return [self.name, sorted(self.barrier_events), sorted(self.fields), self.handled.get(rank, 0)]

    @classmethod
    def from_wire(cls, wire: Any, rank: int) -> "ConsumerProgress":
        """Read the form that :meth:`to_wire` returns. Raises ProtocolError for any other."""
        try:
            name, barrier_events, fields, handled = wire[:4]
            return cls(
                None if name is None else str(name), frozenset(barrier_events), frozenset(fields), {rank: int(handled)}
            )
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"invalid position of a consumer: {error}") from None
