"""This process's connection to NATS servers, for readers of runs."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from offloop.bus.errors import BrokerError, OffloopError
from offloop.bus.jetstream.connection import CONNECT_SECONDS, PASSING, NatsClient, NatsServers, connected, in_words
from offloop.bus.jetstream.known import KnownRuns
from offloop.bus.runs.listing import ListedRun

_Answer = TypeVar("_Answer")

_RUNS_SECONDS = 15.0  # how long to wait for runs: servers elect a new leader for some seconds after one died


class NatsConnection:
    """Connection to NATS servers, in its own thread until it is closed. :meth:`at` finds it by its ``address``."""

    client: NatsClient
    known: KnownRuns

    def __init__(self, servers: NatsServers) -> None:
        self.servers = servers
        self.address: str = str(servers)
        self._users = 1
        self._failure: Exception | None = None
        self._ready = threading.Event()
        self._is_begun = False
        self._loop: asyncio.AbstractEventLoop
        self._task: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="offloop-nats", daemon=True)
        self._thread.start()
        self._ready.wait(CONNECT_SECONDS + 5)
        if not self._is_begun:
            self.close()
            raise self._failure or BrokerError(f"no NATS server answers at {servers}", address=self.address)

    @classmethod
    def shared(cls, servers: NatsServers) -> "NatsConnection":
        """Return the process's connection to these servers; each caller must close it. Raise as the constructor."""
        with _sharing:
            connection = _shared.get(servers)
            if connection is None or not connection._thread.is_alive():
                connection = _shared[servers] = cls(servers)
                connection._users = 0
            connection._users += 1
        return connection

    @classmethod
    def at(cls, address: str) -> "NatsConnection":
        with _sharing:
            for connection in _shared.values():
                if connection.address == address:
                    return connection
        raise BrokerError(f"this process has no connection to NATS at {address}: it was closed", address=address)

    @property
    def is_connected(self) -> bool:
        return self.client.is_connected

    def call(self, ask: Coroutine[Any, Any, _Answer], seconds: float) -> _Answer:
        """Run a request in its thread, and wait. After a BrokerError the servers may have executed it, or not."""
        if not self.is_connected:
            ask.close()
            self.check()
            raise BrokerError(f"no NATS server answers at {self.servers}", address=self.address)
        return self._answer(self.begin(ask), seconds)

    def _answer(self, asked: "concurrent.futures.Future[_Answer]", seconds: float) -> _Answer:
        try:
            return asked.result(seconds)
        except concurrent.futures.CancelledError:
            why = "the connection has been closed"
        except PASSING as error:
            asked.cancel()
            why = "no answer" if isinstance(error, TimeoutError) else in_words(error)
        self.check()
        raise BrokerError(f"NATS at {self.servers}: {why}", address=self.address)

    def begin(self, work: Coroutine[Any, Any, _Answer]) -> "concurrent.futures.Future[_Answer]":
        """Start a coroutine in its thread. Raise BrokerError if the connection was closed."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # its loop is closed
            work.close()
            self.check()
            raise BrokerError(f"the connection to {self.servers} has been closed", address=self.address) from None

    def soon(self, call: Callable[[], object]) -> None:
        """Call a function in its thread, unless the connection was closed."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call)

    def check(self) -> None:
        if self._failure is not None or self.client.failure is not None:
            raise self.client.failure or self._failure  # type: ignore[misc]

    def runs(self, name: str | None = None, *, every_host: bool = False) -> list[ListedRun]:
        """Return the runs in the servers, see :meth:`KnownRuns.runs`. Raise BrokerError if they do not answer."""
        self.check()
        self._answer(self.begin(self.known.until_known(name)), _RUNS_SECONDS)
        return self.known.runs(name, every_host=every_host)

    def hosts(self, run: str) -> list[ListedRun]:
        """Return an entry for each host of a run's newest attempt, in the order of ranks."""
        hosts = self.runs(run, every_host=True)
        newest = max((one.attempt for one in hosts), default=0)
        return sorted((one for one in hosts if one.attempt == newest), key=lambda one: one.ranks)

    def __enter__(self) -> "NatsConnection":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close it, unless another part of this process shares it."""
        with _sharing:
            self._users -= 1
            if self._users > 0:
                return
            if _shared.get(self.servers) is self:
                del _shared[self.servers]
        if (task := self._task) is not None:
            self.soon(task.cancel)
        self._thread.join()

    def _run(self) -> None:
        try:
            with suppress(asyncio.CancelledError):
                asyncio.run(self._serve())
        except OffloopError as error:
            self._failure = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        async with connected(self.servers, "reader") as self.client:
            self.known = KnownRuns(self.client)
            self._is_begun = True
            self._ready.set()
            await self.known.follow()


_shared: dict[NatsServers, NatsConnection] = {}
_sharing = threading.RLock()
