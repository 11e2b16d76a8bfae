"""What the tools for recordings have in common: what they say of the file that they wrote, and of what was chosen."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from offloop.bus.errors import ConfigurationError
from offloop.bus.protocol.order import Ending, Gap


@dataclass(frozen=True, kw_only=True)
class Written:
    """The file that a tool wrote, and what it found in the recordings that it read."""

    path: Path
    """The file that was written."""
    events: int
    """Events in it."""
    ending: Ending | None
    """How the run ended; ``None`` when no recording says it for all ranks."""
    damage: tuple[str, ...]
    """What could not be read, each with its file and offset."""
    gaps: tuple[Gap, ...]
    """Numbers that are missing, of each rank."""
    left_out: tuple[Gap, ...]
    """Numbers that are missing because a cut has left them out."""
    lost: bool
    """Whether the recordings held something that cannot be read."""


def beside(recording: Path, word: str) -> Path:
    """Where a tool writes by default: ``recording-1.WORD.mcap`` for ``recording-1.mcap``."""
    return recording.with_name(f"{recording.stem}.{word}{recording.suffix}")


def check_ranks(path: Path, requested: Collection[int] | None, there: Collection[int]) -> None:
    """Raises :class:`offloop.bus.errors.ConfigurationError` when a requested rank is missing."""
    for rank in sorted(set(requested or ()).difference(there)):
        named = ", ".join(map(str, sorted(there))) or "none"
        raise ConfigurationError(f"{path} has no rank {rank}: choose of {named} with '--ranks'")


def check_any(path: Path, events: int) -> None:
    """Raises :class:`offloop.bus.errors.ConfigurationError` when no event was found."""
    if not events:
        raise ConfigurationError(
            f"nothing of {path} is chosen: 'offloop show {path}' shows its events and how far the training came"
        )
