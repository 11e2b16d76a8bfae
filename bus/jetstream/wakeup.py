"""Event that wakes a thread, or a task of another event loop."""

import asyncio
import threading
from contextlib import suppress


class Wakeup:
    """Event for one waiter at a time, with or without an event loop."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._waiting: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def set(self) -> None:
        """Wake the waiter, or the next one."""
        self._event.set()
        if (waiting := self._waiting) is not None:
            with suppress(RuntimeError):  # its loop is closed
                waiting[0].call_soon_threadsafe(waiting[1].set)

    def clear(self) -> None:
        self._event.clear()

    def wait(self, seconds: float) -> bool:
        return self._event.wait(seconds)

    async def wait_async(self, seconds: float) -> bool:
        woken = asyncio.Event()
        self._waiting = asyncio.get_running_loop(), woken
        if not self._event.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(woken.wait(), seconds)
        self._waiting = None
        return self._event.is_set()
