"""Where things are that tests read."""

from pathlib import Path

__all__ = ["DATA", "ROOT", "SUPPORT", "TESTS"]

SUPPORT = Path(__file__).parent
TESTS = SUPPORT.parent
DATA = TESTS / "data"
ROOT = TESTS.parent
