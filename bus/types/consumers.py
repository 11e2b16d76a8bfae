"""The progress of each consumer of a live run, for trainers that wait for one or lend it memory."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from offloop.bus.errors import ProtocolError


class ConsumerProgress(NamedTuple):
    """A consumer that a publisher has to know: it has barrier events, or borrows memory."""

    name: str | None
    barrier_events: frozenset[str]
    """The events at which it may decide to stop the training."""
    fields: frozenset[str]
    """The fields beyond the usual ones that it asks for."""
    handled: Mapping[int, int]
    """The number of the last handled event of each rank."""

    def to_wire(self, rank: int) -> list[Any]:
        """The form in which it is reported to a publisher of that rank."""
        return [self.name, sorted(self.barrier_events), sorted(self.fields), self.handled.get(rank, 0)]

    @classmethod
    def from_wire(cls, wire: Any, rank: int) -> "ConsumerProgress":
        """Reads :meth:`to_wire`. Raises ProtocolError for anything else."""
        try:
            name, barrier_events, fields, handled = wire[:4]
            return cls(
                None if name is None else str(name), frozenset(barrier_events), frozenset(fields), {rank: int(handled)}
            )
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"invalid position of a consumer: {error}") from None
