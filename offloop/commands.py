"""The commands ``bus``, ``trainer`` and ``consumer``.

They start here and not in their own packages, because a file of the user's own may hide those."""

import sys
from importlib import import_module

from offloop.packages import HiddenPackageError, check_packages

__all__ = ["bus", "consumer", "trainer"]


def bus() -> None:
    """The command ``bus``."""
    _run("bus")


def trainer() -> None:
    """The command ``trainer``."""
    _run("trainer")


def consumer() -> None:
    """The command ``consumer``."""
    _run("consumers")


def _run(package: str) -> None:
    try:
        check_packages("bus", package)
    except HiddenPackageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    import_module(f"{package}.cli.main").main()
