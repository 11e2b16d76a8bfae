"""Run ``python -m offloop.bus``."""

from offloop.bus.cli.main import main

main()
