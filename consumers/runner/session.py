"""A consumer as a whole: callbacks that share a stream, those that have one of their own, and what they log to."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from offloop.bus.subscriber.merged import MergedSubscriber
from offloop.bus.subscriber.subscriber import Subscriber
from offloop.consumers.api.callback import Callback, OnError
from offloop.consumers.api.logger import LoggerDestination
from offloop.consumers.delivery.commit import COMMIT_EVENTS, CommitStore, Committed
from offloop.consumers.runner.checkpoint_states import CheckpointStates
from offloop.consumers.runner.entries import EventForwarder, partition
from offloop.consumers.runner.places import Stream
from offloop.consumers.runner.runner import Runner
from offloop.consumers.runner.statistics import RunnerStatistics

OpenStream: TypeAlias = Callable[[Sequence[Callback], Mapping[int, tuple[int, int]] | None], Stream]
"""Opens a stream for some callbacks, from where on it is to go: see :class:`~offloop.bus.Subscriber`."""


def format_outcomes(statistics: RunnerStatistics) -> list[str]:
    """A line for people about each command that callbacks have sent, but for those that went wrong: they are among the
    problems."""
    return [
        f"command '{outcome.command}' came too late: the training was over"
        if outcome.event is None and statistics.ending is not None
        else f"command {outcome}"
        for outcome in statistics.outcomes
        if outcome.error is None
    ]


def format_places(statistics: RunnerStatistics) -> list[str]:
    """A line for people about each destination that has something to look at."""
    return [f"{name}: {where}" for name, where in statistics.written.items()]


def run_session(
    open_stream: OpenStream,
    callbacks: Sequence[Callback],
    destinations: Sequence[LoggerDestination],
    on_error: OnError = "continue",
    open_progress: contextlib.AbstractContextManager[CommitStore] | None = None,
    commit_every: int = COMMIT_EVENTS,
    on_start: Callable[[Stream, Committed | None], object] = lambda stream, committed: None,
    checkpoint_states: CheckpointStates | None = None,
) -> tuple[Stream, RunnerStatistics]:
    """Runs callbacks until the run has ended, each of those with ``background`` beside the others; returns the stream
    that the others share.

    ``open_progress`` keeps how far it is, ``checkpoint_states`` what callbacks knew where the training saved
    checkpoints. ``on_start`` is called when all is open, with the shared stream and what was
    committed before. Raises what :meth:`offloop.consumers.runner.runner.Runner.run` does."""
    watchers = [EventForwarder(destination) for destination in destinations if destination.watches]
    destinations = [*destinations, *(further for callback in callbacks for further in callback.destinations())]
    shared, beside = partition([*callbacks, *watchers])
    with contextlib.ExitStack() as opened:
        progress = None if open_progress is None else opened.enter_context(open_progress)
        committed = None if progress is None else progress.load()
        workers = {} if committed is None else {worker.callback.name: worker.positions for worker in committed.workers}

        def open_for(chosen: Sequence[Callback], after: Mapping[int, tuple[int, int]] | None) -> Stream:
            stream = open_stream(chosen, after)
            if isinstance(stream, Subscriber | MergedSubscriber):
                opened.enter_context(stream)
            return stream

        stream = open_for([callback for _, callback in shared], committed.positions if committed else None)
        at_checkpoint = None if checkpoint_states is None else checkpoint_states.take
        runner = Runner(stream, shared, destinations, on_error, progress, commit_every, at_checkpoint)
        for name, callback in beside:
            runner.run_beside(name, callback, open_for([callback], workers.get(name)))
        on_start(stream, committed)
        return stream, runner.run()
