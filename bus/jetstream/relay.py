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
from offloop.bus.jetstream.dumps import DumpRelay
from offloop.bus.jetstream.raw import KINDS as RAW_KINDS
from offloop.bus.jetstream.raw import RawRecordings
from offloop.bus.net.sockets import connect_socket
from offloop.bus.protocol.frames import PROTOCOL_VERSION, Control, decode_control, encode_control, split_frame
from offloop.bus.runs.directory import read_run

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg

KINDS = ("lease", "handled", "command", "statistics", "fetch_segment")
"""Control messages that are passed on."""

MOST_READERS = 1000
_IDLE_SECONDS = 30.0


class Relay:
    """Passes control messages of readers on to the broker of a run on this machine, each reader by a connection of its
    own, so that its lease is its own; and the broker's answers back."""

    def __init__(self, client: "Client", path: Path, run: str, host: str) -> None:
        self._client = client
        self._path = path
        self._run = run
        self._host = host
        self._serves_run = False
        self.raw = RawRecordings(path)
        self._context = zmq.asyncio.Context()
        # A viewer that answers go to another one's inbox for does not get that one's lease.
        self._readers: dict[tuple[str, bool], _Reader] = {}
        self._dumps = DumpRelay(client, path, run, host, self._context)

    async def __aenter__(self) -> "Relay":
        await self._serve(self._host)
        await self._dumps.start()
        return self

    async def serve_run(self) -> None:
        """Takes what is for the host of the first rank, without naming it."""
        if self._serves_run:
            return
        self._serves_run = True
        await self._serve(None)

    async def _serve(self, host: str | None) -> None:
        for kind in (*KINDS, *RAW_KINDS):
            for may_command in (True, False) if kind != "command" else (True,):
                subject = names.request_subject(self._run, kind, host, may_command=may_command)
                take = self._give if kind in RAW_KINDS else functools.partial(self._take, may_command)
                await self._client.subscribe(subject, cb=functools.partial(take, kind, subject))

    async def _give(self, kind: str, subject: str, message: "Msg") -> None:
        """Answers out of the recordings."""
        if not names.is_request(subject, message.subject, message.reply):
            return
        try:
            answer = await self.raw.answer(self._control(kind, message.data))
        except OffloopError as error:
            answer = _refusal(error, message)
        await self._client.publish(message.reply, answer)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._dumps.stop()
        for reader in self._readers.values():
            reader.close()
        self.raw.close()
        self._context.destroy(linger=0)

    async def _take(self, may_command: bool, kind: str, subject: str, message: "Msg") -> None:
        """Passes a request on to the broker."""
        if not names.is_request(subject, message.subject, message.reply):
            return
        now = time.monotonic()
        for inbox, known in list(self._readers.items()):
            if now - known.used > _IDLE_SECONDS:
                self._readers.pop(inbox).close()
        name = names.reader_of(message.reply)
        key = name, may_command
        reader = self._readers.get(key)
        try:
            request = self._checked(kind, may_command, message.data)
            control = read_run(self._path).control_endpoint
            if control is None:
                raise OffloopError(f"run {self._run!r} is not live on its host: it takes no requests")
            if reader is None or reader.address != control:
                if reader is not None:
                    reader.close()
                elif len(self._readers) >= MOST_READERS:
                    raise OffloopError(
                        f"the bridge of run {self._run!r} serves {MOST_READERS} readers: it takes no more"
                    )
                reader = _Reader(self._client, self._context, control, names.reply_subject(name, "answer", None))
                self._readers[key] = reader
        except OffloopError as error:
            await self._client.publish(message.reply, _refusal(error, message))
            return
        await reader.send(request)

    def _checked(self, kind: str, may_command: bool, frame: bytes) -> bytes:
        """A request as it is passed on: marked where its sender may only view.

        Raises:
            OffloopError: it is another request.
        """
        control = self._control(kind, frame)
        if may_command or control.version != PROTOCOL_VERSION:
            return frame
        return encode_control(kind, {**control.content, "viewer": True})

    def _control(self, kind: str, frame: bytes) -> Control:
        """A request that is what its subject says, by which servers have judged whether its sender may make it.

        Raises:
            OffloopError: it is another request.
        """
        control = decode_control(split_frame(frame)[1])
        if control.kind != kind or control.content.get("run") != self._run:
            raise ProtocolError(f"a request by the subject of {kind!r} of run {self._run!r} is for something else")
        return control


def _refusal(error: OffloopError, message: "Msg") -> bytes:
    """What is answered to a request that cannot be met."""
    asked = (message.headers or {}).get("Ol-Id")
    content = {"reason": str(error), "error": type(error).__name__}
    return encode_control("refused", content if asked is None else {**content, "id": asked})


class _Reader:
    """A reader's connection to the broker."""

    def __init__(self, client: "Client", context: Any, address: str, reply: str) -> None:
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
        from nats.errors import Error

        while True:
            answer = await self._socket.recv()
            with suppress(Error):
                await self._client.publish(self._reply, answer)

    def close(self) -> None:
        """Ends the connection."""
        self._task.cancel()
        self._socket.close(linger=0)
