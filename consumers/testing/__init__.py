"""For tests of your own callbacks: replay recordings through them, feed them made-up trainings, compare with golden
files.

May import: bus.protocol, bus.recording, bus.runs, bus.subscriber, api, runner. Begin with ``harness``.

    from consumers.testing import MemoryStream, replay

    logged = replay(Perplexity(), "recordings/digits.mcap")
    assert logged.last["perplexity"] < 2

Everything here works with any test framework. With pytest the fixtures ``recording``, ``replay``, ``live_run`` and
``golden`` are there by themselves, see :mod:`offloop.pytest_plugin`.
"""

from typing import TYPE_CHECKING

from bus.lazy import lazy_exports

if TYPE_CHECKING:
    from consumers.testing.golden import Golden
    from consumers.testing.harness import replay
    from consumers.testing.live_run import LiveRun
    from consumers.testing.logged import Logged
    from consumers.testing.memory_stream import MemoryStream

__all__ = ["Golden", "LiveRun", "Logged", "MemoryStream", "replay"]

# pytest imports this package in every run where it is installed: nothing is loaded before it is used.
__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "consumers.testing.golden": ["Golden"],
        "consumers.testing.harness": ["replay"],
        "consumers.testing.live_run": ["LiveRun"],
        "consumers.testing.logged": ["Logged"],
        "consumers.testing.memory_stream": ["MemoryStream"],
    },
)
