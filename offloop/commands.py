"""The programs ``offloop``, ``bus`` (the same), ``trainer`` and ``consumer``."""

import os
import signal
from collections.abc import Callable
from importlib import import_module

__all__ = ["bus", "consumer", "offloop", "trainer"]


def offloop() -> None:
    _run("offloop.bus.cli.main")


bus = offloop


def trainer() -> None:
    _run("offloop.trainer.cli.main")


def consumer() -> None:
    _run("offloop.consumers.cli.main")


def _run(module: str) -> None:
    # A KeyboardInterrupt during imports may be caught by a module, or lost in the import system's callbacks.
    is_taken = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_taken:
        signal.signal(signal.SIGINT, _leave)
    try:
        main: Callable[[], None] = import_module(module).main
    finally:
        if is_taken:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    main()


def _leave(*_: object) -> None:
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"interrupted\n")
    os._exit(130)
