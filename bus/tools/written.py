"""What the tools for recordings report of the file that they wrote."""

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
    marks: int = 0
    """Rows of an export that are not events: commands, and how the run ended. A timeline has none."""
    dropped: int = 0
    """Events that were left out of a part."""
    ending: Ending | None
    """How the run ended; ``None`` when no recording says it for all ranks."""
    damage: tuple[str, ...]
    """What could not be read, each with its file and offset."""
    gaps: tuple[Gap, ...]
    """Numbers that are missing, of each rank."""
    left_out: tuple[Gap, ...]
    """Numbers that are missing because a part was written without them."""
    lost: bool
    """Whether the recordings held something that is not in the file because it cannot be read."""


def nothing_chosen(path: Path) -> ConfigurationError:
    """The error for options that choose no event of a recording."""
    return ConfigurationError(
        f"nothing of {path} is chosen: 'offloop show {path}' shows its events and how far the training came"
    )
