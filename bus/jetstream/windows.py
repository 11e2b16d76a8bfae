"""Windows of all hosts of a run, for a reader on another machine."""

from collections import deque
from contextlib import suppress

from offloop.bus.errors import ProtocolError
from offloop.bus.jetstream import names
from offloop.bus.jetstream.nats_connection import NatsConnection
from offloop.bus.jetstream.stored import Stored, follow_last
from offloop.bus.protocol.host_windows import HostWindow, decode_window

_MOST_UNREAD = 20_000


class StreamWindows:
    """Windows of all hosts of an attempt as they arrive, starting with each host's last one.

    Each comes once: windows that servers had lost and that were sent again are recognized by their offsets."""

    def __init__(self, connection: NatsConnection, run: str, attempt: int) -> None:
        self._unread: deque[bytes] = deque(maxlen=_MOST_UNREAD)
        self._known: dict[str, int] = {}  # known size of each subject's file
        stream, subjects = names.windows_stream_of(run), names.windows_subject(run, attempt)
        self._following = connection.begin(follow_last(connection.client, stream, subjects, self._note))

    def take(self) -> list[HostWindow]:
        found = []
        while self._unread:
            with suppress(ProtocolError):
                found.append(decode_window(self._unread.popleft()))
        return found

    def close(self) -> None:
        self._following.cancel()

    def _note(self, messages: list[Stored], _are_live: bool) -> None:
        for message in messages:
            offset = message.offset
            if offset is not None and offset >= self._known.get(message.subject, 0):
                self._known[message.subject] = offset + len(message.data)
                self._unread.append(message.data)
