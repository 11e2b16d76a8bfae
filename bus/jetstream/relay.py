"""The host's end of requests: what readers elsewhere send to the broker of a run, and what it answers."""

import asyncio
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import zmq
import zmq.asyncio

from bus.errors import OffloopError
from bus.jetstream import names
from bus.net.sockets import connect_socket
from bus.protocol.frames import encode_control
from bus.runs.directory import read_run

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg

KINDS = ("want", "handled", "command", "statistics", "fetch", "fetch_segment")
"""Control messages that are passed on."""

MOST_READERS = 1000
_IDLE_SECONDS = 30.0


class Relay:
    """Passes control messages of readers on to the broker of a run on this machine, each reader by a connection of its
    own, so that its lease is its own; and the broker's answers back."""

    def __init__(self, client: "Client", path: Path, run: str) -> None:
        self._client = client
        self._path = path
        self._run = run
        self._context = zmq.asyncio.Context()
        self._readers: dict[str, _Reader] = {}

    async def __aenter__(self) -> "Relay":
        for kind in KINDS:
            subject = names.request_subject(self._run, kind)
            await self._client.subscribe(subject, cb=self._take)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for reader in self._readers.values():
            reader.close()
        self._context.destroy(linger=0)

    async def _take(self, message: "Msg") -> None:
        now = time.monotonic()
        for name, known in list(self._readers.items()):
            if now - known.used > _IDLE_SECONDS:
                self._readers.pop(name).close()
        if not message.reply:
            return
        reader = self._readers.get(message.reply)
        try:
            control = read_run(self._path).control
            if control is None:
                raise OffloopError(f"run {self._run!r} is not live on its host: it takes no requests")
            if reader is None or reader.address != control:
                if reader is not None:
                    reader.close()
                elif len(self._readers) >= MOST_READERS:
                    raise OffloopError(
                        f"the bridge of run {self._run!r} serves {MOST_READERS} readers: it takes no more"
                    )
                reader = _Reader(self._client, self._context, control, message.reply)
                self._readers[message.reply] = reader
        except OffloopError as error:
            answer = encode_control("refused", {"reason": str(error), "error": "BrokerError", **_identity(message)})
            await self._client.publish(message.reply, answer)
            return
        await reader.send(message.data)


def _identity(message: "Msg") -> dict[str, str]:
    """What a refusal says of what it refuses."""
    asked = (message.headers or {}).get("Ol-Id")
    return {} if asked is None else {"id": asked}


class _Reader:
    """A reader's connection to the broker."""

    def __init__(self, client: "Client", context: Any, address: str, reply: str) -> None:
        self.address = address
        self.used = time.monotonic()
        self._client = client
        self._reply = reply
        self._socket: Any = connect_socket(context, zmq.DEALER, address, None)
        self._task = asyncio.create_task(self._answer())

    async def send(self, message: bytes) -> None:
        """Passes a message on; what the broker does not read at once is dropped, and asked again."""
        self.used = time.monotonic()
        with suppress(zmq.Again):
            await self._socket.send(message, zmq.NOBLOCK)

    async def _answer(self) -> None:
        from nats.errors import Error

        while True:
            answer = await self._socket.recv()
            with suppress(Error):
                await self._client.publish(self._reply, answer)

    def close(self) -> None:
        """Ends the connection."""
        self._task.cancel()
        self._socket.close(linger=0)
