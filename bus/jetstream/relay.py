"""Relay at the host of a run: passes requests of readers and other hosts to the broker, and its answers back."""

import asyncio
import functools
import json
import time
from collections import deque
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from nats.aio.msg import Msg

from offloop.bus.errors import OffloopError, ProtocolError
from offloop.bus.jetstream import names
from offloop.bus.jetstream.connection import PASSING, NatsClient
from offloop.bus.net.channels import SocketChannel
from offloop.bus.net.sockets import connect_socket
from offloop.bus.printing import one_line
from offloop.bus.protocol.frames import Control, decode_control, encode_control, split_frame
from offloop.bus.runs.directory import read_run
from offloop.bus.runs.flight import ANNOUNCED_DUMPS, AnnouncedDump

KINDS = ("lease", "handled", "command", "statistics", "fetch_segment")  # control messages passed to the broker

MOST_READERS = 1000
_IDLE_SECONDS = 30.0
_LOOK_SECONDS = 0.2
_RECENT_SECONDS = 60.0  # dumps older than this, from before the bridge started, are not announced
_MOST_ID = 100
_ANSWER_SECONDS = 5.0


class Relay:
    """Passes readers' control messages to the broker of a run on this machine, and the answers back.

    Each reader has its own connection, and so its own lease."""

    def __init__(self, client: NatsClient, path: Path, run: str, host: str) -> None:
        self._client = client
        self._path = path
        self._run = run
        self._serves_run = False
        self._context = zmq.asyncio.Context()
        # A viewer that names another reader's inbox for answers must not get that reader's lease.
        self._readers: dict[tuple[str, bool], _Reader] = {}
        self._dumps = _DumpRelay(client, path, run, host)

    async def __aenter__(self) -> "Relay":
        await self._dumps.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._dumps.stop()
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


class _DumpRelay:
    """Announces dumps of this host's flight recorder, and has it write one when another host announces a dump."""

    def __init__(self, client: NatsClient, path: Path, run: str, host: str) -> None:
        self._client = client
        self._path = path
        self._run = run
        self._host = host
        self._subject = names.dump_subject(run)
        self._known: deque[str] = deque(maxlen=1000)

    async def start(self) -> None:
        await self._client.subscribe(self._subject, cb=self._take)
        self._watching = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        self._watching.cancel()
        await self._announce_new()

    async def _watch(self) -> None:
        while True:
            await self._announce_new()
            await asyncio.sleep(_LOOK_SECONDS)

    async def _announce_new(self) -> None:
        for dump in ANNOUNCED_DUMPS.find(self._path) or ():
            if dump.id in self._known or time.time() - dump.time > _RECENT_SECONDS:
                continue
            # The message also returns to this host, which must not write again.
            self._known.append(dump.id)
            try:
                await self._client.publish(self._subject, json.dumps({**asdict(dump), "host": self._host}).encode())
                await self._client.flush()
            except PASSING:
                self._known.remove(dump.id)  # retry

    async def _take(self, message: Msg) -> None:
        if message.subject != self._subject:
            return  # see names.is_request
        try:
            said = json.loads(message.data)
            dump = msgspec.convert(said, AnnouncedDump)
        except (ValueError, RecursionError):
            return
        if dump.id in self._known or not 0 < len(dump.id) <= _MOST_ID:
            return
        # Before it is written, so that it is not announced again.
        self._known.append(dump.id)
        command = {
            "run": self._run,
            "command": "dump",
            "arguments": [dump.reason],
            "id": dump.id,
            "reason": one_line(f"on host {said.get('host')}: {dump.detail}")[:1000],
        }
        with suppress(OffloopError):
            run = read_run(self._path)
            if run.control_endpoint is not None and run.last.number == dump.attempt:
                await asyncio.to_thread(_command, run.control_endpoint, command)


def _command(address: str, command: dict[str, Any]) -> None:
    """Send a command to a broker under the id that all hosts know."""
    with closing(SocketChannel(address)) as channel:
        channel.send("command", command)
        channel.wait(_ANSWER_SECONDS)
