"""Contents of control messages to a broker. They are checked only here."""

from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec

from offloop.bus.errors import ProtocolError

Text: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
PathText: TypeAlias = Annotated[str, msgspec.Meta(max_length=4096)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
# Sums of missing events must stay numbers that can be sent.
EventNumber: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]


ActorText: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,99}$")]


class StackMemory(msgspec.Struct):
    """Memory to which a process appends the stack of the thread that receives a signal."""

    signal: Annotated[int, msgspec.Meta(ge=1, le=64)]
    fd: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
    token: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    thread: Count  # thread of the training, by its number in the system
    nccl: Annotated[list[PathText], msgspec.Meta(min_length=2, max_length=2)]
    """Beginnings of the paths of torch's NCCL dumps, and of the pipes that request them; empty if not set."""


class HelloMessage(msgspec.Struct):
    """A publisher's introduction."""

    run: Text
    rank: Count
    world_size: Positive
    publisher_id: Text
    role: ActorText | None = None  # role of an actor, whose rank is 0 until the broker has numbered it
    name: ActorText | None = None  # its name, or the beginning of it
    exclusive: bool = False  # refuse it while another actor has its name
    local_world_size: Positive | None = None
    attempt: Positive | None = None  # attempt to continue; ``None`` for a new one
    new_attempt: Positive | None = None  # number of the new attempt, if the hosts agreed on one
    pid: Count | None = None
    started: Count | None = None
    host: Text | None = None
    new: bool = False
    info: dict[str, Any] = {}
    demand: dict[str, Any] | None = None  # demand to continue with
    flight: dict[str, Any] | None = None  # memory of its flight recorder
    stacks: StackMemory | None = None


class ResumeMessage(msgspec.Struct, rename={"first": "from"}):
    """A publisher's next event, after it has dropped earlier ones."""

    first: EventNumber


class LeaseMessage(msgspec.Struct):
    """A consumer's demand and progress."""

    run: Text
    demand: dict[str, Any]
    name: Text | None = None
    report: Annotated[dict[Annotated[str, msgspec.Meta(max_length=100)], int | float], msgspec.Meta(max_length=64)] = {}
    barrier_events: list[Any] | None = None
    handled: list[tuple[Count, Count]] = []
    viewer: bool = False  # set by a bridge for readers that may only view: their demand is ignored


class HandledMessage(msgspec.Struct):
    """A consumer's progress: pairs of rank and last handled event."""

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
    """Convert the content of a message, or raise ProtocolError for a missing key or a wrong type."""
    try:
        return msgspec.convert(content, form)
    except msgspec.ValidationError as error:
        raise ProtocolError(str(error)) from None
