"""A callback with its own stream, in a thread or as a task of the event loop: it delays no other callback."""

import asyncio
import threading
import time
from collections.abc import Callable

from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.protocol.stream import RunStream
from offloop.consumers.api.callback import Callback
from offloop.consumers.api.logger import Logger
from offloop.consumers.delivery.commit import CallbackState, WorkerProgress
from offloop.consumers.delivery.fanout import Fanout
from offloop.consumers.runner.dispatcher import Dispatcher, Handling

LOOK_SECONDS = 0.05
"""Seconds between two checks whether another thread is done."""

_NOTE_SECONDS = 1.0


class CallbackWorker:
    """Runs one callback with its own stream; what it logs is delivered between what the others log. A callback with
    ``background`` has a thread, another one is a task of the event loop in which :meth:`start` is called.

    An error that ends it is handed to ``fail`` there. Where positions are kept, it notes where it stands: with what it
    has logged, and once a second.
    """

    def __init__(
        self,
        stream: RunStream,
        name: str,
        callback: Callback,
        *,
        fanout: Fanout,
        handling: Handling,
        fail: Callable[[Exception], None],
    ) -> None:
        self.name = name
        self.callback = callback
        self.progress = WorkerProgress({}, CallbackState(name, 0, False, {}))
        """The progress that was noted last. It changes only while the fanout's lock is held, so that it matches
        what the destinations have been given."""
        # The others' stream brings the hyperparameters.
        self.dispatcher = Dispatcher(
            stream, [(name, callback)], self._deliver, fanout.flush, handling, logs_hyperparameters=False
        )
        self._fanout = fanout
        self._keeps_progress = handling.keeps_positions
        self._next_note = 0.0
        self._fail = fail
        self._done = threading.Event()
        self._may_close = threading.Event()
        self._thread = threading.Thread(target=self._run, name="offloop-worker", daemon=True)
        self._task: asyncio.Task[None] | None = None

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def resume_at(self, progress: WorkerProgress) -> None:
        """Resumes from another worker's progress; the callback's state is not loaded here."""
        self.progress = progress
        self.dispatcher.resume_from(progress.positions, [progress.callback])

    def start(self) -> None:
        """Begins to handle the stream."""
        if self.callback.background:
            self._thread.start()
        else:
            self._task = asyncio.get_running_loop().create_task(self._consume())

    def cancel(self) -> None:
        """Ends a task also where its callback waits; a thread handles the event at hand."""
        self.dispatcher.stop()
        if self._task is not None:
            self._task.cancel()

    async def finish(self) -> None:
        """Lets the callback be closed, and waits for that."""
        self._may_close.set()
        if self._task is not None:
            await self._task
        elif self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._consume())
        except Exception as error:  # noqa: BLE001  whatever it is, it is raised where the others run
            self._fail(error)
        finally:
            self._done.set()

    async def _consume(self) -> None:
        try:
            await self.dispatcher.consume()
            if self.dispatcher.fatal is not None:
                self._fail(self.dispatcher.fatal)
        except Exception as error:  # noqa: BLE001  whatever it is, it is raised where the others run
            self._fail(error)
        finally:
            self._done.set()
            while not self._may_close.is_set():
                await asyncio.sleep(LOOK_SECONDS)
            await self.dispatcher.close()

    def _deliver(self, logger: Logger, snapshot: Snapshot) -> None:
        with self._fanout.lock:
            has_logged = logger.pending
            self._fanout.deliver(logger, snapshot)
            # What is logged while it is closed comes after what is committed.
            if self._keeps_progress and not self._may_close.is_set():
                self._note_progress(snapshot, has_logged)

    def _note_progress(self, snapshot: Snapshot, has_logged: bool) -> None:
        """Always when it has logged something, because the destinations' positions are past that."""
        dispatcher = self.dispatcher
        if dispatcher.fatal is not None:
            # The next consumer resumes before what failed.
            return
        now = time.monotonic()
        if has_logged or now >= self._next_note:
            self._next_note = now + _NOTE_SECONDS
            states = dispatcher.callback_states()
            if states is not None:
                positions = {**dispatcher.positions, snapshot.rank: (snapshot.seq, snapshot.base_seq)}
                self.progress = WorkerProgress(positions, states[0])
