"""How far each consumer of a live run has come, for trainers that wait for one or have lent it memory."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from bus.demand import LEASE_SECONDS, MAX_EVENTS, MAX_FIELDS, MAX_LEASES
from bus.errors import ProtocolError
from bus.event import Event

__all__ = ["Standing", "Standings"]

MAX_NAME = 100
MAX_NUMBER = 1 << 63
MAX_RANKS = 1 << 12

_EVENTS = frozenset(event.value for event in Event)


class Standing(NamedTuple):
    """A consumer that a publisher has to know of: it may decide something, or is handed memory."""

    name: str | None
    decides: frozenset[str]
    """The events at which it may decide to stop the training."""
    fields: frozenset[str]
    """The fields beyond the usual ones that it asks for."""
    handled: Mapping[int, int]
    """Of each rank the number of the last event that it is through with."""

    def to_wire(self, rank: int) -> list[Any]:
        """As a publisher of that rank is told it."""
        return [self.name, sorted(self.decides), sorted(self.fields), self.handled.get(rank, 0)]

    @classmethod
    def from_wire(cls, told: Any, rank: int) -> "Standing":
        """Reads :meth:`to_wire`.

        Raises :class:`bus.errors.ProtocolError` for anything else."""
        try:
            name, decides, fields, handled = told[:4]
            return cls(None if name is None else str(name), frozenset(decides), frozenset(fields), {rank: int(handled)})
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"how far a consumer is makes no sense: {error}") from None


class Standings:
    """What the consumers of a run have said of themselves, each for as long as its lease lasts. Times are seconds of
    one steady clock."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._standings: dict[bytes, tuple[float, Standing]] = {}
        self.version = 0
        """Changes whenever who is there does, or what somebody asks for or decides."""

    def renew(self, consumer: bytes, want: Mapping[str, Any], now: float) -> bool:
        """Takes what is in a ``want``: ``name``, ``decides``, the fields in ``demand``, and ``handled``; returns
        whether any of it is news.

        Raises ValueError or TypeError for what makes no sense."""
        name = want.get("name")
        fields = {field for part in want["demand"].values() for field in part.get("fields", ())}
        decides = want.get("decides") or ()
        if len(fields) > MAX_EVENTS * MAX_FIELDS or len(decides) > MAX_EVENTS:
            raise ValueError(f"more than {MAX_EVENTS} events")
        standing = Standing(
            name[:MAX_NAME] if isinstance(name, str) else None,
            frozenset(one for one in decides if isinstance(one, str) and one in _EVENTS),
            frozenset(fields),
            self._numbers(want.get("handled", [])),
        )
        before = self._standings.get(consumer)
        if not (standing.decides or standing.fields):
            if before is not None:
                self._forget(consumer)
            return before is not None
        if before is None and len(self._standings) >= MAX_LEASES:
            raise ValueError(f"{MAX_LEASES} consumers are there already")
        self._standings[consumer] = now + LEASE_SECONDS, standing
        if before is None or before[1]._replace(handled={}) != standing._replace(handled={}):
            self.version += 1
        return before is None or before[1] != standing

    def note_handled(self, consumer: bytes, handled: Any) -> None:
        """Takes how far a consumer is; one that is not known says so with its next ``want``."""
        told = self._numbers(handled)
        known = self._standings.get(consumer)
        if known is not None:
            numbers = {**known[1].handled, **told}
            if len(numbers) > MAX_RANKS:
                raise ValueError(f"more than {MAX_RANKS} ranks")
            self._standings[consumer] = known[0], known[1]._replace(handled=numbers)

    def forget_ended(self, now: float, is_there: Callable[[bytes], bool]) -> None:
        """Forgets whose lease has run out, and whose connection is gone: a consumer that was killed must not hold what
        it was lent until its lease runs out."""
        for consumer, (until, _) in tuple(self._standings.items()):
            if until <= now or not is_there(consumer):
                self._forget(consumer)

    def told(self, rank: int, only: Iterable[bytes] | None = None) -> dict[str, list[Any]]:
        """What a publisher of that rank is to know."""
        chosen = self._standings if only is None else [one for one in only if one in self._standings]
        return {consumer.hex(): self._standings[consumer][1].to_wire(rank) for consumer in chosen}

    def _forget(self, consumer: bytes) -> None:
        del self._standings[consumer]
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
