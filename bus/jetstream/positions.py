"""Positions of named consumers in a key-value bucket. Each name has one writing process at a time.

A consumer renews its holder's entry every two seconds. Another process that wants the name watches that entry: a change
means refusal, no change for ten seconds means a takeover. So clocks are not compared. Every write expects the revision
of the last one. A new holder first writes its own entry, then rewrites the position that it found. After that the
previous holder cannot write any more, however long it was paused."""

import asyncio
import functools
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from nats.js.errors import BucketNotFoundError, KeyNotFoundError, KeyWrongLastSequenceError

from offloop.bus.errors import BrokerError, ConfigurationError, ReplacedError
from offloop.bus.jetstream import names
from offloop.bus.jetstream.connection import PASSING
from offloop.bus.jetstream.nats_connection import NatsConnection
from offloop.bus.printing import one_line
from offloop.bus.runs.directory import host_name

_Answer = TypeVar("_Answer")

RENEW_SECONDS = 2.0
STALE_SECONDS = 10.0  # another process may take a name that was not renewed for this long

_LOOK_SECONDS = 0.25
_WRITE_SECONDS = 2.0
_REST_SECONDS = 5.0  # pause after servers have not answered: every request makes the reader wait
_CLAIM_SECONDS = STALE_SECONDS + 20.0
_TRIES = 5
_ENVELOPE_BYTES = 4096  # room for a message's subject and headers


class _Entry:
    """A key of the bucket, and its last known revision."""

    def __init__(self, bucket: Any, key: str) -> None:
        self._bucket = bucket
        self._key = key
        self.revision = 0

    async def read(self) -> bytes:
        try:
            found = await self._bucket.get(self._key)
        except KeyNotFoundError as error:
            self.revision = error.entry.revision if error.entry else 0
            return b""
        self.revision = found.revision
        return found.value or b""

    async def write(self, value: bytes) -> None:
        """Write the entry, unless it has changed since this process read or wrote it."""
        self.revision = await self._bucket.update(self._key, value, last=self.revision)


class HeldPosition:
    """Position of consumer ``name`` in an attempt. This process may write it until :meth:`close`.

    If another process holds the name, its entry is watched for up to ten seconds; ``say`` reports that to the user. If
    that process works, ConfigurationError is raised."""

    _holder: _Entry
    _position: _Entry

    def __init__(self, nats: NatsConnection, run: str, name: str, attempt: int, say: Callable[[str], None]) -> None:
        self._nats = nats
        self._run = run
        self._name = name
        self._say = say
        self._identity = f"{host_name()}/{os.getpid()}/{secrets.token_hex(4)}".encode()
        self._replaced: ReplacedError | None = None
        self._silent = 0.0, -1  # end of the pause without requests, and the connection that did not answer
        self._renewal: Future[None] | None = None
        self.found = nats.call(self._claim(attempt), _CLAIM_SECONDS)
        """The last position written under the name, or empty."""
        self._renewal = nats.begin(self._renew())

    def write(self, value: bytes) -> None:
        """Replace the position.

        Raises ReplacedError: another process has the name now; BrokerError: it may not be stored, and a later one may
        succeed; ConfigurationError: it is too large."""
        if self._replaced is not None:
            raise self._replaced
        most = self._nats.client.max_payload - _ENVELOPE_BYTES
        if len(value) > most:
            raise ConfigurationError(
                f"the state of consumer {self._name!r} has {len(value):,} bytes, and the servers take {most:,}: "
                "'--state-dir DIR' keeps it in a file",
                value=len(value),
            )
        connection = self._nats.client.stats["reconnects"]
        until, silent = self._silent
        if time.monotonic() < until and connection == silent:
            raise BrokerError("the servers have not answered", address=self._nats.address)
        try:
            self._nats.call(self._write(self._position, value), _WRITE_SECONDS)
        except BrokerError:
            # After a reconnect the servers are asked again at once.
            if self._nats.is_connected:
                self._silent = time.monotonic() + _REST_SECONDS, connection
            raise

    def close(self) -> None:
        """Release the name, if the servers answer. Further calls have no effect."""
        renewal, self._renewal = self._renewal, None
        if renewal is None:
            return
        renewal.cancel()
        if self._replaced is None:
            with suppress(BrokerError, ReplacedError):
                self._nats.call(self._write(self._holder, b""), _WRITE_SECONDS)

    # -- in the connection's thread -----------------------------------------------------------------------------------

    async def _claim(self, attempt: int) -> bytes:
        # Servers elect a new leader for some seconds after one died.
        bucket = await _until_answered(self._bucket)
        self._holder = _Entry(bucket, names.key(self._run, self._name))
        self._position = _Entry(bucket, names.key(self._run, self._name, attempt))
        if holder := await _until_answered(self._holder.read):
            await self._watch(holder)
        try:
            await _until_answered(functools.partial(self._write, self._holder, self._identity))
        except ReplacedError:
            raise self._at_work(await self._holder.read()) from None
        while True:
            # The previous holder may write at this moment.
            with suppress(*PASSING):
                found = await self._position.read()
                await self._position.write(found)
                return found
            await asyncio.sleep(_LOOK_SECONDS)

    async def _bucket(self) -> Any:
        try:
            return await self._nats.client.js.key_value(names.POSITIONS_BUCKET)
        except BucketNotFoundError:
            raise BrokerError(
                f"NATS at {self._nats.address} has no bucket {names.POSITIONS_BUCKET}: the next bridge that starts "
                "there creates it; '--state-dir DIR' keeps the consumer's progress in a file",
                address=self._nats.address,
            ) from None

    async def _watch(self, holder: bytes) -> None:
        """Wait until the holder has ended or shown no life. Raise ConfigurationError if it works."""
        self._say(
            f"consumer {self._name} was begun by {_in_words(holder)} and has not ended: looking for up to "
            f"{STALE_SECONDS:g} s whether it is at work"
        )
        since = time.monotonic()
        while holder and time.monotonic() - since < STALE_SECONDS:
            await asyncio.sleep(_LOOK_SECONDS)
            known, asked = self._holder.revision, time.monotonic()
            holder = await _until_answered(self._holder.read)
            if time.monotonic() - asked > _WRITE_SECONDS:
                # During this delay the holder could not renew its entry either.
                since = time.monotonic()
            if holder and self._holder.revision != known:
                raise self._at_work(holder)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            try:
                with suppress(*PASSING):  # the next renewal comes soon
                    await self._write(self._holder, self._identity)
            except ReplacedError as error:
                self._replaced = error
                return

    async def _write(self, entry: _Entry, value: bytes) -> None:
        for _ in range(_TRIES):
            with suppress(KeyWrongLastSequenceError):
                await entry.write(value)
                return
            # The holder is read last, because a new holder writes it first. If it is still this process, the answer to
            # its own write was lost, or the servers returned to an older state.
            if entry is not self._holder:
                await entry.read()
            known = self._holder.revision
            holder = await self._holder.read()
            if holder != self._identity and self._holder.revision >= known:
                raise ReplacedError(
                    f"consumer {self._name!r} of run {self._run!r} was taken over by {_in_words(holder)}: "
                    "this one ends and stores nothing"
                )
        raise TimeoutError("the entry changes again and again")

    def _at_work(self, holder: bytes) -> ConfigurationError:
        return ConfigurationError(
            f"a consumer named {self._name!r} is at work on run {self._run!r} already, {_in_words(holder)}: stop "
            "that one, or choose another '--name'"
        )


async def _until_answered(ask: Callable[[], Awaitable[_Answer]]) -> _Answer:
    while True:
        try:
            return await ask()
        except PASSING:
            await asyncio.sleep(_LOOK_SECONDS)


def _in_words(identity: bytes) -> str:
    host, _, rest = one_line(identity[:200].decode(errors="replace")).partition("/")
    return f"process {rest.partition('/')[0]} of {host}" if rest else "another process"
