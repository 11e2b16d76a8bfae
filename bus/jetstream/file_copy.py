"""A growing file of a bridge and its copy in the stream.

A message is a range of a recording that ends at a check record, a piece of one, or a window of the host. Each file has
one message in flight, which names the expected sequence number of the subject's last message. So a late, second or
killed bridge never writes twice or out of order. After any error the bridge reads the subject's last message and
continues after it: it repeats what the servers have lost, and stops if another bridge has written."""

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
_MAX_MESSAGE = 512 * 1024  # bytes of a file in one message; servers take 1 MiB by default


class BridgeReplacedError(BrokerError):
    """Another bridge copies this recording now."""


class ShorterError(RecordingError):
    """A file ends before its copy does: a power failure has lost its newest part."""


class Copied(NamedTuple):
    """Extent of a copy."""

    offset: int = 0  # number of final bytes
    end: int = 0  # number of bytes, including those after the last check record of a closed file
    sequence: int = 0  # sequence number of the subject's last message
    bridge: str = ""  # sender of that message


class FileCopy:
    """A growing file and its copy under a subject of a stream. The file is closed by :meth:`close`."""

    def __init__(
        self, stream: RunFileStream, asking: Asking, subject: str, file: GrowingRecording | GrowingWindows
    ) -> None:
        self._stream = stream
        self._asking = asking
        self._subject = subject
        self.file = file
        self.at: Copied = Copied()

    def close(self) -> None:
        self._asking.forget(self._subject)
        self.file.close()

    async def follow(self, has_ended: Callable[[], bool]) -> None:
        await self._find()
        while True:
            # Checked before look(): after the run's end, the file is complete.
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
        """Send the next message of the bytes up to ``end``; ``final`` is the offset of a closed file's end, if sent."""
        at = self.at
        # The copy's bytes after the last check record are obsolete.
        begin = at.offset if final is None else max(at.end, final)
        if final is not None and at.end > end:
            begin = final
        most = min(_MAX_MESSAGE, max(self._stream.client.max_payload - 4096, 1024))
        data = self.file.piece(begin, end, most)
        try:
            sequence = await self._publish(begin, data, final)
        except PASSING as error:
            await self._asking.note_refused(self._subject, error)
            # The message may have arrived.
            await self._find()
        else:
            self._asking.note_taken(self._subject)
            end = begin + len(data)
            self.at = Copied(end if final is None else final, end, sequence, self._stream.bridge)

    async def _publish(self, begin: int, data: bytes, final: int | None) -> int:
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
        """Raise BridgeReplacedError if another bridge took the place of this one."""
        await self._look()

    async def _look(self) -> tuple[Copied, bytes]:
        """Return the copy's extent, and the content of its last message."""
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
        # Compare later with this bridge, and not with a previous one.
        self.at = at = at._replace(bridge=self._stream.bridge)
        await self._compare(at, data)
        if at.end < before.end:
            self._asking.status.resent += before.end - at.end
            forgotten = f"{before.end - at.end:,} bytes of run {self._stream.run}"
            self._asking.say(f"the servers have forgotten {forgotten}: sent again")

    async def _compare(self, at: Copied, last: bytes) -> None:
        """Compare the file with the last message, or with the first one if the file ends before the last."""
        stream, path, end = self._stream.name, self.file.path, self.file.look()
        begin = at.end - len(last)
        if at.offset > end and begin >= end:
            found = await self._asking.until_answered(lambda: get(self._stream.client, stream, self._subject, 1))
            begin, last = (0, b"") if found is None else (found.offset or 0, found.data)
        # Bytes after the last check record may have been replaced, or damaged by a power failure.
        copied = last[: max(0, min(at.offset, end) - begin)]
        if self.file.read_at(begin, len(copied)) != copied:
            raise RecordingError(
                f"the stream {stream} and {path} differ from byte {begin:,} on: if the file is right, remove the "
                "stream, or give this run another name",
                path=path,
            )
        if at.offset > end:
            raise ShorterError(f"{path} ends {at.offset - end:,} bytes before its copy in stream {stream}", path=path)
