"""A callback with a separate stream, in a thread or as a task of the event loop: it delays no other callback."""

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

LOOK_SECONDS = 0.05  # seconds between two checks whether another thread is done

_NOTE_SECONDS = 1.0


class CallbackWorker(Dispatcher):
    """Runs one callback with a separate stream; its output is delivered between that of the others.

    A callback with ``background`` has a thread, another one is a task of the event loop in which :meth:`start` is
    called. Where positions are kept, it notes its progress after it has logged, and once a second."""

    def __init__(self, stream: RunStream, name: str, callback: Callback, fanout: Fanout, handling: Handling) -> None:
        # The shared stream brings the hyperparameters.
        super().__init__(stream, [(name, callback)], fanout, handling, logs_hyperparameters=False)
        self.deliver: Callable[[Logger, Snapshot], None] = self._deliver_and_note
        self.name = name
        self.callback = callback
        self.progress: WorkerProgress = WorkerProgress({}, CallbackState(name, 0, False, {}))
        """The progress noted last. It changes only under the fanout's lock, so that it matches the
        destinations' output."""
        self._next_note = 0.0
        self._done = threading.Event()
        self._may_close = threading.Event()
        self._thread = threading.Thread(target=self._run_in_thread, name="offloop-worker", daemon=True)
        self._work: asyncio.Task[None] | None = None

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def resume_at(self, progress: WorkerProgress) -> None:
        """Resume from another worker's progress; the callback's state is not loaded here."""
        self.progress = progress
        self.resume_from(progress.positions, [progress.callback])

    def start(self) -> None:
        if self.callback.background:
            self._thread.start()
        else:
            self._work = asyncio.get_running_loop().create_task(self._consume_and_close())

    def cancel(self) -> None:
        """End a task also where its callback waits; a thread finishes the current event."""
        self.stop()
        if self._work is not None:
            self._work.cancel()

    async def finish(self) -> None:
        self._may_close.set()
        if self._work is not None:
            await self._work
        elif self._thread.ident is not None:
            self._thread.join()

    def _run_in_thread(self) -> None:
        try:
            asyncio.run(self._consume_and_close())
        except Exception as error:  # noqa: BLE001  whatever it is, it is raised where the others run
            self.handling.fail(error)
        finally:
            self._done.set()

    async def _consume_and_close(self) -> None:
        try:
            await self.consume()
            if self.fatal is not None:
                self.handling.fail(self.fatal)
        except Exception as error:  # noqa: BLE001  whatever it is, it is raised where the others run
            self.handling.fail(error)
        finally:
            self._done.set()
            while not self._may_close.is_set():
                await asyncio.sleep(LOOK_SECONDS)
            await self.close()

    def _deliver_and_note(self, logger: Logger, snapshot: Snapshot) -> None:
        with self.fanout.lock:
            has_logged = logger.pending
            self.fanout.deliver(logger, snapshot)
            # Values logged at its end come after the commit; the next consumer resumes before a failure.
            if self.handling.keeps_positions and not self._may_close.is_set() and self.fatal is None:
                self._note_progress(snapshot, has_logged)

    def _note_progress(self, snapshot: Snapshot, has_logged: bool) -> None:
        """Note it always after something was logged, because the destinations' positions are past that."""
        now = time.monotonic()
        if has_logged or now >= self._next_note:
            self._next_note = now + _NOTE_SECONDS
            states = self.callback_states()
            if states is not None:
                positions = {**self.positions, snapshot.rank: (snapshot.seq, snapshot.base_seq)}
                self.progress = WorkerProgress(positions, states[0])
