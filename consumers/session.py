"""A consumer as a whole: callbacks that share a stream, those that have one of their own, and what they log to."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from bus.subscriber import Subscriber
from consumers.attach import Stream
from consumers.callback import Callback
from consumers.logger import LoggerDestination
from consumers.loggers.spool import spooled
from consumers.members import divided
from consumers.progress import Progress
from consumers.runner import COMMIT_EVENTS, OnError, Runner, RunnerStatistics

__all__ = ["OpenStream", "run_session"]


OpenStream: TypeAlias = Callable[[Sequence[Callback], Mapping[int, tuple[int, int]] | None], Stream]
"""Opens a stream for some callbacks, from where on it is to go: see :class:`~bus.subscriber.Subscriber`."""


def run_session(
    open_stream: OpenStream,
    callbacks: Sequence[Callback],
    destinations: Sequence[LoggerDestination],
    on_error: OnError = "continue",
    open_progress: Callable[[str | None], contextlib.AbstractContextManager[Progress]] | None = None,
    commit_every: int = COMMIT_EVENTS,
    on_start: Callable[[Stream, Progress | None], object] = lambda stream, progress: None,
) -> tuple[Stream, RunnerStatistics]:
    """Runs callbacks until the run has ended, each of those with ``own_cursor`` beside the others; returns the stream
    that the others share.

    ``open_progress`` keeps how far it is: of the others for ``None``, of one with its own stream for its name.
    ``on_start`` is called when all is open, with the shared stream and its progress. Raises what
    :meth:`consumers.runner.Runner.run` does."""
    watchers = [watcher for destination in destinations for watcher in destination.companions()]
    shared, beside = divided([*callbacks, *watchers])
    destinations = [spooled(destination) for destination in destinations]
    with contextlib.ExitStack() as opened:

        def open_for(chosen: Sequence[tuple[str, Callback]], name: str | None) -> tuple[Stream, Progress | None]:
            progress = None if open_progress is None else opened.enter_context(open_progress(name))
            committed = None if progress is None else progress.load()
            stream = open_stream([callback for _, callback in chosen], committed.positions if committed else None)
            if isinstance(stream, Subscriber):
                opened.enter_context(stream)
            return stream, progress

        stream, progress = open_for(shared, None)
        runner = Runner(stream, shared, destinations, on_error, progress, commit_every)
        for name, callback in beside:
            runner.run_beside(name, callback, *open_for([(name, callback)], name))
        on_start(stream, progress)
        return stream, runner.run()
