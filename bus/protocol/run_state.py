"""Values shared by run.json, the index and lists of runs."""

from typing import Annotated, TypeAlias

import msgspec

from offloop.bus.protocol.frames import EventBody

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
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
        _, epoch, batch, sample, *_ = last.timestamp
        return cls(epoch, batch, sample, None if planned is None else str(planned))

    def __str__(self) -> str:
        return f"{self.epoch}ep {self.batch}ba {self.sample}sp{f' of {self.planned}' if self.planned else ''}"


class Pause(msgspec.Struct, frozen=True):
    """A training paused by a command after a batch."""

    since: SecondsSince1970
    batch: Count
