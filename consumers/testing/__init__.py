"""For tests of your own callbacks: replay recordings or made-up trainings through them, compare with golden files.

Begin with ``harness``.

    from offloop.consumers.testing import MemoryStream, replay

    logged = replay(Perplexity(), "recordings/digits.mcap")
    assert logged.last["perplexity"] < 2

Everything here works with any test framework. With pytest the fixtures ``recording``, ``replay`` and ``golden``
are there by themselves, see :mod:`offloop.pytest_plugin`."""

from typing import TYPE_CHECKING

from offloop.bus.lazy import lazy_exports

if TYPE_CHECKING:
    from offloop.consumers.testing.golden import Golden as Golden
    from offloop.consumers.testing.harness import Logged as Logged
    from offloop.consumers.testing.harness import replay as replay
    from offloop.consumers.testing.memory_stream import MemoryStream as MemoryStream

# pytest imports this package in every run where it is installed: nothing is loaded before it is used.
__getattr__, __dir__, __all__ = lazy_exports(__name__)
