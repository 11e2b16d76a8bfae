"""Runs callbacks one event at a time, when a test says so."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from types import TracebackType
from typing import Any

from bus.errors import ConfigurationError
from bus.snapshot import Snapshot
from consumers.callback import Callback
from consumers.logger import LoggerDestination
from consumers.runner import CallbackError, OnError
from consumers.testing.harness import Harness, as_callbacks

__all__ = ["Stepper"]


class Stepper:
    """A runner whose event loop runs only within :meth:`handle`, until the callbacks have handled the event.

    ``source`` says what the run is called and how it ended. Use it as a context manager: at the end the callbacks are
    closed.

    Raises:
        ConfigurationError: a callback handles no event, or an event loop runs here already.
    """

    def __init__(
        self,
        source: Iterable[Snapshot],
        callbacks: Sequence[Callback],
        loggers: Sequence[LoggerDestination],
        on_error: OnError,
    ) -> None:
        made = as_callbacks(callbacks)
        self._feed = _Feed(source)
        self._harness = Harness(self._feed, made, loggers, on_error)
        self.logged = self._harness.logged

    def __enter__(self) -> "Stepper":
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            raise ConfigurationError("an event loop runs here already: attach callbacks in a test that is not async")
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self._harness.runner.run_async())
        self._turn()
        return self

    def handle(self, snapshot: Snapshot) -> None:
        """Takes a snapshot through the callbacks; raises what one of them raises."""
        snapshot.bind(self._harness.keep_command)
        self._feed.put(snapshot)
        self._turn()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._feed.put(None)
            self._turn(to_its_end=True)
        except Exception:
            # What the test raised tells more than what comes of it while callbacks are closed.
            if error is None:
                raise
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def _turn(self, to_its_end: bool = False) -> None:
        """Lets the event loop run until the next snapshot is asked for."""
        self._loop.run_until_complete(self._next_turn(to_its_end))
        if self._task.done():
            error = self._task.exception()
            if error is not None and not isinstance(error, CallbackError):
                raise error
            self._harness.check()

    async def _next_turn(self, to_its_end: bool) -> None:
        if to_its_end:
            await asyncio.wait({self._task})
            return
        asked = self._loop.create_task(self._feed.asked_for())
        await asyncio.wait({self._task, asked}, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()


class _Feed:
    """Snapshots for a runner, as they are put here; ``None`` ends them."""

    def __init__(self, source: Iterable[Snapshot]) -> None:
        self._source = source
        self._queue: asyncio.Queue[Snapshot | None] = asyncio.Queue()
        self._asked = asyncio.Event()

    def put(self, snapshot: Snapshot | None) -> None:
        self._asked.clear()
        self._queue.put_nowait(snapshot)

    async def asked_for(self) -> None:
        """Returns when everything that was put here has been handled."""
        await self._asked.wait()

    async def __aiter__(self) -> AsyncIterator[Snapshot]:
        while True:
            self._asked.set()
            snapshot = await self._queue.get()
            if snapshot is None:
                return
            yield snapshot

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)
