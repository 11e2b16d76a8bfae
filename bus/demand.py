"""Which events are published: the base set always, further ones while a consumer wants them."""

from collections.abc import Iterable

from bus.event import Event

__all__ = ["BASE_EVENTS", "LEASE_SECONDS", "RENEW_SECONDS", "Leases"]

LEASE_SECONDS = 5.0
RENEW_SECONDS = 1.0

_INNER_EVENTS = {
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
    Event.BATCH_CHECKPOINT,
    Event.EVAL_BATCH_START,
    Event.EVAL_BEFORE_FORWARD,
    Event.EVAL_AFTER_FORWARD,
    Event.EVAL_BATCH_END,
    Event.PREDICT_BATCH_START,
    Event.PREDICT_BEFORE_FORWARD,
    Event.PREDICT_AFTER_FORWARD,
    Event.PREDICT_BATCH_END,
}

BASE_EVENTS: frozenset[Event] = frozenset(Event) - _INNER_EVENTS
"""The events that are always published and recorded, so that whoever comes late still has a complete history. The
others fire several times a batch, or once in each batch beside BATCH_END: they are published while somebody wants
them."""


class Leases:
    """What the consumers of a run want, each for as long as it keeps saying so. Times are seconds of one steady
    clock."""

    def __init__(self) -> None:
        self._leases: dict[bytes, tuple[float, frozenset[str]]] = {}

    def renew(self, consumer: bytes, events: Iterable[str], now: float) -> None:
        """Notes that ``consumer`` wants ``events``, from now for :data:`LEASE_SECONDS`."""
        self._leases[consumer] = (now + LEASE_SECONDS, frozenset(events))

    def merged(self, now: float) -> frozenset[str]:
        """Everything that somebody wants; leases that have run out are forgotten."""
        self._leases = {consumer: lease for consumer, lease in self._leases.items() if lease[0] > now}
        return frozenset().union(*(events for _, events in self._leases.values()))
