"""How much the fields may cost that consumers ask for who may only view."""

from collections.abc import Callable, Iterable, Mapping
from time import perf_counter_ns
from typing import Any

from offloop.bus.types.demand import Demand
from offloop.bus.types.event import Event
from offloop.bus.types.intervals import EventPosition

TIME_SHARE = 0.05
"""The part of the training's time that computing these fields may take."""
BYTES_PER_SECOND = 256 * 1024
"""How much of them may be sent, and recorded, in a second."""

_OVERHEAD = 9
_AT_THE_END = {Event.FIT_END, Event.EVAL_AFTER_ALL}


class FieldBudget:
    """Spreads what is computed so that it keeps to a share of the time and to a number of bytes a second.

    What was spent in a batch is waited for before the next batch in which something is computed; so the first
    computation, whatever it costs, is never refused. A batch is allowed or not as a whole, because fields that are
    watched for take work at several places in it.

    Args:
        clock: nanoseconds of a steady clock.
    """

    def __init__(self, clock: Callable[[], int] = perf_counter_ns) -> None:
        self.unlimited: Demand | None = None
        """What is asked for without a limit: by those who may command, and in any case; ``None`` while that is all."""
        self._clock = clock
        self._free_at = 0
        self._batch: object = None
        self._allowed = True

    def limited(
        self, event: Event, names: Iterable[str], overdue: Iterable[str], number: int, moment: EventPosition | None
    ) -> list[str]:
        """Those of the fields that are due or overdue at an event, that only consumers request that may not
        command."""
        # What comes once, after the last batch, delays none.
        if self.unlimited is None or event in _AT_THE_END:
            return []
        free = self.unlimited.due_fields(event, number, moment)
        limited = [name for name in overdue if not self.unlimited.has_field(event, name)]
        return list(dict.fromkeys([*(name for name in names if name not in free), *limited]))

    def may_compute(self, event: Event, name: str, number: int, moment: EventPosition) -> bool:
        """Whether a field that is due in the batch that is being trained on, by its number, is going to be computed."""
        return not self.limited(event, [name], (), number, moment) or self.allows((number, False, False))

    def allows(self, batch: object) -> bool:
        """Whether something may be computed in a batch, ``None`` for an event outside of batches."""
        if batch is None:
            return self._clock() >= self._free_at
        if batch != self._batch:
            self._batch, self._allowed = batch, self._clock() >= self._free_at
        return self._allowed

    def charge(self, nanoseconds: int, size: int) -> None:
        """Notes what was spent: time of the training's thread, and bytes that are sent."""
        pause = max(nanoseconds / TIME_SHARE, size / BYTES_PER_SECOND * 1e9)
        self._free_at = max(self._clock(), self._free_at) + round(pause)


def wire_size(value: Any) -> int:
    """About how many bytes of an event a value takes; for one that is still on a device, those of a number."""
    if isinstance(value, str | bytes):
        return len(value) + _OVERHEAD
    if isinstance(value, Mapping):
        return _OVERHEAD + sum(len(str(name)) + 1 + wire_size(one) for name, one in value.items())
    if isinstance(value, list | tuple):
        return _OVERHEAD + sum(map(wire_size, value))
    size = getattr(value, "size", None)
    return size if isinstance(size, int) else _OVERHEAD
