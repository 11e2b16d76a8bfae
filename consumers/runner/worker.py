"""A callback with a stream and a thread of its own, beside those that share one: it delays nobody."""

import asyncio
import threading
import time
from collections.abc import Callable

from bus.protocol.snapshot import Snapshot
from consumers.api.callback import Callback, OnError
from consumers.api.logger import Logger
from consumers.delivery.commit import CallbackState, LaneState
from consumers.delivery.delivery import Delivery
from consumers.runner.dispatcher import AtCheckpoint, Dispatcher, SnapshotStream
from consumers.runner.members import Member

__all__ = ["LOOK_SECONDS", "Lane"]

LOOK_SECONDS = 0.05
"""How often one thread looks whether another one is through."""

_POINT_SECONDS = 1.0


class Lane:
    """Runs one callback over a stream of its own in a thread of its own; what it logs is delivered between what the
    others log.

    ``note_error``, ``on_error``, ``on_left`` and ``at_checkpoint`` are as for
    :class:`~consumers.runner.dispatcher.Dispatcher`; an error that ends it is handed to ``fail`` in its thread. With
    ``keeps_point`` it notes where it stands: with what it has logged, and once a second.
    """

    def __init__(
        self,
        stream: SnapshotStream,
        name: str,
        callback: Callback,
        *,
        delivery: Delivery,
        note_error: Callable[[Member, Exception, str], None],
        on_error: OnError,
        keeps_point: bool,
        fail: Callable[[Exception], None],
        on_left: Callable[[], None],
        at_checkpoint: AtCheckpoint | None = None,
    ) -> None:
        self.name = name
        self.callback = callback
        self.point = LaneState({}, CallbackState(name, 0, False, {}))
        """Where it stood when it last noted that. It changes only while the delivery's lock is held, so that it belongs
        to what the destinations have been given."""
        # The others' stream brings the hyperparameters.
        self.dispatcher = Dispatcher(
            stream,
            [(name, callback)],
            self._deliver,
            note_error,
            on_error,
            keeps_point,
            on_left,
            at_checkpoint,
            logs_hyperparameters=False,
        )
        self._delivery = delivery
        self._keeps_point = keeps_point
        self._next_point = 0.0
        self._fail = fail
        self._through = threading.Event()
        self._may_close = threading.Event()
        self._thread = threading.Thread(target=self._run, name="offloop-lane", daemon=True)

    @property
    def is_through(self) -> bool:
        """Whether it has handled everything, or has given up."""
        return self._through.is_set()

    def go_on_at(self, point: LaneState) -> None:
        """Takes up where another one stood; what its callback knew is not given to the callback here."""
        self.point = point
        self.dispatcher.go_on_from(point.positions, [point.callback])

    def start(self) -> None:
        """Begins to handle the stream."""
        self._thread.start()

    def finish(self) -> None:
        """Lets the callback be closed, and waits for that."""
        self._may_close.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._consume())
        except Exception as error:  # noqa: BLE001  whatever it is, it is raised where the others run
            self._fail(error)
        finally:
            self._through.set()

    async def _consume(self) -> None:
        try:
            await self.dispatcher.consume()
            if self.dispatcher.fatal is not None:
                self._fail(self.dispatcher.fatal)
        except Exception as error:  # noqa: BLE001  whatever it is, it is raised where the others run
            self._fail(error)
        finally:
            self._through.set()
            while not self._may_close.is_set():
                await asyncio.sleep(LOOK_SECONDS)
            await self.dispatcher.close()

    def _deliver(self, logger: Logger, snapshot: Snapshot) -> None:
        with self._delivery.lock:
            has_logged = logger.pending
            self._delivery.deliver(logger, snapshot)
            # What is logged while it is closed comes after what is committed.
            if self._keeps_point and not self._may_close.is_set():
                self._note_point(snapshot, has_logged)

    def _note_point(self, snapshot: Snapshot, has_logged: bool) -> None:
        """Always when it has logged something, because the destinations' positions are past that."""
        dispatcher = self.dispatcher
        if dispatcher.fatal is not None:
            # Whoever goes on begins before what failed.
            return
        now = time.monotonic()
        if has_logged or now >= self._next_point:
            self._next_point = now + _POINT_SECONDS
            states = dispatcher.callback_states()
            if states is not None:
                positions = {**dispatcher.positions, snapshot.rank: (snapshot.seq, snapshot.base_seq)}
                self.point = LaneState(positions, states[0])
