"""What consumers report to a broker: their demand, as leases that expire, and the progress of each."""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from offloop.bus.errors import BrokerError, ProtocolError
from offloop.bus.types.consumers import ConsumerProgress
from offloop.bus.types.demand import MAX_EVENTS, Demand
from offloop.bus.types.event import Event
from offloop.bus.types.timeouts import Timeouts

MAX_LEASES = 4096
MAX_NAME = 100
MAX_NUMBER = 1 << 63
MAX_RANKS = 1 << 12

_EVENTS = frozenset(event.value for event in Event)
_log = logging.getLogger("offloop.broker")


class _Lease(NamedTuple):
    until: float
    demand: Demand
    name: str | None
    report: Mapping[str, float]


class Leases:
    """The demands of a run's consumers, each for ``seconds`` after its last renewal. Times are seconds of one steady
    clock.

    At most ``MAX_LEASES`` run at a time, and together they ask for no more than one demand can say on the wire: what
    is merged can be sent on, whatever consumers send."""

    def __init__(self, seconds: float = Timeouts.lease) -> None:
        self._seconds = seconds
        self._leases: dict[bytes | int, _Lease] = {}
        self._merged = Demand()
        self._is_stale = False

    def renew(
        self,
        consumer: bytes | int,
        demand: Demand,
        now: float,
        name: object = None,
        report: Mapping[str, float] | None = None,
    ) -> None:
        """Records the demand of ``consumer`` from now on, and what it says of itself in numbers. Its name, as it came
        from the wire, is kept if it is text, cut to 100 characters.

        Raises :class:`offloop.bus.errors.BrokerError` when there are too many leases, or too much is requested by all
        of them together; what this consumer had leased before stays then until it ends."""
        lease = self._leases.get(consumer)
        if lease is None:
            self._forget_ended(now)
        if lease is None and len(self._leases) >= MAX_LEASES:
            raise BrokerError(
                f"{MAX_LEASES} consumers have requested events of this run, which is as many as may: end some of them"
            )
        if lease is None or lease.demand != demand:
            others = [one.demand for key, one in self._leases.items() if key != consumer]
            # Without a lease that goes, the merged demand needs no merging again.
            merged = Demand.merge([self.merged(now), demand] if lease is None else [*others, demand])
            _check_size(merged)
            self._merged, self._is_stale = merged, False
        kept = name[:MAX_NAME] if isinstance(name, str) else None
        self._leases[consumer] = _Lease(now + self._seconds, demand, kept, report or {})

    def hold(self, rank: int, demand: Demand, now: float) -> None:
        """Keeps what a rank publishes already, because a broker before this one reported it: until that lease
        ends the consumers that request it come again. It is left out where it does not fit beside what they
        request."""
        try:
            self.renew(rank, demand, now)
        except BrokerError as error:
            _log.warning("what rank %d publishes for consumers is not kept until they come again: %s", rank, error)

    def merged(self, now: float) -> Demand:
        """The merged demand of all consumers; leases that have run out are forgotten."""
        self._forget_ended(now)
        if self._is_stale:
            self._merged = Demand.merge(lease.demand for lease in self._leases.values())
            self._is_stale = False
        return self._merged

    def describe(self, now: float) -> list[dict[str, Any]]:
        """The ``name`` of each consumer whose lease runs, ``None`` for one without, the ``events`` that it requests,
        and what it last said of itself: plain values, for people to read."""
        self._forget_ended(now)
        return [
            {"name": lease.name, "events": sorted(event.value for event in lease.demand.events), **lease.report}
            for consumer, lease in self._leases.items()
            if isinstance(consumer, bytes)
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
            f"all consumers of this run together request too much ({error}): request fewer fields or intervals"
        ) from None


class ConsumerTable:
    """What the consumers of a run have said of themselves, each for as long as its lease lasts. Times are seconds of
    one steady clock."""

    def __init__(self, world_size: int, seconds: float = Timeouts.lease) -> None:
        self._seconds = seconds
        self._world_size = world_size
        self._consumers: dict[bytes, tuple[float, ConsumerProgress]] = {}
        self.version = 0
        """Changes whenever who is there does, or what one of them requests, or its barrier events."""

    def renew(self, consumer: bytes, lease: Mapping[str, Any], fields: frozenset[str], now: float) -> bool:
        """Takes the ``name``, ``barrier_events`` and ``handled`` of a lease that requests these ``fields``; returns
        whether any of it is news.

        Raises ValueError or TypeError for what is malformed."""
        name = lease.get("name")
        barrier_events = lease.get("barrier_events") or ()
        if len(barrier_events) > MAX_EVENTS:
            raise ValueError(f"more than {MAX_EVENTS} events")
        progress = ConsumerProgress(
            name[:MAX_NAME] if isinstance(name, str) else None,
            frozenset(one for one in barrier_events if isinstance(one, str) and one in _EVENTS),
            fields,
            self._numbers(lease.get("handled", [])),
        )
        before = self._consumers.get(consumer)
        if not (progress.barrier_events or progress.fields):
            if before is not None:
                self._forget(consumer)
            return before is not None
        if before is None and len(self._consumers) >= MAX_LEASES:
            raise ValueError(f"{MAX_LEASES} consumers are there already")
        self._consumers[consumer] = now + self._seconds, progress
        if before is None or before[1]._replace(handled={}) != progress._replace(handled={}):
            self.version += 1
        return before is None or before[1] != progress

    def note_handled(self, consumer: bytes, handled: Any) -> None:
        """Takes how far a consumer is; one that is not known says so with its next ``lease``."""
        reported = self._numbers(handled)
        known = self._consumers.get(consumer)
        if known is not None:
            numbers = {**known[1].handled, **reported}
            if len(numbers) > MAX_RANKS:
                raise ValueError(f"more than {MAX_RANKS} ranks")
            self._consumers[consumer] = known[0], known[1]._replace(handled=numbers)

    def forget_ended(self, now: float, is_there: Callable[[bytes], bool]) -> None:
        """Forgets consumers whose lease has expired or whose connection is gone: one that was killed must not keep
        borrowed memory until its lease expires."""
        for consumer, (until, _) in tuple(self._consumers.items()):
            if until <= now or not is_there(consumer):
                self._forget(consumer)

    def to_wire(self, rank: int, only: Iterable[bytes] | None = None) -> dict[str, list[Any]]:
        """What a publisher of that rank is to know."""
        chosen = self._consumers if only is None else [one for one in only if one in self._consumers]
        return {consumer.hex(): self._consumers[consumer][1].to_wire(rank) for consumer in chosen}

    def _forget(self, consumer: bytes) -> None:
        del self._consumers[consumer]
        self.version += 1

    def _numbers(self, handled: Any) -> dict[int, int]:
        """Of each rank the number that was reported, from pairs of both."""
        if type(handled) is not list or len(handled) > MAX_RANKS:
            raise ValueError(f"'handled' has to be an array of at most {MAX_RANKS} pairs [rank, seq]")
        numbers = {}
        for pair in handled:
            if type(pair) is not list or len(pair) < 2 or type(pair[0]) is not int or type(pair[1]) is not int:
                raise ValueError(f"{str(pair)[:40]!r} in 'handled' is not a pair of integers [rank, seq]")
            rank, number = pair[:2]
            if not (0 <= rank < self._world_size and 0 <= number < MAX_NUMBER):
                raise ValueError(
                    f"[{rank}, {number}] in 'handled': ranks go from 0 to {self._world_size - 1}, numbers from 0"
                )
            numbers[rank] = number
        return numbers
