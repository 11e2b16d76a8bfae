"""``python -m consumers``: the same as the command ``consumer``."""

from consumers.cli import main

main()
