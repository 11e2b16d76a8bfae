"""Where things are that tests read."""

from pathlib import Path

__all__ = ["DATA", "ROOT", "SUPPORT"]

SUPPORT = Path(__file__).parent
DATA = SUPPORT.parent / "data"
ROOT = SUPPORT.parents[1]
