"""Which batches come after which, of a training whose batches may be counted from zero again."""

from collections.abc import Hashable
from typing import Any, TypeAlias

Place: TypeAlias = tuple[int, int]
"""How often the batches had been counted from zero again, and the number of a batch: later ones are greater."""


class Restarts:
    """Tells the batches before ``fit(reset_time=True)`` from those after it, by what each rank or host says in its own
    order: a lower number at a later time, of its own clock. No two clocks are compared."""

    def __init__(self) -> None:
        self._newest: dict[Hashable, tuple[int, int, int]] = {}

    def place(self, source: Hashable, batch: int, time_ns: int, first: Place) -> Place:
        """The place of a batch that ended then; ``first`` is that of what a ``source`` new to this may say at the
        earliest."""
        restarts, newest, before_ns = self._newest.get(source, (first[0], -1, 0))
        if batch > newest or time_ns > before_ns:
            restarts += batch <= newest
            self._newest[source] = restarts, batch, time_ns
        return restarts, batch

    def state_dict(self) -> list[list[Any]]:
        """Where each is, as plain values."""
        return [[source, *newest] for source, newest in self._newest.items()]

    def load_state_dict(self, state: list[list[Any]]) -> None:
        """Takes up what :meth:`state_dict` gave."""
        self._newest = {source: (restarts, batch, time_ns) for source, restarts, batch, time_ns in state}
