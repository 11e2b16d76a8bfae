"""What is wrong with a recording, as lines of which there are never too many to show."""

from collections.abc import Iterable

__all__ = ["Damage", "shortened"]

KEPT = 100


def shortened(lines: Iterable[str], what: str, most: int = KEPT) -> list[str]:
    """The first lines, and how many more of ``what`` there are."""
    kept: list[str] = []
    more = 0
    for line in lines:
        if len(kept) < most:
            kept.append(line)
        else:
            more += 1
    return [*kept, f"and {more:,} more {what}"] if more else kept


class Damage:
    """A list of lines that keeps the first hundred and counts the others."""

    def __init__(self) -> None:
        self._kept: list[str] = []
        self._more = 0

    def __bool__(self) -> bool:
        return bool(self._kept)

    def add(self, line: str) -> None:
        """Takes a line in."""
        if len(self._kept) < KEPT:
            self._kept.append(line)
        else:
            self._more += 1

    def add_all(self, other: "Damage") -> None:
        """Takes in what another one has."""
        for line in other._kept:
            self.add(line)
        self._more += other._more

    def lines(self) -> list[str]:
        """Those that were kept, and how many more there are."""
        return [*self._kept, f"and {self._more:,} more places like these"] if self._more else list(self._kept)
