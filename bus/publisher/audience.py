"""What consumers request of one rank, and how far they are, as the broker reports it."""

import logging
from collections.abc import Collection, Iterable
from typing import Any

from offloop.bus.errors import ProtocolError
from offloop.bus.types.demand import ConsumerProgress, Demand
from offloop.bus.types.event import Event

_log = logging.getLogger("offloop")

UNNAMED = "a consumer without a name"


class Audience:
    """The consumers of a run and their demand.

    Args:
        run_name: for messages.
        rank: the rank that publishes.
        always: events that are published in any case.
    """

    def __init__(self, run_name: str, rank: int, always: Iterable[Event]) -> None:
        self._run_name = run_name
        self._rank = rank
        self.always = frozenset(always)
        self.requested_events: set[Event] = set(self.always)
        """The events to publish now; changed in place."""
        self.demand = Demand()
        """The merged demand of all consumers, without its delay."""
        self.version = 0
        """A number that changes whenever :attr:`demand` does."""
        self.max_delay: float | None = None
        """The shortest delay in seconds that consumers request."""
        self.expected: set[str] = set()
        """Names of consumers that are waited for to come, and have not come yet."""
        self._consumers: dict[str, ConsumerProgress] = {}

    @property
    def consumers(self) -> Collection[ConsumerProgress]:
        """The consumers that have barrier events or request further fields."""
        return self._consumers.values()

    def update(self, report: dict[str, Any]) -> None:
        """Takes in a broker's report: ``demand`` and all consumers, or those that have come further."""
        try:
            reported = report.get("consumers", {}).items()
            consumers = {key: ConsumerProgress.from_wire(one, self._rank) for key, one in reported}
        except (ProtocolError, AttributeError) as error:
            _log.warning("run %s: what the broker says of consumers is malformed: %s", self._run_name, error)
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
        """Every consumer that requests a field has handled the event of that number."""
        return all(one.handled[self._rank] >= seq for one in self.consumers if field in one.fields)

    def late(self, event: Event, names: Collection[str] | None, seq: int) -> set[str]:
        """The names of the consumers with that barrier event, of these or of all, that have not handled the event of
        that number."""
        return {
            one.name or UNNAMED
            for one in self.consumers
            if event.value in one.barrier_events
            and one.handled[self._rank] < seq
            and (names is None or (one.name or UNNAMED) in names)
        }
