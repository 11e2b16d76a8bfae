"""Values shared by run.json, the index and lists of runs."""

from typing import Annotated, TypeAlias

import msgspec

from offloop.bus.protocol.frames import EventBody

_LARGEST = (1 << 63) - 1
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=_LARGEST)]
SecondsSince1970: TypeAlias = Annotated[float, msgspec.Meta(ge=0, lt=253402214400)]
"""Before the last day of year 9999: later times have no date in some time zones."""


class Reached(msgspec.Struct, frozen=True):
    """Progress of a training, and its planned duration."""

    epoch: Count
    batch: Count
    sample: Count
    planned: str | None = None  # ``max_duration`` before a stop; ``None`` if it was not published

    @classmethod
    def of(cls, last: EventBody) -> "Reached":
        """Read the first rank's last event."""
        values = {**last.context, **last.fields}
        planned = values.get("planned_duration") or values.get("max_duration")
        # A peer may have sent any number, and run.json has to be readable.
        epoch, batch, sample = (min(max(0, count), _LARGEST) for count in last.timestamp[1:4])
        return cls(epoch, batch, sample, None if planned is None else str(planned))

    def __str__(self) -> str:
        return f"{self.epoch}ep {self.batch}ba {self.sample}sp{f' of {self.planned}' if self.planned else ''}"


class Pause(msgspec.Struct, frozen=True):
    """A training paused by a command after a batch."""

    since: SecondsSince1970
    batch: Count
