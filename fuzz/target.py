"""What a target of the fuzzer is, and how much time it has for an input."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from random import Random
from types import FrameType
from typing import NamedTuple

INPUT_SECONDS = 5.0


class Target(NamedTuple):
    """One decoder, as ``targets.py`` has them."""

    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    """Good input, to begin with."""
    mutate: Callable[[Random, bytes], bytes]
    """A change that keeps most of the input's structure."""


class OverLimitError(BaseException):
    """An input took too long; of a kind that no decoder takes for one of its own errors."""


def run_one(target: Target, data: bytes) -> None:
    """Gives an input to a target, which has :data:`INPUT_SECONDS` of processor time for it.

    Raises whatever the target does, or :class:`OverLimitError`."""
    with _time_limit():
        target.run(data)


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise OverLimitError(f"one input took more than {INPUT_SECONDS} s of processor time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, INPUT_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
