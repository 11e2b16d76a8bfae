"""The connection of this process to NATS servers, for those who read runs there."""

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

_RUNS_SECONDS = 15.0
"""How long runs are waited for: servers of which one died choose a leader for some seconds."""


class NatsConnection:
    """A connection to NATS servers, in a thread of its own until it is closed. :meth:`at` finds it by its
    :attr:`address`.

    Raises BrokerError: no server answers, or it refuses; ConfigurationError: the key or certificate cannot be read."""

    client: NatsClient
    known: KnownRuns
    """What is known of runs."""

    def __init__(self, servers: NatsServers) -> None:
        self.servers = servers
        self.address = str(servers)
        """Where the servers are."""
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
        """The one of this process to these servers; each who asks for it closes it.

        Raises as the constructor does."""
        with _sharing:
            connection = _shared.get(servers)
            if connection is None or not connection._thread.is_alive():
                connection = _shared[servers] = cls(servers)
                connection._users = 0
            connection._users += 1
        return connection

    @classmethod
    def at(cls, address: str) -> "NatsConnection":
        """The one of this process to the servers at an address. Raises BrokerError: there is none."""
        with _sharing:
            for connection in _shared.values():
                if connection.address == address:
                    return connection
        raise BrokerError(f"this process has no connection to NATS at {address}: it was closed", address=address)

    @property
    def is_connected(self) -> bool:
        """Whether a server is there at this moment."""
        return self.client.is_connected

    def call(self, ask: Coroutine[Any, Any, _Answer], seconds: float) -> _Answer:
        """Has its thread ask the servers, and waits for the answer.

        Raises BrokerError: they do not answer within so many seconds, or refuse; whether they have done it is not
        known."""
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
        """Runs something in its thread. Raises BrokerError: it has ended."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # its loop is closed
            work.close()
            self.check()
            raise BrokerError(f"the connection to {self.servers} has been closed", address=self.address) from None

    def soon(self, call: Callable[[], object]) -> None:
        """Calls something in its thread, unless it has ended."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call)

    def check(self) -> None:
        """Raises what ended the connection for good, if something has."""
        if self._failure is not None or self.client.failure is not None:
            raise self.client.failure or self._failure  # type: ignore[misc]

    def runs(self, name: str | None = None, host: str | None = None) -> list[ListedRun]:
        """The runs in the servers, see :meth:`KnownRuns.runs`. Raises BrokerError: the servers do not answer."""
        self.check()
        self._answer(self.begin(self.known.until_known(name)), _RUNS_SECONDS)
        return self.known.runs(name, host)

    def hosts(self, run: str) -> list[ListedRun]:
        """The entry of each host of a run's newest attempt, in the order of their ranks, see :meth:`KnownRuns.runs`.

        Raises BrokerError: the servers do not answer."""
        hosts = self.runs(run, "*")
        newest = max((one.attempt for one in hosts), default=0)
        return sorted((one for one in hosts if one.attempt == newest), key=lambda one: one.ranks)

    def __enter__(self) -> "NatsConnection":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends it, unless another part of this process shares it."""
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
