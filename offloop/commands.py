"""The commands ``bus``, ``trainer``, ``consumer`` and ``offloop``.

They start here and not in their own packages, because a file of the user's own may hide those."""

import sys
from importlib import import_module

from offloop.packages import HiddenPackageError, check_packages

__all__ = ["bus", "consumer", "offloop", "trainer"]


def bus() -> None:
    """The command ``bus``."""
    _run("bus.cli.main")


def trainer() -> None:
    """The command ``trainer``."""
    _run("trainer.cli.main")


def consumer() -> None:
    """The command ``consumer``."""
    _run("consumers.cli.main")


def offloop() -> None:
    """The command ``offloop``."""
    _run("offloop.run")


def _run(module: str) -> None:
    package = module.partition(".")[0]
    try:
        check_packages("bus", "consumers" if package == "offloop" else package)
    except HiddenPackageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    import_module(module).main()
