"""Reads stored messages from the leader of a stream, one at a time: readers create no consumers."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from nats.aio.msg import Msg
from nats.js.errors import NotFoundError

from offloop.bus.jetstream import names
from offloop.bus.jetstream.connection import PASSING, NatsClient

_MOST_OTHERS = 1000  # how many messages to search backwards for a range
_BATCH = 64
_FOLLOW_SECONDS = 0.25


class Stored(NamedTuple):
    """A stored message."""

    subject: str
    sequence: int
    headers: dict[str, str]
    data: bytes

    @property
    def offset(self) -> int | None:
        """Offset of its range of a file, if it has one."""
        value, final = self.headers.get(names.OFFSET, ""), self.headers.get(names.FINAL, "0")
        return int(value) if value.isdecimal() and final.isdecimal() else None

    @property
    def final(self) -> int | None:
        """Offset of the end of a closed file, if it holds that."""
        return int(self.headers[names.FINAL]) if names.FINAL in self.headers else None


async def get(client: NatsClient, stream: str, subject: str | None = None, seq: int | None = None) -> Stored | None:
    """Return a subject's last message, message ``seq``, or with both the subject's first from ``seq`` on, if any."""
    try:
        found = await client.js.get_msg(stream, seq, subject, next=None not in (subject, seq))
    except NotFoundError:
        return None
    return Stored(str(found.subject), found.seq or 0, found.headers or {}, found.data or b"")


async def last_range(client: NatsClient, stream: str, subject: str) -> tuple[Stored | None, int]:
    """Return a subject's last message with a range of a file, and the sequence number of its last message of any kind.

    A reader can make servers store answers to requests there, and a host can store anything."""
    found = last = await get(client, stream, subject)
    if last is None:
        return None, 0
    before = last.sequence
    while found is None or found.subject != last.subject or found.offset is None:
        before -= 1
        if before < max(1, last.sequence - _MOST_OTHERS):
            return None, last.sequence
        found = await get(client, stream, seq=before)
    return found, last.sequence


async def last_of_each(client: NatsClient, stream: str, pattern: str) -> list[Stored]:
    """Return the last message of each subject."""
    try:
        subjects = list((await client.js.stream_info(stream, pattern)).state.subjects or ())
    except NotFoundError:
        return []
    found: list[Stored | None] = []
    for begin in range(0, len(subjects), _BATCH):
        found += await asyncio.gather(*(get(client, stream, one) for one in subjects[begin : begin + _BATCH]))
    return [one for one in found if one is not None]


async def follow_last(
    client: NatsClient, stream: str, pattern: str, take: Callable[[list[Stored], bool], object]
) -> None:
    """Pass on each subject's last message after every connection, and live ones as they arrive, until cancelled.

    ``take`` receives messages, and whether they are live ones."""

    async def hear(message: Msg) -> None:
        if message.subject.startswith(pattern.rstrip("*>")):  # see names.is_request
            take([Stored(message.subject, 0, message.headers or {}, message.data)], True)

    # The client renews the subscription after a reconnect.
    subscription = await client.subscribe(pattern, cb=hear)
    seen = -1
    try:
        while True:
            with suppress(*PASSING):
                if (connection := client.stats["reconnects"]) != seen:
                    take(await last_of_each(client, stream, pattern), False)
                    seen = connection
            await asyncio.sleep(_FOLLOW_SECONDS)
    finally:
        with suppress(*PASSING):
            await subscription.unsubscribe()
