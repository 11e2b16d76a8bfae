"""Where things are that tests read."""

import sys
from pathlib import Path

SUPPORT = Path(__file__).parent
TESTS = SUPPORT.parent
DATA = TESTS / "data"
ROOT = TESTS.parent
FOLDERS = {"composer": Path(sys.prefix) / "composer", "node_modules": ROOT / "examples" / "node" / "node_modules"}
"""Folders that something is installed in for some tests alone."""
