"""What is published: the base set always, further events and fields while a consumer wants them and as often as it
does."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from bus.errors import BrokerError, ConfigurationError, ProtocolError
from bus.event import Event

__all__ = [
    "BASE_EVENTS",
    "LEASE_SECONDS",
    "RENEW_SECONDS",
    "Demand",
    "Leases",
    "Want",
    "batch_number",
]

LEASE_SECONDS = 5.0
RENEW_SECONDS = 1.0

MAX_EVENTS = 40
MAX_FIELDS = 64
MAX_FIELD_NAME = 100
MAX_INTERVALS = 64
MAX_INTERVAL = 2**31
MAX_LEASES = 4096
_MAX_NAME = 100

_BATCH = 2
_BEFORE_STEP = {
    Event.BEFORE_DATALOADER,
    Event.AFTER_DATALOADER,
    Event.BATCH_START,
    Event.BEFORE_TRAIN_BATCH,
    Event.BEFORE_FORWARD,
    Event.AFTER_FORWARD,
    Event.BEFORE_LOSS,
    Event.AFTER_LOSS,
    Event.BEFORE_BACKWARD,
    Event.AFTER_BACKWARD,
    Event.AFTER_TRAIN_BATCH,
}
_BEFORE_EVAL_BATCH_END = {Event.EVAL_BATCH_START, Event.EVAL_BEFORE_FORWARD, Event.EVAL_AFTER_FORWARD}
_BEFORE_PREDICT_BATCH_END = {Event.PREDICT_BATCH_START, Event.PREDICT_BEFORE_FORWARD, Event.PREDICT_AFTER_FORWARD}

# For each event of a batch: by which of the three timestamps its batch is counted (training, evaluation, prediction),
# and what is to be added because that timestamp does not count it yet.
_COUNTED_BY: dict[Event, tuple[int, int]] = {
    **dict.fromkeys(_BEFORE_STEP, (0, 1)),
    Event.BATCH_END: (0, 0),
    Event.BATCH_CHECKPOINT: (0, 0),
    **dict.fromkeys(_BEFORE_EVAL_BATCH_END, (1, 1)),
    Event.EVAL_BATCH_END: (1, 0),
    **dict.fromkeys(_BEFORE_PREDICT_BATCH_END, (2, 1)),
    Event.PREDICT_BATCH_END: (2, 0),
}

BASE_EVENTS: frozenset[Event] = frozenset(Event) - (_COUNTED_BY.keys() - {Event.BATCH_END})
"""The events that are always published and recorded, so that whoever comes late still has a complete history. The
others fire several times a batch, or once in each batch beside BATCH_END: they are published while somebody wants
them."""


def batch_number(
    event: Event,
    timestamp: Sequence[int],
    eval_timestamp: Sequence[int] | None = None,
    predict_timestamp: Sequence[int] | None = None,
) -> int:
    """Which batch an event belongs to, from 1; 0 for one that belongs to none, such as EPOCH_END.

    The timestamps are the values of :class:`~bus.time.Timestamp` at the event, ``None`` for all zero. Batches of an
    evaluation or a prediction are counted by its own."""
    counted_by = _COUNTED_BY.get(event)
    if counted_by is None:
        return 0
    which, ahead = counted_by
    values = (timestamp, eval_timestamp, predict_timestamp)[which]
    return (values[_BATCH] if values is not None else 0) + ahead


@dataclass(frozen=True)
class Want:
    """What somebody wants of one event.

    ``every`` is how often: 10 stands for the batches 10, 20, ... of the training (or of the evaluation or prediction
    that the event belongs to). Base events, and events that belong to no batch, come every time. ``fields`` names
    further fields and how often each: one that is due brings its event with it.

    Raises :class:`bus.errors.ConfigurationError` for an interval below 1 or a field that cannot have that name."""

    every: int = 1
    fields: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for what, interval in (("every", self.every), *((f"every of field {n!r}", e) for n, e in self.fields.items())):
            if not _is_interval(interval):
                raise ConfigurationError(
                    f"{what} is {interval!r}: it counts batches, use a whole number from 1 to {MAX_INTERVAL}"
                )
        for name in self.fields:
            if not _is_field_name(name):
                raise ConfigurationError(
                    f"{name!r} cannot be the name of a field: use an identifier of at most {MAX_FIELD_NAME} characters"
                )
        if len(self.fields) > MAX_FIELDS:
            raise ConfigurationError(
                f"{len(self.fields)} fields are wanted of one event: ask for {MAX_FIELDS} at most, or one that is a map"
            )


_Intervals = frozenset[int]
_EVERY_BATCH: _Intervals = frozenset({1})


class _Wanted(NamedTuple):
    """The wants of an event, merged: every so many batches it is due, and so are its fields."""

    intervals: _Intervals
    fields: Mapping[str, _Intervals]


class Demand:
    """Which events and further fields are wanted, and how often each. Immutable.

    Intervals are kept apart when demands are merged: two consumers that want every 10th and every 15th batch cause 10,
    15, 20, 30, ... and no more. Demands that cause the same are equal.
    """

    __slots__ = ("_wanted",)
    _wanted: Mapping[Event, _Wanted]

    def __init__(self, wants: Mapping[Event, Want] | None = None) -> None:
        self._wanted = {
            event: _wanted(event, {want.every}, {name: {every} for name, every in want.fields.items()})
            for event, want in (wants or {}).items()
        }

    @classmethod
    def of(cls, events: Iterable[Event]) -> "Demand":
        """A demand for events at every batch, without further fields."""
        return cls(dict.fromkeys(events, Want()))

    @classmethod
    def merge(cls, demands: Iterable["Demand"]) -> "Demand":
        """A demand that is due exactly when one of these is."""
        intervals: dict[Event, set[int]] = {}
        fields: dict[Event, dict[str, set[int]]] = {}
        for demand in demands:
            for event, wanted in demand._wanted.items():
                intervals.setdefault(event, set()).update(wanted.intervals)
                of_event = fields.setdefault(event, {})
                for name, every in wanted.fields.items():
                    of_event.setdefault(name, set()).update(every)
        return cls._of({event: _wanted(event, every, fields[event]) for event, every in intervals.items()})

    @classmethod
    def _of(cls, wanted: Mapping[Event, _Wanted]) -> "Demand":
        demand = cls()
        demand._wanted = wanted
        return demand

    @property
    def events(self) -> frozenset[Event]:
        """The events that are wanted at all."""
        return frozenset(self._wanted)

    def is_due(self, event: Event, number: int) -> bool:
        """Whether an event is wanted at a batch, by its :func:`batch_number`."""
        wanted = self._wanted.get(event)
        return wanted is not None and _divides(wanted.intervals, number)

    def due_fields(self, event: Event, number: int) -> tuple[str, ...]:
        """The further fields that are wanted of an event at a batch, by its :func:`batch_number`."""
        wanted = self._wanted.get(event)
        if wanted is None:
            return ()
        return tuple(name for name, intervals in wanted.fields.items() if _divides(intervals, number))

    def is_always_same(self, event: Event) -> bool:
        """Whether an event that is wanted is so at every batch and without further fields: then nothing has to be
        counted."""
        wanted = self._wanted[event]
        return not wanted.fields and wanted.intervals == _EVERY_BATCH

    def to_wire(self) -> dict[str, Any]:
        """As it travels: event to ``every``, a list of intervals, and ``fields``, a map of name to such lists."""
        return {
            event.value: {
                "every": sorted(wanted.intervals),
                "fields": {name: sorted(intervals) for name, intervals in wanted.fields.items()},
            }
            for event, wanted in self._wanted.items()
        }

    @classmethod
    def from_wire(cls, value: Any) -> "Demand":
        """Reads :meth:`to_wire`. Events that are not known are skipped.

        Raises :class:`bus.errors.ProtocolError` for anything else, and for more than the limits of this module."""
        names = _bounded(value, MAX_EVENTS, "events")
        parts = {Event(name): names[name] for name in names if name in _NAMES}
        return cls._of({event: _read(event, part) for event, part in parts.items()})

    def __eq__(self, other: object) -> bool:
        return self._wanted == other._wanted if isinstance(other, Demand) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.events)

    def __bool__(self) -> bool:
        return bool(self._wanted)

    def __repr__(self) -> str:
        return f"Demand.from_wire({self.to_wire()!r})"


_NAMES = {event.value for event in Event}


def _wanted(event: Event, intervals: Iterable[int], fields: Mapping[str, Iterable[int]]) -> _Wanted:
    own = {name: _fewest(every) for name, every in fields.items()}
    if event in BASE_EVENTS:
        return _Wanted(_EVERY_BATCH, MappingProxyType(own))
    return _Wanted(_fewest({*intervals, *(one for every in own.values() for one in every)}), MappingProxyType(own))


def _fewest(intervals: Iterable[int]) -> _Intervals:
    """The intervals without those that are multiples of another one: they add nothing."""
    fewest: list[int] = []
    for interval in sorted(set(intervals)):
        if not _divides(fewest, interval):
            fewest.append(interval)
    return frozenset(fewest)


def _divides(intervals: Iterable[int], number: int) -> bool:
    return any(number % interval == 0 for interval in intervals)


def _is_interval(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MAX_INTERVAL


def _is_field_name(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_FIELD_NAME and value.isidentifier()


def _read(event: Event, part: Any) -> _Wanted:
    if not isinstance(part, dict):
        raise ProtocolError(f"the demand for {event.value} is a {type(part).__name__}, not a map of every and fields")
    fields = _bounded(part.get("fields", {}), MAX_FIELDS, "fields")
    for name in fields:
        if not _is_field_name(name):
            raise ProtocolError(f"the demand for {event.value} has a field of a name that none can have")
    return _wanted(
        event,
        _read_intervals(event, part.get("every", [1])),
        {name: _read_intervals(event, every) for name, every in fields.items()},
    )


def _bounded(value: Any, limit: int, what: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise ProtocolError(f"the {what} of a demand are a {type(value).__name__}, not a map")
    if len(value) > limit:
        raise ProtocolError(f"a demand for {len(value)} {what} is over the limit of {limit}")
    return value


def _read_intervals(event: Event, value: Any) -> list[int]:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_INTERVALS or not all(map(_is_interval, value)):
        raise ProtocolError(
            f"the demand for {event.value} has intervals that are not a list of 1 to {MAX_INTERVALS} whole numbers "
            f"from 1 to {MAX_INTERVAL}"
        )
    return value


class _Lease(NamedTuple):
    until: float
    demand: Demand
    name: str | None
    report: Mapping[str, float]


class Leases:
    """What the consumers of a run want, each for as long as it keeps saying so. Times are seconds of one steady
    clock.

    At most ``MAX_LEASES`` run at a time, and together they ask for no more than one demand can say on the wire: what
    is merged can be sent on, whatever consumers send."""

    def __init__(self) -> None:
        self._leases: dict[bytes, _Lease] = {}
        self._merged = Demand()
        self._is_stale = False

    def renew(
        self,
        consumer: bytes,
        demand: Demand,
        now: float,
        name: object = None,
        report: Mapping[str, float] | None = None,
    ) -> None:
        """Notes what ``consumer`` wants from now on for :data:`LEASE_SECONDS`, and what it says of itself in numbers.
        Its name, as it came from the wire, is kept if it is text, cut to 100 characters.

        Raises :class:`bus.errors.BrokerError` when there are too many leases, or too much is wanted by all of them
        together; what this consumer had leased before goes on then until it ends."""
        lease = self._leases.get(consumer)
        if lease is None:
            self._forget_ended(now)
        if lease is None and len(self._leases) >= MAX_LEASES:
            raise BrokerError(
                f"{MAX_LEASES} consumers have told this run what they want, which is as many as may: end some of them"
            )
        if lease is None or lease.demand != demand:
            others = [one.demand for key, one in self._leases.items() if key != consumer]
            # Without a lease that goes, what there is needs no merging again.
            merged = Demand.merge([self.merged(now), demand] if lease is None else [*others, demand])
            _check_size(merged)
            self._merged, self._is_stale = merged, False
        kept = name[:_MAX_NAME] if isinstance(name, str) else None
        self._leases[consumer] = _Lease(now + LEASE_SECONDS, demand, kept, report or {})

    def merged(self, now: float) -> Demand:
        """Everything that somebody wants; leases that have run out are forgotten."""
        self._forget_ended(now)
        if self._is_stale:
            self._merged = Demand.merge(lease.demand for lease in self._leases.values())
            self._is_stale = False
        return self._merged

    def told(self, now: float) -> list[dict[str, Any]]:
        """The ``name`` of each consumer whose lease runs, ``None`` for one without, the ``events`` that it wants, and
        what it last said of itself: plain values, for people to read."""
        self._forget_ended(now)
        return [
            {"name": lease.name, "events": sorted(event.value for event in lease.demand.events), **lease.report}
            for lease in self._leases.values()
        ]

    def _forget_ended(self, now: float) -> None:
        for consumer in [key for key, lease in self._leases.items() if lease.until <= now]:
            del self._leases[consumer]
            self._is_stale = True


def _check_size(demand: Demand) -> None:
    try:
        Demand.from_wire(demand.to_wire())
    except ProtocolError as error:
        raise BrokerError(
            f"all consumers of this run together want too much ({error}): ask for fewer fields or intervals"
        ) from None
