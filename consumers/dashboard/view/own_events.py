"""The events of a training's own, requested and read only while a page shows them."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable

from offloop.bus.errors import OffloopError, RunError
from offloop.bus.protocol.order import Ending
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.protocol.stream import RunStream
from offloop.bus.recording.derived import derived_recordings
from offloop.bus.recording.recording import Recording
from offloop.bus.subscriber.subscriber import Subscriber
from offloop.bus.types.demand import Demand
from offloop.bus.types.event import Event
from offloop.consumers.api.callback import Callback
from offloop.consumers.api.logger import Logger
from offloop.consumers.dashboard.view.run_view import RunView
from offloop.consumers.dashboard.view.tap import READERS
from offloop.consumers.runner.entries import Subscription
from offloop.consumers.runner.runner import Runner

KEEP_SECONDS = 5.0  # how long to read on after the last look: pages look every second
_LOOK_SECONDS = 0.2
_turns = threading.Semaphore(READERS)


class OwnEvents(Callback):
    """Passes a run's events of its own, ``@*`` or ``#*``, to a function, while a page shows them.

    A thread reads the run from its start, and later from where it stopped. A live run is requested for them so long."""

    all_ranks = True

    def __init__(self, view: RunView, event: Event, take: Callable[[Snapshot], None]) -> None:
        self._view = view
        self._event = event
        self._take = take
        self._until = 0.0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._positions: dict[int, tuple[int, int]] = {}
        self._has_ended = False
        self.problem: str | None = None
        """Why reading failed."""

    @property
    def is_behind(self) -> bool:
        """True until the recorded events of an ended run have been read."""
        return not self._has_ended and self.problem is None

    def look(self) -> None:
        """Read for some seconds more."""
        with self._lock:
            self._until = time.monotonic() + KEEP_SECONDS
            if self._thread is None and not self._has_ended and self._view.stream is not None:
                self._thread = threading.Thread(target=self._follow, name="offloop-own", daemon=True)
                self._thread.start()

    def demand(self) -> Demand:
        return Demand.of([self._event])

    def run_event(self, event: Event, state: Snapshot, logger: Logger) -> None:
        self._positions[state.rank] = state.seq, state.base_seq
        self._take(state)

    def run_ended(self, ending: Ending | None) -> None:
        self._has_ended = ending is not None
        beside = self._view.stream
        for recording in derived_recordings(beside.run_dir, [beside.attempt]) if ending and beside else ():
            for state in recording.snapshots([self._event]):
                self._take(state)

    def _follow(self) -> None:
        try:
            stream = self._open()
            turn = contextlib.nullcontext() if isinstance(stream, Subscriber) else _turns
            with contextlib.closing(stream), turn:
                asyncio.run(self._read(stream))
            self.problem = None
        except OffloopError as error:
            self.problem = str(error)
        finally:
            with self._lock:
                self._thread = None

    def _open(self) -> Subscriber | Recording:
        beside, after = self._view.stream, dict(self._positions)
        assert beside is not None
        if isinstance(beside, Subscriber):
            further = beside.beside(**vars(Subscription.of([self], after=after)))
            if further.attempt == beside.attempt:
                return further
            further.close()
        if beside.recording is None:
            raise RunError(f"attempt {beside.attempt} of run {beside.run_name!r} is no longer in the stream")
        recording = Recording(beside.recording)
        recording.skip_to(0, after)
        return recording

    async def _read(self, stream: RunStream) -> None:
        runner = Runner(stream, [self])

        async def leave() -> None:
            while time.monotonic() < self._until:
                await asyncio.sleep(_LOOK_SECONDS)
            runner.stop()

        leaving = asyncio.create_task(leave())
        try:
            await runner.run_async()
        finally:
            leaving.cancel()
