"""Where things are that tests read."""

import sys
from pathlib import Path

SUPPORT = Path(__file__).parent
TESTS = SUPPORT.parent
DATA = TESTS / "data"
RECORDINGS = DATA / "recordings"
ROOT = TESTS.parent
FOLDERS = {
    "composer": Path(sys.prefix) / "composer",
    "lowest": Path(sys.prefix) / "lowest",
    "nats-server": Path("/usr/sbin/nats-server"),
    "node_modules": ROOT / "examples" / "node" / "node_modules",
}
"""Folders and programs that are installed for some tests alone."""
