"""The gateway: a broker's place, behind which are NATS servers. So whatever reads runs through a broker reads them from
JetStream too."""

import asyncio
import concurrent.futures
import tempfile
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from offloop.bus.errors import BrokerError, OffloopError
from offloop.bus.jetstream.answering import Answering
from offloop.bus.jetstream.connection import CONNECT_SECONDS, NatsServers, connected, in_words, passing_errors
from offloop.bus.net.sockets import stand_in

if TYPE_CHECKING:
    from nats.js.client import JetStreamContext

    from offloop.bus.jetstream.client import NatsClient

    Ask: TypeAlias = Callable[[JetStreamContext], Coroutine[Any, Any, "Answer"]]

Answer = TypeVar("Answer")


class Gateway:
    """A broker's place for the readers of this process, behind which are NATS servers: at :attr:`address`, which is a
    Unix socket in a folder of this user alone. It works in a thread until it is closed.

    Raises:
        BrokerError: no server answers, or it refuses.
        ConfigurationError: the key or certificate cannot be read.
    """

    def __init__(self, servers: NatsServers) -> None:
        self._servers = servers
        self._users = 1
        self._folder = tempfile.TemporaryDirectory(prefix="offloop-")
        self.address = f"ipc://{self._folder.name}/broker.sock"
        """Where it is reached, as a broker is."""
        self.stands_for = str(servers)
        """By this address everything in this process finds it."""
        self._stream = f"ipc://{self._folder.name}/stream.sock"
        self._failure: Exception | None = None
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._client: NatsClient | None = None
        self._jetstream: JetStreamContext | None = None
        self._thread = threading.Thread(target=self._run, name="offloop-gateway", daemon=True)
        self._thread.start()
        self._ready.wait(CONNECT_SECONDS + 5)
        if self._failure is not None or not self._ready.is_set():
            self.close()
            raise self._failure or BrokerError(f"no NATS server answers at {servers}", address=str(servers))
        stand_in(self.stands_for, self.address)

    @classmethod
    def shared(cls, servers: NatsServers) -> "Gateway":
        """The one of this process for these servers; each who asks for it closes it.

        Raises as the constructor does."""
        with _sharing:
            gateway = _shared.get(servers)
            if gateway is None or not gateway._thread.is_alive():
                gateway = _shared[servers] = cls(servers)
                gateway._users = 0
            gateway._users += 1
        return gateway

    @classmethod
    def at(cls, address: str) -> "Gateway | None":
        """The one of this process that stands for servers, if there is one."""
        with _sharing:
            return next((gateway for gateway in _shared.values() if gateway.stands_for == address), None)

    @property
    def is_connected(self) -> bool:
        """Whether a server is there at this moment."""
        return self._client is not None and self._client.is_connected

    @property
    def connection(self) -> int:
        """Which connection to the servers this is, counted from 0."""
        return 0 if self._client is None else int(self._client.stats["reconnects"])

    @property
    def max_payload(self) -> int:
        """How large a message the servers take, in bytes."""
        return 0 if self._client is None else self._client.max_payload

    def call(self, ask: "Ask[Answer]", seconds: float) -> "Answer":
        """Asks the servers, and waits in this thread for what they answer.

        Raises:
            BrokerError: they do not answer within so many seconds, or refuse; whether they have done it is not known.
        """
        if not self.is_connected:
            raise BrokerError(f"no NATS server answers at {self._servers}", address=self.stands_for)
        asked = self.begin(ask)
        try:
            return asked.result(seconds)
        except concurrent.futures.CancelledError:
            why = "the connection has been closed"
        except passing_errors() as error:
            asked.cancel()
            why = "no answer" if isinstance(error, TimeoutError) else in_words(error)
        if self._client is not None and self._client.failure is not None:
            raise self._client.failure
        raise BrokerError(f"NATS at {self._servers}: {why}", address=self.stands_for)

    def begin(self, ask: "Ask[Answer]") -> "concurrent.futures.Future[Answer]":
        """Has the gateway's thread ask the servers.

        Raises:
            BrokerError: it has ended.
        """
        assert self._loop is not None
        assert self._jetstream is not None
        asking = ask(self._jetstream)
        try:
            return asyncio.run_coroutine_threadsafe(asking, self._loop)
        except RuntimeError:  # its loop is closed
            asking.close()
            raise BrokerError(f"the connection to {self._servers} has been closed", address=self.stands_for) from None

    def __enter__(self) -> "Gateway":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends it, unless another part of this process shares it."""
        with _sharing:
            self._users -= 1
            if self._users > 0:
                return
            if _shared.get(self._servers) is self:
                del _shared[self._servers]
        loop, task = self._loop, self._task
        if loop is not None and task is not None:
            with suppress(RuntimeError):  # it has ended
                loop.call_soon_threadsafe(task.cancel)
        self._thread.join()
        self._folder.cleanup()

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
        async with connected(self._servers, "reader") as (client, jetstream):
            self._client, self._jetstream = client, jetstream
            answering = Answering(client, jetstream, self.address, self._stream)
            try:
                self._ready.set()
                await answering.serve()
            finally:
                await answering.close()


_shared: dict[NatsServers, Gateway] = {}
_sharing = threading.RLock()
