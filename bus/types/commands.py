"""Commands to the training of a live run, and their outcomes.

sender -> broker -> publishers -> applied between two batches -> recorded in the stream -> reported to the sender"""

import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec

from offloop.bus.errors import ConfigurationError, ProtocolError, close_matches

COMMANDS: Mapping[str, str] = {
    "stop": "ends the training after the current batch",
    "checkpoint": "writes a checkpoint",
    "pause": "pauses until 'resume' or 'stop'",
    "resume": "continues after 'pause'",
    "set": "NAME VALUE: sets lr, log_interval, eval (VALUE: now) or your own",
    "dump": "writes the flight recorder's batches, even while the loop hangs",
    "stacks": "writes where all ranks are, even while the loop hangs",
    "profile": "5ba [--ranks 0,1]: records so many batches with torch.profiler",
}  # commands and their effects, as `offloop send --help` shows them. Dump and stacks do not wait for the training

PROFILE = "profile"
MOST_PROFILED = 50  # batches of a profile
DUMP = "dump"
STACKS = "stacks"
DUMP_REASONS = ("asked", "alert", "failed", "lost", "nan", "stalled")
"""Reasons for writing a flight recording: the argument of ``dump``."""

WAIT_SECONDS = 30.0  # default time that a sender waits for its command to take effect

MAX_ARGUMENTS = 8
MAX_TEXT = 1000

Argument: TypeAlias = str | int | float | bool | None


_Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]


class Command(msgspec.Struct, frozen=True, omit_defaults=True, rename={"name": "command"}):
    """A command to a training."""

    name: _Text
    arguments: Annotated[tuple[_Text | int | float | bool | None, ...], msgspec.Meta(max_length=MAX_ARGUMENTS)] = ()
    id: _Text = ""
    """Identifies the command on its way and in the stream."""
    decided_at: int | None = None
    """Batches trained at the event at which a callback sent it; ``None`` for a command from a person."""
    reason: _Text | None = None
    """Reason for the command, and its sender."""

    @classmethod
    def from_wire(cls, content: Any) -> "Command":
        """Read the form that :meth:`to_wire` returns. Raises ProtocolError for any other."""
        try:
            return msgspec.convert(content, cls)
        except (msgspec.ValidationError, RecursionError) as error:
            raise ProtocolError(f"a command is malformed: {error}") from None

    def to_wire(self) -> dict[str, Any]:
        """Return the command as it is sent."""
        return {"arguments": (), "id": "", **msgspec.to_builtins(self)}

    def __str__(self) -> str:
        return " ".join([self.name, *map(str, self.arguments)])


class Outcome(NamedTuple):
    """The outcome of a command."""

    command: Command
    event: str | None
    """The event at which it was applied; ``None`` before it is answered."""
    batch: int | None
    """Batches trained at that event."""
    error: str | None = None
    """Reason for not applying it."""
    time_ns: int | None = None
    """Time of the answer in nanoseconds since 1970 (UTC); ``None`` if the stream does not have it."""
    done: str | None = None
    """Path of the file that the command wrote."""

    @property
    def delay(self) -> int | None:
        """Batches between the decision and the effect."""
        decided_at = self.command.decided_at
        return None if decided_at is None or self.batch is None else self.batch - decided_at

    def __str__(self) -> str:
        return self._described(f"'{self.command}'")

    @property
    def with_reason(self) -> str:
        """The outcome as text, with the reason for the command, for readers other than its sender."""
        reason = self.command.reason
        return self._described(f"'{self.command}' ({reason})" if reason else f"'{self.command}'")

    def _described(self, command: str) -> str:
        if self.error is not None:
            return f"{command} failed: {self.error}"
        if self.done is not None:
            return f"{command} wrote {self.done}" + ("" if self.batch is None else f" at batch {self.batch}")
        if self.event is None:
            return f"{command} was sent and has not taken effect yet"
        late = "" if self.delay is None else f", {self.delay} batch{'es' if self.delay != 1 else ''} after the decision"
        return f"{command} took effect at batch {self.batch} ({self.event}){late}"

    @classmethod
    def from_wire(cls, command: Command, content: Mapping[str, Any]) -> "Outcome":
        """Read an ``applied`` message."""
        event, error, done = (
            None if (value := content.get(name)) is None else str(value)[:MAX_TEXT]
            for name in ("event", "error", "done")
        )
        batch = content.get("batch")
        return cls(command, event, batch if type(batch) is int else None, error, done=done)


def check_command(name: str, arguments: tuple[Any, ...], reason: str | None = None) -> Command:
    """Return a checked command. Raises ConfigurationError for an unknown name or arguments that it does not take."""
    if name not in COMMANDS:
        raise ConfigurationError(
            f"command {name!r} is unknown: {close_matches(name, list(COMMANDS))}use {', '.join(COMMANDS)}"
        )
    if name == "set":
        if len(arguments) != 2 or not isinstance(arguments[0], str):
            raise ConfigurationError("'set' takes a name and a value, as in 'set lr 0.01'")
    elif name == DUMP and arguments:
        if len(arguments) > 1 or arguments[0] not in DUMP_REASONS:
            raise ConfigurationError(f"'dump' takes a reason or nothing: {', '.join(DUMP_REASONS)}")
    elif name == PROFILE:
        parse_profile(arguments)
    elif arguments:
        raise ConfigurationError(f"{name!r} takes no arguments, not {' '.join(map(str, arguments))!r}")
    for one in arguments:
        is_small = type(one) is not int or abs(one) < 1 << 63
        if not (len(one) <= MAX_TEXT if isinstance(one, str) else isinstance(one, int | float | None) and is_small):
            raise ConfigurationError(
                f"a command cannot carry {str(one)[:40]!r}: use numbers, true, false and texts of at most {MAX_TEXT} "
                "characters"
            )
    return Command(name, arguments, reason=None if reason is None else str(reason)[:MAX_TEXT])


def parse_profile(arguments: tuple[Any, ...]) -> tuple[int, list[int]]:
    """Return number of batches and ranks of the command ``profile``. Raises ConfigurationError for anything else."""
    found = re.fullmatch(r"(\d{1,3})ba(?: (\d{1,9}(?:,\d{1,9})*))?", " ".join(map(str, arguments)), re.ASCII)
    if found is None or not 1 <= int(found[1]) <= MOST_PROFILED:
        raise ConfigurationError(
            f"'profile' takes a number of batches up to {MOST_PROFILED}ba, and ranks: use 'profile 5ba', or "
            "'profile 5ba --ranks 0,1'"
        )
    return int(found[1]), sorted({int(rank) for rank in (found[2] or "0").split(",")})


def new_command_id() -> str:
    return os.urandom(8).hex()
