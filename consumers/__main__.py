"""``python -m consumers``: the same as the command ``consumer``."""

from consumers.cli.main import main

main()
