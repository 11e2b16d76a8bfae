"""``python -m bus``."""

from bus.cli import main

main()
