"""The content of control messages to a broker: checked here, and nowhere else."""

from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec

from offloop.bus.errors import ProtocolError

Text: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
# What is missing is added up, and has to stay a number that can be sent.
EventNumber: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]


class HelloMessage(msgspec.Struct):
    """A publisher's introduction of itself."""

    run: Text
    rank: Count
    world_size: Positive
    publisher_id: Text
    local_world_size: Positive | None = None
    attempt: Positive | None = None
    """The attempt that it continues; ``None`` for a new one."""
    new_attempt: Positive | None = None
    """The attempt that it begins, where hosts have agreed on one."""
    pid: Count | None = None
    started: Count | None = None
    host: Text | None = None
    replay: bool = False
    new: bool = False
    info: dict[str, Any] = {}
    demand: dict[str, Any] | None = None
    """The demand that it continues with."""
    flight: dict[str, Any] | None = None
    """Memory of its flight recorder."""


class ResumeMessage(msgspec.Struct, rename={"first": "from"}):
    """A publisher's next event, where it has given up those before it."""

    first: EventNumber
    after: Count | None = None


class LeaseMessage(msgspec.Struct):
    """A consumer's demand, and how far it is."""

    run: Text
    demand: dict[str, Any]
    name: Text | None = None
    report: Annotated[dict[Annotated[str, msgspec.Meta(max_length=100)], int | float], msgspec.Meta(max_length=64)] = {}
    barrier_events: list[Any] | None = None
    handled: list[tuple[Count, Count]] = []
    viewer: bool = False
    """Set by a bridge for readers that may only view: what they see costs the training nothing."""


class HandledMessage(msgspec.Struct):
    """A consumer's progress: pairs of rank and number of the last handled event."""

    run: Text
    handled: list[tuple[Count, Count]]


class OutcomeMessage(msgspec.Struct):
    """A training's answer to a command."""

    id: Text
    event: str | None = None
    batch: Count | None = None
    error: str | None = None
    done: str | None = None


Message = TypeVar("Message")


def parse(content: dict[Any, Any], form: type[Message]) -> Message:
    """Reads the content of a message. Raises ProtocolError: a key is missing, or a value is of another type."""
    try:
        return msgspec.convert(content, form)
    except msgspec.ValidationError as error:
        raise ProtocolError(str(error)) from None
