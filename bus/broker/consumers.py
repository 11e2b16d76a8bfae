"""Consumers of a run: their demand, as leases that expire, and their progress."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offloop.bus.errors import BrokerError, ProtocolError
from offloop.bus.types.demand import ConsumerProgress, Demand
from offloop.bus.types.event import Event

LEASE_SECONDS = 5.0  # lifetime of a demand that is not renewed

_EVENTS = frozenset(event.value for event in Event)


@dataclass
class _Lease:
    until: float
    demand: Demand
    name: str | None
    report: Mapping[str, float]
    progress: ConsumerProgress | None = None  # ``None`` for a consumer without barrier events and requested fields


class Consumers:
    """Consumers of a run by connection. Their merged demand always fits into one message. Times are monotonic."""

    def __init__(self) -> None:
        self._leases: dict[bytes | int, _Lease] = {}
        self._merged = Demand()
        self._is_stale = False
        self.version: int = 0  # changes whenever publishers must learn of other consumers, fields or barrier events

    def renew(
        self,
        consumer: bytes | int,
        demand: Demand,
        now: float,
        name: str | None = None,
        *,
        barrier_events: Iterable[Any] = (),
        handled: Sequence[tuple[int, int]] = (),
        report: Mapping[str, float] | None = None,
    ) -> bool:
        """Record a consumer's demand and report; return whether publishers must learn of it.

        ``consumer`` may be a rank, which holds the demand that it had from a previous broker. If all consumers together
        demand too much, BrokerError is raised and this consumer's previous demand stays."""
        lease = self._leases.get(consumer)
        if lease is None or lease.demand != demand:
            others = [one.demand for key, one in self._leases.items() if key != consumer]
            # A new lease only adds to the merged demand.
            merged = Demand.merge([self.merged(now), demand] if lease is None else [*others, demand])
            try:
                Demand.from_wire(merged.to_wire())
            except ProtocolError as error:
                raise BrokerError(
                    f"all consumers of this run together request too much ({error}): request fewer fields or intervals"
                ) from None
            self._merged, self._is_stale = merged, False
        progress = ConsumerProgress(
            name,
            frozenset(one for one in barrier_events if isinstance(one, str) and one in _EVENTS),
            demand.fields,
            dict(handled),
        )
        before = None if lease is None else lease.progress
        known = progress if progress.barrier_events or progress.fields else None
        self._leases[consumer] = _Lease(now + LEASE_SECONDS, demand, name, report or {}, known)
        if _lasting(before) != _lasting(known):
            self.version += 1
        return before != known

    def merged(self, now: float) -> Demand:
        self._forget_expired(now)
        if self._is_stale:
            self._merged = Demand.merge(lease.demand for lease in self._leases.values())
            self._is_stale = False
        return self._merged

    def describe(self, now: float) -> list[dict[str, Any]]:
        self._forget_expired(now)
        return [
            {"name": lease.name, "events": sorted(event.value for event in lease.demand.events), **lease.report}
            for consumer, lease in self._leases.items()
            if isinstance(consumer, bytes)
        ]

    def note_handled(self, consumer: bytes, handled: Sequence[tuple[int, int]]) -> None:
        lease = self._leases.get(consumer)
        if lease is not None and lease.progress is not None:
            lease.progress = lease.progress._replace(handled={**lease.progress.handled, **dict(handled)})

    def forget_gone(self, is_there: Callable[[bytes], bool]) -> None:
        """Forget the progress of disconnected consumers: they must not keep borrowed memory for a whole lease."""
        for consumer, lease in self._leases.items():
            if isinstance(consumer, bytes) and lease.progress is not None and not is_there(consumer):
                lease.progress = None
                self.version += 1

    def to_wire(self, rank: int, only: Iterable[bytes] | None = None) -> dict[str, list[Any]]:
        return {
            consumer.hex(): lease.progress.to_wire(rank)
            for consumer, lease in self._leases.items()
            if isinstance(consumer, bytes) and lease.progress is not None and (only is None or consumer in only)
        }

    def _forget_expired(self, now: float) -> None:
        for consumer in [key for key, lease in self._leases.items() if lease.until <= now]:
            if self._leases.pop(consumer).progress is not None:
                self.version += 1
            self._is_stale = True


def _lasting(progress: ConsumerProgress | None) -> ConsumerProgress | None:
    return None if progress is None else progress._replace(handled={})
