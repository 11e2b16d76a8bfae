"""A growing file of a bridge and its copy in the stream.

A message is a range of a recording that ends at a check record, or a piece of one; or a window of the host. Of each
file one is in flight at a time, and says which number the subject's last message must have: so a bridge that is late,
doubled or was killed never writes twice or out of order. Whatever goes wrong, the bridge reads the subject's last
message and continues behind it: what servers have forgotten is sent again, and what another bridge has sent ends this
one."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from offloop.bus.errors import BrokerError, RecordingError
from offloop.bus.jetstream import names
from offloop.bus.jetstream.asking import Asking
from offloop.bus.jetstream.connection import PASSING, answer_of
from offloop.bus.jetstream.run_stream import RunFileStream
from offloop.bus.jetstream.stored import get, last_range
from offloop.bus.printing import one_line
from offloop.bus.recording.growing import GrowingRecording
from offloop.bus.recording.host_windows import GrowingWindows

_LOOK_SECONDS = 0.1
_MAX_MESSAGE = 512 * 1024
"""Bytes of a file in one message: servers take 1 MiB unless configured otherwise."""


class BridgeReplacedError(BrokerError):
    """Another bridge copies this recording now."""


class ShorterError(RecordingError):
    """A file is the beginning of its copy in the stream: its newest part was not on the disk in a power failure."""


class Copied(NamedTuple):
    """How far the copy of a file goes."""

    offset: int = 0
    """Bytes that are there and stay."""
    end: int = 0
    """Bytes that are there, with those behind the last check record of a closed file."""
    sequence: int = 0
    """Number of the subject's last message."""
    bridge: str = ""
    """Who sent that."""


class FileCopy:
    """A growing file and its copy in a stream.

    Args:
        stream: where the copy is.
        asking: asks the servers.
        subject: the subject of the copy.
        file: the file, to be closed by :meth:`close`."""

    def __init__(
        self, stream: RunFileStream, asking: Asking, subject: str, file: GrowingRecording | GrowingWindows
    ) -> None:
        self._stream = stream
        self._asking = asking
        self._subject = subject
        self.file = file
        self.at = Copied()
        """How far the copy goes."""

    def close(self) -> None:
        """Closes the file."""
        self._asking.forget(self._subject)
        self.file.close()

    async def follow(self, has_ended: Callable[[], bool]) -> None:
        """Copies until nothing more is written and all of it is there."""
        await self._find()
        while True:
            # Looked at first: what was written before the run ended is in the file then.
            is_closed = has_ended()
            end = self.file.look()
            if self.at.offset < end:
                await self._send(end, final=None)
            elif is_closed and self.at.end != self.file.size:
                await self._send(self.file.size, final=end)
            elif is_closed:
                return
            else:
                await asyncio.sleep(_LOOK_SECONDS)

    async def _send(self, end: int, final: int | None) -> None:
        """Sends the next message of what is missing up to ``end``; ``final`` is where the end of a closed file begins,
        if that is what is sent."""
        at = self.at
        # What followed the last check record before is no more.
        begin = at.offset if final is None else max(at.end, final)
        if final is not None and at.end > end:
            begin = final
        most = min(_MAX_MESSAGE, max(self._stream.client.max_payload - 4096, 1024))
        data = self.file.piece(begin, end, most)
        try:
            sequence = await self._publish(begin, data, final)
        except PASSING as error:
            await self._asking.note_refused(self._subject, error)
            # It may have arrived.
            await self._find()
        else:
            self._asking.note_taken(self._subject)
            end = begin + len(data)
            self.at = Copied(end if final is None else final, end, sequence, self._stream.bridge)

    async def _publish(self, begin: int, data: bytes, final: int | None) -> int:
        """Sends a range of the file as the message behind the last one; returns its number."""
        stream = self._stream
        headers = {
            names.OFFSET: str(begin),
            names.BRIDGE: stream.bridge,
            "Nats-Expected-Last-Subject-Sequence": str(self.at.sequence),
            **({} if stream.run_id is None else {names.RUN_ID: stream.run_id}),
            **({} if final is None else {names.FINAL: str(final)}),
        }
        sending = stream.client.js.publish(self._subject, data, headers=headers, stream=stream.name)
        return (await answer_of(stream.client, sending)).seq

    async def check(self) -> None:
        """Looks whether another bridge took the place of this one.

        Raises:
            BridgeReplacedError: it did."""
        await self._look()

    async def _look(self) -> tuple[Copied, bytes]:
        """How far the copy goes, and the content of its last message."""
        before, bridge = self.at, self._stream.bridge
        at: Copied
        at, data = await self._asking.until_answered(self._last)
        if at.bridge not in ("", bridge) and before.bridge == bridge and at.end > before.end:
            raise BridgeReplacedError(f"another bridge, {one_line(at.bridge)}, copies run {self._stream.run!r} now")
        return at, data

    async def _last(self) -> tuple[Copied, bytes]:
        message, number = await last_range(self._stream.client, self._stream.name, self._subject)
        if message is None or message.offset is None:
            # The stream may have been removed.
            await self._stream.make()
            return Copied(sequence=number), b""
        self._stream.check_owner(message.headers.get(names.RUN_ID))
        end = message.offset + len(message.data)
        offset = end if message.final is None else message.final
        return Copied(offset, end, number, message.headers.get(names.BRIDGE, "?")), message.data

    async def _find(self) -> None:
        before = self.at
        at, data = await self._look()
        # Who was here before is what a later one is compared with.
        self.at = at = at._replace(bridge=self._stream.bridge)
        await self._compare(at, data)
        if at.end < before.end:
            self._asking.status.resent += before.end - at.end
            forgotten = f"{before.end - at.end:,} bytes of run {self._stream.run}"
            self._asking.say(f"the servers have forgotten {forgotten}: sent again")

    async def _compare(self, at: Copied, last: bytes) -> None:
        """Compares the file with the last message, and with the first one where the file ends before the last.

        Raises ShorterError: the file ends before its copy; RecordingError: they differ."""
        stream, path, end = self._stream.name, self.file.path, self.file.look()
        begin = at.end - len(last)
        if at.offset > end and begin >= end:
            found = await self._asking.until_answered(lambda: get(self._stream.client, stream, self._subject, 1))
            begin, last = (0, b"") if found is None else (found.offset or 0, found.data)
        # What is behind the last check record may be written anew, or is what a power failure left.
        copied = last[: max(0, min(at.offset, end) - begin)]
        if self.file.read_at(begin, len(copied)) != copied:
            raise RecordingError(
                f"the stream {stream} and {path} differ from byte {begin:,} on: where the file is the right one, "
                "remove the stream, or give this run another name",
                path=path,
            )
        if at.offset > end:
            raise ShorterError(
                f"{path} ends {at.offset - end:,} bytes before its copy in the stream {stream}", path=path
            )
