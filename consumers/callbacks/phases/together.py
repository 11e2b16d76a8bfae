"""Reports of several sources about the same batches, brought together."""

from collections.abc import Callable, Collection, Hashable
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

Place: TypeAlias = tuple[int, int]
"""How often the batches had been counted from zero again, and the number of a batch: later ones are greater."""

T = TypeVar("T")


class Together(Generic[T]):
    """Brings together what ranks or hosts report of the same batches.

    The batches before ``fit(reset_time=True)`` are told from those after it by a lower number at a later time of the
    same source: no two clocks are compared. When more than ``most_open`` batches wait for reports, the oldest waits no
    longer.
    """

    def __init__(self, most_open: int) -> None:
        self.open: dict[Place, dict[Hashable, T]] = {}
        """The batches that wait for reports, each with those that have come by source."""
        self._most_open = most_open
        self._newest: dict[Hashable, tuple[int, int, int]] = {}
        self._settled: Place = 0, 0

    def add(
        self, source: Hashable, batch: int, time_ns: int, report: T | None, is_all: Callable[[Collection[T]], bool]
    ) -> list[tuple[int, dict[Hashable, T]]]:
        """Add a report of a batch that ended at that time, ``None`` for one without a measurement; ``is_all`` decides
        whether the reports of a batch are complete. Return what :meth:`settle` does."""
        restarts, newest, before_ns = self._newest.get(source, (self._settled[0], -1, 0))
        if batch > newest or time_ns > before_ns:
            restarts += batch <= newest
            self._newest[source] = restarts, batch, time_ns
        place = restarts, batch
        if report is None or place <= self._settled:
            return []
        together = self.open.setdefault(place, {})
        together.setdefault(source, report)
        if is_all(together.values()):
            return self.settle(place)
        return self.settle(min(self.open)) if len(self.open) > self._most_open else []

    def settle(self, until: Place) -> list[tuple[int, dict[Hashable, T]]]:
        """Remove the batches up to that one; return their numbers and reports in order."""
        self._settled = until
        return [(place[1], self.open.pop(place)) for place in sorted(self.open) if place <= until]

    def state_dict(self) -> dict[str, Any]:
        """The open batches and the place of each source, as plain values."""
        return {
            "open": [[*place, *one] for place, reports in self.open.items() for one in reports.items()],
            "newest": [[source, *newest] for source, newest in self._newest.items()],
            "settled": list(self._settled),
        }

    def load_state_dict(self, state: dict[str, Any], kind: type[T]) -> None:
        """Resume from a state with reports of that kind."""
        for restarts, batch, source, report in state["open"]:
            self.open.setdefault((restarts, batch), {})[source] = msgspec.convert(report, kind)
        self._newest = {source: (restarts, batch, time_ns) for source, restarts, batch, time_ns in state["newest"]}
        restarts, batch = state["settled"]
        self._settled = restarts, batch
