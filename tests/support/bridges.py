"""Bridges in the test's own process."""

import asyncio
import contextlib
import threading

from offloop.bus.jetstream import bridge, connection, known
from offloop.bus.jetstream.bridge import Bridge


def hurry(monkeypatch):
    """Bridges report often, and readers notice soon that one is silent."""
    monkeypatch.setattr(bridge, "_TELL_SECONDS", 0.05)
    monkeypatch.setattr(known, "FRESH_SECONDS", 2.0)
    monkeypatch.setattr(known, "_FIRST_SECONDS", 0.5)
    monkeypatch.setattr(connection, "_RECONNECT_SECONDS", 0.1)


class Copying:
    """A bridge in a thread."""

    def __init__(self, path, servers, **options):
        self.said, self.error = [], None
        self.bridge = Bridge(path, servers, say=self.said.append, **options)
        self._runner = asyncio.Runner()
        self._loop = self._runner.get_loop()
        self._task = self._loop.create_task(self.bridge.copy())
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self):
        async def wait():
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

        try:
            with self._runner:
                self._runner.run(wait())
        except Exception as error:  # noqa: BLE001  shown by wait()
            self.error = error

    @property
    def status(self):
        return self.bridge.status

    def has_all_of(self, run):
        return self.status.copied == run.writer.size

    def wait(self):
        self.thread.join(200)
        assert not self.thread.is_alive()
        if self.error is not None:
            raise self.error

    def stop(self):
        if self.thread.is_alive():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._task.cancel)
        self.thread.join(200)
