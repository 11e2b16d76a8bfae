"""``python -m offloop.consumers``: the same as the command ``consumer``."""

from offloop.consumers.cli.main import main

main()
