"""Passes a stream of snapshots through callbacks, and what they log to destinations."""

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import TypeAlias, get_args

from offloop.bus.errors import ClosedError, ConfigurationError, check_at_least, check_choice
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.protocol.stream import as_stream
from offloop.bus.subscriber.subscriber import Subscriber
from offloop.bus.terminal import handle_signals
from offloop.consumers.api.callback import Callback, OnError
from offloop.consumers.api.logger import LoggerDestination
from offloop.consumers.delivery.commit import COMMIT_EVENTS, Committed
from offloop.consumers.delivery.fanout import Fanout
from offloop.consumers.delivery.spool import wrap_in_spool
from offloop.consumers.runner.checkpoint_states import CheckpointStates
from offloop.consumers.runner.commits import Commits
from offloop.consumers.runner.dispatcher import AtCheckpoint, Dispatcher, Handling
from offloop.consumers.runner.entries import partition, unique_names
from offloop.consumers.runner.places import Stream
from offloop.consumers.runner.state_file import StateFile
from offloop.consumers.runner.statistics import RunnerStatistics
from offloop.consumers.runner.worker import LOOK_SECONDS, CallbackWorker

OpenStream: TypeAlias = Callable[[Sequence[Callback], Mapping[int, tuple[int, int]] | None], Stream]
"""Opens a stream for some callbacks, after the given positions: see :class:`~offloop.bus.Subscriber`."""

OnStart: TypeAlias = Callable[[Stream, Committed | None, "Runner"], object]
"""Called when all is open, with the shared stream, the progress committed before, and the runner."""


class Runner:
    """Runs callbacks over a stream, once.

    Each snapshot goes to every callback that requests its event, in the given order, those of further ranks only to
    callbacks with ``all_ranks``; then the destinations receive what was logged. At the end of the stream the
    callbacks are closed, then the destinations.

    The first error of a callback is shown with its traceback, and all are counted. Then ``continue`` passes it the
    next event, ``disable`` no more events, and ``stop`` ends the run with
    :class:`~offloop.consumers.runner.dispatcher.CallbackError`. A callback that raises
    :class:`~offloop.consumers.api.callback.CannotWorkError` gets no more events; when none is left, the run ends
    with the same error. A destination that raises is shown and gets nothing more: its output has no holes.

    With ``progress`` it resumes from the committed progress, and commits after ``commit_every`` events, after a
    second, before the callbacks are closed, and at the end. After a destination has failed, or ``stop`` has ended
    the run, nothing is committed: the next runner begins before that failure.

    At SIGINT and SIGTERM, unless ignored, it finishes the current event and closes everything; a second signal
    interrupts at once, and so does the first while it only waits for servers.

    Args:
        stream: a :class:`~offloop.bus.Subscriber`, a :class:`~offloop.bus.Recording` or any iterable, plain or
            asynchronous, of snapshots in order. Events up to the committed position are skipped.
        at_checkpoint: called with each dispatcher where the training has saved or loaded a checkpoint.
    """

    def __init__(
        self,
        stream: Iterable[Snapshot] | AsyncIterable[Snapshot],
        callbacks: Sequence[Callback | tuple[str, Callback]],
        destinations: Sequence[LoggerDestination] = (),
        on_error: OnError = "continue",
        progress: StateFile | None = None,
        commit_every: int = COMMIT_EVENTS,
        at_checkpoint: AtCheckpoint | None = None,
    ) -> None:
        check_at_least("commit_every", commit_every, 1)
        check_choice("on_error", on_error, get_args(OnError))
        self._keeps_progress = progress is not None
        self._handling = Handling(on_error, self._keeps_progress, at_checkpoint)
        # Named before they are wrapped, for messages.
        self._destinations = dict(zip(unique_names(destinations), map(wrap_in_spool, destinations), strict=True))
        self._fanout = Fanout(self._destinations, self._handling.fail)
        self._shared = Dispatcher(as_stream(stream), _named(callbacks), self._fanout, self._handling)
        self._handling.dispatchers.append(self._shared)
        self._workers: list[CallbackWorker] = []
        self._commits = Commits(
            progress, commit_every, self._shared, self._workers, self._destinations, self._fanout, self.statistics
        )
        self._started = False

    def statistics(self) -> RunnerStatistics:
        shared, restored = self._shared, self._commits.restored
        dispatchers = self._handling.dispatchers
        known_gaps = () if restored is None else restored.gaps
        return RunnerStatistics(
            handled=shared.handled,
            errors={entry.name: entry.errors for entry in self._handling.entries},
            failed_destinations=self._fanout.failed,
            last_seq=None if shared.last is None else shared.last.seq,
            interrupted=shared.interrupted,
            # A resuming reader finds the same gap again.
            gaps=tuple(dict.fromkeys((*known_gaps, *(gap for one in dispatchers for gap in one.stream.gaps)))),
            ending=(restored and restored.ending) or shared.stream.ending,
            damage=(restored and restored.damage) or shared.stream.damage,
            fields_since={name: batch for one in dispatchers for name, batch in tuple(one.fields_since.items())},
            undelivered={
                name: destination.problem
                for name, destination in self._destinations.items()
                if destination.problem is not None and name not in self._fanout.failed
            },
            uncommitted=self._commits.problem,
            outcomes=tuple(outcome for one in dispatchers for outcome in one.stream.outcomes),
            written={
                name: where
                for name, destination in self._destinations.items()
                if (where := destination.where) is not None
            },
            source=self._handling.source,
        )

    @property
    def first_error(self) -> BaseException | None:
        """The first error of a callback."""
        return self._handling.first_error

    def run_beside(self, name: str, callback: Callback, stream: Iterable[Snapshot] | AsyncIterable[Snapshot]) -> None:
        """Run one more callback over a separate stream; call it before :meth:`run`.

        With ``background`` it runs in a thread, otherwise as a task of the loop, so that it delays no other
        callback. It shares the destinations, and its position is committed with the others'."""
        worker = CallbackWorker(as_stream(stream), name, callback, self._fanout, self._handling)
        self._workers.append(worker)
        self._handling.dispatchers.append(worker)

    def run(self) -> RunnerStatistics:
        """Handle the stream to its end, in a new event loop.

        Raises:
            ConfigurationError: a destination cannot be opened, or the progress is of other callbacks or destinations.
            RecordingError: the progress is damaged.
            RunDirectoryError: nothing can be committed.
            offloop.consumers.runner.dispatcher.CallbackError: a callback raised and ``on_error`` is ``stop``, or none
                can work.
        """
        if _loop_is_running():
            raise ConfigurationError(
                "an event loop runs here already: write 'await runner.run_async()' instead of run()"
            )
        before = signal.getsignal(signal.SIGINT)
        try:
            return asyncio.run(self.run_async())
        finally:
            # asyncio leaves its own handler when a second signal ends the loop in the middle of a callback.
            if threading.current_thread() is threading.main_thread() and before is not None:
                signal.signal(signal.SIGINT, before)

    async def run_async(self) -> RunnerStatistics:
        """As :meth:`run`, within a running event loop, such as a notebook's."""
        if self._started:
            raise ClosedError("a runner runs once: make a new one with new callbacks")
        self._started = True
        if self._commits.restore():
            return self.statistics()
        self._open_destinations()
        with self._signals(), _woken_by_signals():
            try:
                for worker in self._workers:
                    worker.start()
                await self._shared.consume(self._commits.commit_if_due if self._keeps_progress else None)
                await self._await_workers()
                # The next runner resumes before the values that callbacks log while they are closed.
                self._commits.commit()
            except BaseException:
                for worker in self._workers:
                    worker.cancel()
                raise
            finally:
                if self._shared.stopping:
                    for worker in self._workers:
                        worker.stop()
                for worker in self._workers:
                    await worker.finish()
                await self._close()
        if self._shared.fatal is not None:
            raise self._shared.fatal
        if self._is_over:
            self._commits.commit(self.statistics().ending)
        return self.statistics()

    def stop(self) -> None:
        """Stop as at SIGINT: the current event is handled, and everything is closed. Callable from any thread."""
        self._shared.stop()

    def _open_destinations(self) -> None:
        if self._destinations:
            self._fanout.open(self._shared.context)
        try:
            # From here on, the destinations' output is known to be ours.
            self._commits.store()
        except BaseException:
            self._fanout.close()
            raise

    async def _await_workers(self) -> None:
        while not self._shared.stopping and not all(worker.done for worker in self._workers):
            await asyncio.sleep(LOOK_SECONDS)
            self._commits.commit_if_old()

    async def _close(self) -> None:
        await self._shared.close()
        if self._keeps_progress and self._is_over:
            # No event follows: what callbacks logged while they were closed does not come again, either.
            self._fanout.commit()
        self._fanout.close()

    @property
    def _is_over(self) -> bool:
        ending = self.statistics().ending
        is_whole = self._shared.fatal is None and not self._shared.interrupted
        # A lost run may be resumed.
        return is_whole and ending is not None and ending.status != "lost"

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Handle signals as :meth:`run` does, in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def on_signal(_number: int, _frame: FrameType | None) -> None:
            if self._shared.interrupted or self._fanout.only_sends:
                raise KeyboardInterrupt
            self.stop()

        with handle_signals(on_signal, signal.SIGINT, signal.SIGTERM):
            yield


def run_session(
    open_stream: OpenStream,
    callbacks: Sequence[Callback],
    destinations: Sequence[LoggerDestination],
    on_error: OnError = "continue",
    progress: StateFile | None = None,
    commit_every: int = COMMIT_EVENTS,
    on_start: OnStart = lambda stream, committed, runner: None,
    checkpoint_states: CheckpointStates | None = None,
) -> tuple[Stream, RunnerStatistics]:
    """Run callbacks to the end of the run, some with separate streams; return the shared stream.

    ``progress`` keeps the progress and is closed at the end, ``checkpoint_states`` keeps the states at checkpoints.
    Raises the errors of :meth:`Runner.run`."""
    destinations = [*destinations, *(further for callback in callbacks for further in callback.destinations())]
    shared, beside = partition(callbacks)
    with contextlib.ExitStack() as opened:
        committed = None if progress is None else opened.enter_context(progress).found
        workers = {} if committed is None else {worker.callback.name: worker.positions for worker in committed.workers}

        def open_for(chosen: Sequence[Callback], after: Mapping[int, tuple[int, int]] | None) -> Stream:
            stream = open_stream(chosen, after)
            if isinstance(stream, Subscriber):
                opened.enter_context(stream)
            return stream

        stream = open_for([callback for _, callback in shared], committed.positions if committed else None)
        at_checkpoint = None if checkpoint_states is None else checkpoint_states.take
        runner = Runner(stream, shared, destinations, on_error, progress, commit_every, at_checkpoint)
        for name, callback in beside:
            runner.run_beside(name, callback, open_for([callback], workers.get(name)))
        with runner._signals():  # as soon as it says that Ctrl-C leaves the run
            on_start(stream, committed, runner)
            return stream, runner.run()


@contextlib.contextmanager
def _woken_by_signals() -> Iterator[None]:
    """Wake the event loop at every signal, also at one that comes just before the loop falls asleep."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    receiver, sender = socket.socketpair()
    with receiver, sender:
        receiver.setblocking(False)
        sender.setblocking(False)
        loop = asyncio.get_running_loop()
        loop.add_reader(receiver, lambda: receiver.recv(4096))
        before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        if before != -1:
            # The caller's loop, such as a notebook's, is woken already.
            signal.set_wakeup_fd(before)
        try:
            yield
        finally:
            if before == -1:
                signal.set_wakeup_fd(-1)
            loop.remove_reader(receiver)


def _named(callbacks: Sequence[Callback | tuple[str, Callback]]) -> list[tuple[str, Callback]]:
    named = [one for one in callbacks if isinstance(one, tuple)]
    rest = [one for one in callbacks if not isinstance(one, tuple)]
    return named or list(zip(unique_names(rest), rest, strict=True))


def _loop_is_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
