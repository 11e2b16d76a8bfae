"""For tests of your own callbacks: replay recordings through them, feed them made-up trainings, compare with golden
files.

May import: runner, api. Begin with ``harness``.

    from consumers.testing import MemoryStream, replay

    logged = replay(Perplexity(), "recordings/digits.mcap")
    assert logged.last["perplexity"] < 2

Everything here works with any test framework. With pytest the fixtures ``recording``, ``replay``, ``live_run`` and
``golden`` are there by themselves, see :mod:`offloop.pytest_plugin`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from consumers.testing.golden import Golden
    from consumers.testing.harness import replay
    from consumers.testing.live_run import LiveRun
    from consumers.testing.logged import Logged
    from consumers.testing.memory_stream import MemoryStream

__all__ = ["Golden", "LiveRun", "Logged", "MemoryStream", "replay"]

_MODULES = {
    "Golden": "golden",
    "LiveRun": "live_run",
    "Logged": "logged",
    "MemoryStream": "memory_stream",
    "replay": "harness",
}


def __getattr__(name: str) -> Any:
    # pytest imports this package in every run of everybody who has installed it: nothing is loaded before it is used.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
