"""Relay at the host of a run: passes requests of readers and other hosts to the broker, and its answers back."""

import asyncio
import functools
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio
from nats.aio.msg import Msg

from offloop.bus.errors import OffloopError, ProtocolError
from offloop.bus.jetstream import names
from offloop.bus.jetstream.connection import PASSING, NatsClient
from offloop.bus.net.sockets import connect_socket
from offloop.bus.protocol.frames import Control, decode_control, encode_control, split_frame
from offloop.bus.runs.directory import read_run

KINDS = ("lease", "handled", "command", "statistics", "fetch_segment")  # control messages passed to the broker

MOST_READERS = 1000
_IDLE_SECONDS = 30.0


class Relay:
    """Passes readers' control messages to the broker of a run on this machine, and the answers back.

    Each reader has its own connection, and so its own lease."""

    def __init__(self, client: NatsClient, path: Path, run: str) -> None:
        self._client = client
        self._path = path
        self._run = run
        self._serves_run = False
        self._context = zmq.asyncio.Context()
        # A viewer that names another reader's inbox for answers must not get that reader's lease.
        self._readers: dict[tuple[str, bool], _Reader] = {}

    async def __aenter__(self) -> "Relay":
        return self

    async def __aexit__(self, *_: object) -> None:
        for reader in self._readers.values():
            reader.close()
        self._context.destroy(linger=0)

    async def serve_run(self) -> None:
        """Serve requests from now on: this is the first rank's host."""
        if self._serves_run:
            return
        self._serves_run = True
        for kind in KINDS:
            for may_command in (True, False) if kind != "command" else (True,):
                subject = names.request_subject(self._run, kind, may_command=may_command)
                take = functools.partial(self._take, may_command, kind, subject)
                await self._client.subscribe(subject, cb=take)

    async def _take(self, may_command: bool, kind: str, subject: str, message: Msg) -> None:
        if not names.is_request(subject, message.subject, message.reply):
            return
        try:
            control = self._control(kind, message.data)
            # By the mark the broker knows that the sender may only view.
            mark = {} if may_command else {"viewer": True}
            reader = self._reader(names.split_reply(message.reply)[0], may_command)
            await reader.send(encode_control(kind, {**control.content, **mark}))
        except OffloopError as error:
            asked = (message.headers or {}).get("Ol-Id")
            content = {"reason": str(error), "error": type(error).__name__}
            refusal = encode_control("refused", content if asked is None else {**content, "id": asked})
            await self._client.publish(message.reply, refusal)

    def _control(self, kind: str, frame: bytes) -> Control:
        """Decode a request. Its kind must match its subject, by which the servers checked the sender's permission."""
        control = decode_control(split_frame(frame)[1])
        if control.kind != kind or control.content.get("run") != self._run:
            raise ProtocolError(f"a request by the subject of {kind!r} of run {self._run!r} is for something else")
        return control

    def _reader(self, inbox: str, may_command: bool) -> "_Reader":
        now = time.monotonic()
        for key, known in list(self._readers.items()):
            if now - known.used > _IDLE_SECONDS:
                self._readers.pop(key).close()
        address = read_run(self._path).control_endpoint
        if address is None:
            raise OffloopError(f"run {self._run!r} is not live on its host: it takes no requests")
        reader = self._readers.get((inbox, may_command))
        if reader is None and len(self._readers) >= MOST_READERS:
            raise OffloopError(f"the bridge of run {self._run!r} serves {MOST_READERS} readers, the maximum")
        if reader is None or reader.address != address:
            if reader is not None:
                reader.close()
            reader = _Reader(self._client, self._context, address, names.reply_subject(inbox, "answer", None))
            self._readers[inbox, may_command] = reader
        return reader


class _Reader:
    def __init__(self, client: NatsClient, context: Any, address: str, reply: str) -> None:
        self.address = address
        self.used = time.monotonic()
        self._client = client
        self._reply = reply
        self._socket: Any = connect_socket(context, zmq.DEALER, address)
        self._task = asyncio.create_task(self._answer())

    async def send(self, message: bytes) -> None:
        self.used = time.monotonic()
        # Messages that the broker does not read at once are dropped; readers repeat them.
        with suppress(zmq.Again):
            await self._socket.send(message, zmq.NOBLOCK)

    async def _answer(self) -> None:
        while True:
            answer = await self._socket.recv()
            with suppress(*PASSING):
                await self._client.publish(self._reply, answer)

    def close(self) -> None:
        self._task.cancel()
        self._socket.close(linger=0)
