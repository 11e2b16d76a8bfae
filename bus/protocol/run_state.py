"""What run.json, the index and lists of runs have in common."""

from typing import Annotated, TypeAlias

import msgspec

from offloop.bus.protocol.frames import EventBody

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
SecondsSince1970: TypeAlias = Annotated[float, msgspec.Meta(ge=0, lt=253402214400)]
"""Until the last day of the year 9999: a later time has no date in some zones."""


class Reached(msgspec.Struct, frozen=True):
    """The progress of a training, and its planned duration."""

    epoch: Count
    batch: Count
    sample: Count
    planned: str | None = None
    """``max_duration`` before a stop; ``None`` where none was published."""

    @classmethod
    def of(cls, last: EventBody) -> "Reached":
        """By the last event of the first rank."""
        values = {**last.context, **last.fields}
        planned = values.get("planned_duration") or values.get("max_duration")
        _, epoch, batch, sample, *_ = last.timestamp
        return cls(epoch, batch, sample, None if planned is None else str(planned))

    def __str__(self) -> str:
        return f"{self.epoch}ep {self.batch}ba {self.sample}sp{f' of {self.planned}' if self.planned else ''}"


class Pause(msgspec.Struct, frozen=True):
    """A training that is paused by a command."""

    since: SecondsSince1970
    batch: Count
    """After which batch."""
