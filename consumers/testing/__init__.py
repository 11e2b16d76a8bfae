"""Tests of callbacks: replay recordings or made-up trainings through them, compare with golden files.

    from offloop.consumers.testing import MemoryStream, replay

    logged = replay(Perplexity(), "recordings/digits.mcap")
    assert logged.last["perplexity"] < 2

Everything here works with any test framework. pytest has the fixtures ``recording``, ``replay`` and ``golden``, see
:mod:`offloop.pytest_plugin`."""

from typing import TYPE_CHECKING

from offloop.bus.lazy import lazy_exports

if TYPE_CHECKING:
    from offloop.consumers.testing.golden import Golden as Golden
    from offloop.consumers.testing.harness import Logged as Logged
    from offloop.consumers.testing.harness import replay as replay
    from offloop.consumers.testing.memory_stream import MemoryStream as MemoryStream
else:
    # pytest imports this package in every run where it is installed, so imports are lazy.
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
