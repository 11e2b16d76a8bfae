"""Demand and progress of the consumers of one rank, as the broker reports them."""

import logging
from collections.abc import Collection, Iterable
from typing import Any

from offloop.bus.errors import ProtocolError
from offloop.bus.types.demand import ConsumerProgress, Demand
from offloop.bus.types.event import Event

_log = logging.getLogger("offloop")

UNNAMED = "a consumer without a name"


class Audience:
    """The consumers of a run and their demand. ``always`` are the events published in any case."""

    def __init__(self, run_name: str, rank: int, always: Iterable[Event]) -> None:
        self._run_name = run_name
        self._rank = rank
        self.always: frozenset[Event] = frozenset(always)
        self.requested_events: set[Event] = set(self.always)  # events to publish now, changed in place
        self.demand: Demand = Demand()  # merged demand of all consumers, without its delay
        self.version: int = 0  # changes whenever ``demand`` does
        self.max_delay: float | None = None  # shortest delay that a consumer requests, in seconds
        self.expected: set[str] = set()  # names of consumers that are awaited and have not joined yet
        self._consumers: dict[str, ConsumerProgress] = {}

    @property
    def consumers(self) -> Collection[ConsumerProgress]:
        return self._consumers.values()

    def update(self, report: dict[str, Any]) -> None:
        """Apply a broker's report: the demand and all consumers, or only the consumers that advanced."""
        try:
            reported = report.get("consumers", {}).items()
            consumers = {key: ConsumerProgress.from_wire(one, self._rank) for key, one in reported}
        except (ProtocolError, AttributeError) as error:
            _log.warning("run %s: the broker's report about consumers is malformed: %s", self._run_name, error)
        else:
            self._consumers = consumers if "demand" in report else {**self._consumers, **consumers}
            self.expected.difference_update(one.name for one in consumers.values() if one.name is not None)
        if "demand" in report:
            try:
                self._meet(Demand.from_wire(report["demand"] or {}))
            except ProtocolError as error:
                _log.warning("run %s: the demand that the broker sent is malformed: %s", self._run_name, error)

    def _meet(self, demand: Demand) -> None:
        self.max_delay, demand = demand.max_delay, demand.content
        if demand != self.demand:
            self.demand = demand
            self.version += 1
            self.requested_events &= self.always | demand.events
            self.requested_events |= demand.events

    def has_handled(self, seq: int, field: str) -> bool:
        return all(one.handled[self._rank] >= seq for one in self.consumers if field in one.fields)

    def late(self, event: Event, names: Collection[str] | None, seq: int) -> set[str]:
        """Return the names of consumers that have not handled this barrier event; ``None`` as names means all."""
        return {
            one.name or UNNAMED
            for one in self.consumers
            if event.value in one.barrier_events
            and one.handled[self._rank] < seq
            and (names is None or (one.name or UNNAMED) in names)
        }
