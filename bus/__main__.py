"""``python -m bus``."""

from bus.cli.main import main

main()
