"""Lets the hosts of a run write their flight recorders together: what one of them writes, it announces to all."""

import asyncio
import contextlib
import json
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from offloop.bus.errors import OffloopError
from offloop.bus.jetstream import names
from offloop.bus.jetstream.connection import passing_errors
from offloop.bus.net.channels import SocketChannel
from offloop.bus.printing import one_line
from offloop.bus.runs.directory import read_run
from offloop.bus.runs.flight import ANNOUNCED_DUMP, AnnouncedDump

if TYPE_CHECKING:
    from nats.aio.msg import Msg

    from offloop.bus.jetstream.client import NatsClient

_LOOK_SECONDS = 0.2
_RECENT_SECONDS = 60.0
"""Older dumps of this host, from before its bridge came, are not announced."""
_MOST_ID = 100
_ANSWER_SECONDS = 5.0


class DumpRelay:
    """Announces what this host's broker writes of its flight recorder, and has it write when another host announces.

    ``path`` is the run's directory, ``run`` and ``host`` what these are called."""

    def __init__(self, client: "NatsClient", path: Path, run: str, host: str) -> None:
        self._client = client
        self._path = path
        self._run = run
        self._host = host
        self._subject = names.dump_subject(run)
        self._known: deque[str] = deque(maxlen=1000)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begins to announce and to listen."""
        await self._client.subscribe(self._subject, cb=self._take)
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
        dump = ANNOUNCED_DUMP.find(self._path)
        if dump is None or dump.id in self._known or time.time() - dump.time > _RECENT_SECONDS:
            return
        # It comes back to this host, too, which has written it already.
        self._known.append(dump.id)
        try:
            await self._client.publish(self._subject, json.dumps({**asdict(dump), "host": self._host}).encode())
            await self._client.flush()
        except passing_errors():
            self._known.remove(dump.id)  # it is tried again

    async def _take(self, message: "Msg") -> None:
        if message.subject != self._subject:
            return  # as in names.is_request
        try:
            said = json.loads(message.data)
            dump = msgspec.convert(said, AnnouncedDump)
        except (ValueError, RecursionError):
            return
        if dump.id in self._known or not 0 < len(dump.id) <= _MOST_ID:
            return
        # Before it is written, so that it is not announced in turn.
        self._known.append(dump.id)
        command = {
            "run": self._run,
            "command": "dump",
            "arguments": [dump.reason],
            "id": dump.id,
            "reason": one_line(f"on host {said.get('host')}: {dump.detail}")[:1000],
        }
        with contextlib.suppress(OffloopError):
            run = read_run(self._path)
            if run.control_endpoint is not None and run.last.number == dump.attempt:
                await asyncio.to_thread(_command, run.control_endpoint, command)


def _command(address: str, command: dict[str, Any]) -> None:
    """Sends a command to a broker under the id that all hosts know it by."""
    with contextlib.closing(SocketChannel(address)) as channel:
        channel.send("command", command)
        channel.wait(_ANSWER_SECONDS)
