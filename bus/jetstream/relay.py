"""The host's end of requests: what readers elsewhere send to the broker of a run, and what it answers."""

import asyncio
import functools
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import zmq
import zmq.asyncio

from offloop.bus.errors import OffloopError, ProtocolError
from offloop.bus.jetstream import names
from offloop.bus.jetstream.connection import passing_errors
from offloop.bus.jetstream.dumps import DumpRelay
from offloop.bus.jetstream.raw import RawRecordings
from offloop.bus.net.sockets import connect_socket
from offloop.bus.protocol.frames import Control, decode_control, encode_control, split_frame
from offloop.bus.runs.directory import read_run

if TYPE_CHECKING:
    from nats.aio.msg import Msg

    from offloop.bus.jetstream.client import NatsClient

KINDS = ("lease", "handled", "command", "statistics", "fetch_segment")
"""Control messages that are passed on to the broker."""

MOST_READERS = 1000
_IDLE_SECONDS = 30.0


class Relay:
    """Passes control messages of readers on to the broker of a run on this machine, each reader by a connection of its
    own, so that its lease is its own; and the broker's answers back. Requests for the recordings it answers itself."""

    def __init__(self, client: "NatsClient", path: Path, run: str, host: str) -> None:
        self._client = client
        self._path = path
        self._run = run
        self._host = host
        self._serves_run = False
        self.raw = RawRecordings(path)
        self._context = zmq.asyncio.Context()
        # A viewer that answers go to another one's inbox for does not get that one's lease.
        self._readers: dict[tuple[str, bool], _Reader] = {}
        self._dumps = DumpRelay(client, path, run, host)

    async def __aenter__(self) -> "Relay":
        await self._serve(self._host)
        await self._dumps.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._dumps.stop()
        for reader in self._readers.values():
            reader.close()
        self.raw.close()
        self._context.destroy(linger=0)

    async def serve_run(self) -> None:
        """Takes what is for the host of the first rank, without naming it."""
        if not self._serves_run:
            self._serves_run = True
            await self._serve(None)

    async def _serve(self, host: str | None) -> None:
        for kind in (*KINDS, "fetch"):
            for may_command in (True, False) if kind != "command" else (True,):
                subject = names.request_subject(self._run, kind, host, may_command=may_command)
                take = functools.partial(self._take, may_command, kind, subject)
                await self._client.subscribe(subject, cb=take)

    async def _take(self, may_command: bool, kind: str, subject: str, message: "Msg") -> None:
        if not names.is_request(subject, message.subject, message.reply):
            return
        try:
            control = self._control(kind, message.data)
            if kind == "fetch":
                await self._client.publish(message.reply, await self.raw.answer(control))
            else:
                # A broker knows by the mark that the sender may only view.
                mark = {} if may_command else {"viewer": True}
                reader = self._reader(names.reader_of(message.reply), may_command)
                await reader.send(encode_control(kind, {**control.content, **mark}))
        except OffloopError as error:
            asked = (message.headers or {}).get("Ol-Id")
            content = {"reason": str(error), "error": type(error).__name__}
            refusal = encode_control("refused", content if asked is None else {**content, "id": asked})
            await self._client.publish(message.reply, refusal)

    def _control(self, kind: str, frame: bytes) -> Control:
        """A request that is what its subject says, by which servers have judged whether its sender may make it.

        Raises:
            OffloopError: it is another request.
        """
        control = decode_control(split_frame(frame)[1])
        if control.kind != kind or control.content.get("run") != self._run:
            raise ProtocolError(f"a request by the subject of {kind!r} of run {self._run!r} is for something else")
        return control

    def _reader(self, inbox: str, may_command: bool) -> "_Reader":
        """A reader's connection to the broker that is there now.

        Raises:
            OffloopError: none is there, or too many readers are.
        """
        now = time.monotonic()
        for key, known in list(self._readers.items()):
            if now - known.used > _IDLE_SECONDS:
                self._readers.pop(key).close()
        address = read_run(self._path).control_endpoint
        if address is None:
            raise OffloopError(f"run {self._run!r} is not live on its host: it takes no requests")
        reader = self._readers.get((inbox, may_command))
        if reader is None and len(self._readers) >= MOST_READERS:
            raise OffloopError(f"the bridge of run {self._run!r} serves {MOST_READERS} readers: it takes no more")
        if reader is None or reader.address != address:
            if reader is not None:
                reader.close()
            reader = _Reader(self._client, self._context, address, names.reply_subject(inbox, "answer", None))
            self._readers[inbox, may_command] = reader
        return reader


class _Reader:
    """A reader's connection to the broker."""

    def __init__(self, client: "NatsClient", context: Any, address: str, reply: str) -> None:
        self.address = address
        self.used = time.monotonic()
        self._client = client
        self._reply = reply
        self._socket: Any = connect_socket(context, zmq.DEALER, address)
        self._task = asyncio.create_task(self._answer())

    async def send(self, message: bytes) -> None:
        """Passes a message on; what the broker does not read at once is dropped, and asked again."""
        self.used = time.monotonic()
        with suppress(zmq.Again):
            await self._socket.send(message, zmq.NOBLOCK)

    async def _answer(self) -> None:
        while True:
            answer = await self._socket.recv()
            with suppress(*passing_errors()):
                await self._client.publish(self._reply, answer)

    def close(self) -> None:
        """Ends the connection."""
        self._task.cancel()
        self._socket.close(linger=0)
