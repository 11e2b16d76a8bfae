"""Lets the hosts of a run write their flight recorders together: what one of them writes, it announces to all."""

import asyncio
import json
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from offloop.bus.errors import OffloopError
from offloop.bus.jetstream import names
from offloop.bus.net.sockets import connect_socket
from offloop.bus.printing import one_line
from offloop.bus.protocol.frames import encode_control
from offloop.bus.runs.directory import read_run
from offloop.bus.runs.flight import AnnouncedDump, read_announced

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg

_LOOK_SECONDS = 0.2
_RECENT_SECONDS = 60.0
"""Older dumps of this host, from before its bridge came, are not announced."""
_ANSWER_SECONDS = 5.0
_MOST_KNOWN = 1000
_MOST_ID = 100


class DumpRelay:
    """Announces what this host's broker writes of its flight recorder, and has it write when another host announces.

    ``path`` is the run's directory, ``run`` and ``host`` what these are called, ``context`` where sockets are made."""

    def __init__(self, client: "Client", path: Path, run: str, host: str, context: Any) -> None:
        self._client = client
        self._path = path
        self._run = run
        self._context = context
        self._host = host
        self._known: dict[str, None] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begins to announce and to listen."""
        await self._client.subscribe(names.dump_subject(self._run), cb=self._take)
        self._task = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Announces what is new by now, and ends."""
        if self._task is not None:
            self._task.cancel()
            await self._announce_new()

    async def _watch(self) -> None:
        while True:
            await self._announce_new()
            await asyncio.sleep(_LOOK_SECONDS)

    async def _announce_new(self) -> None:
        from nats.errors import Error

        dump = read_announced(self._path)
        if dump is None or dump.id in self._known or time.time() - dump.time > _RECENT_SECONDS:
            return
        # It comes back to this host, too, which has written it already.
        self._note(dump.id)
        try:
            said = json.dumps({**asdict(dump), "host": self._host}).encode()
            await self._client.publish(names.dump_subject(self._run), said)
            await self._client.flush()
        except (Error, OSError):
            self._known.pop(dump.id, None)  # it is tried again

    def _note(self, identity: str) -> None:
        self._known[identity] = None
        if len(self._known) > _MOST_KNOWN:
            del self._known[next(iter(self._known))]

    async def _take(self, message: "Msg") -> None:
        if message.subject != names.dump_subject(self._run):
            return  # as in names.is_request
        try:
            said = json.loads(message.data)
            dump = msgspec.convert(said, AnnouncedDump)
            host = said["host"]
            if not isinstance(host, str) or dump.id in self._known or not 0 < len(dump.id) <= _MOST_ID:
                return
        except (ValueError, KeyError, TypeError, RecursionError):
            return
        # Before it is written, so that it is not announced in turn.
        self._note(dump.id)
        command = {
            "run": self._run,
            "command": "dump",
            "arguments": [dump.reason],
            "id": dump.id,
            "reason": one_line(f"on host {host}: {dump.detail}")[:1000],
        }
        with suppress(OffloopError, zmq.ZMQError, TimeoutError):
            run = read_run(self._path)
            if run.control_endpoint is None or run.last.number != dump.attempt:
                return
            socket: Any = connect_socket(self._context, zmq.DEALER, run.control_endpoint)
            try:
                await socket.send(encode_control("command", command))
                await asyncio.wait_for(socket.recv(), _ANSWER_SECONDS)
            finally:
                socket.close(linger=0)
