"""How far named readers are, in a key-value bucket: of each name one process at a time may write it.

Who works under a name renews an entry every two seconds. Another one that asks for the name watches that entry: it is
refused when it changes, and takes over when it has not changed for ten seconds, so clocks are not compared. Every write
expects the revision of the one before. The first thing that the next holder writes is what it found, so the one that
was replaced, however long it was paused, cannot write any more.
"""

import asyncio
import functools
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from offloop.bus.errors import BrokerError, ConfigurationError, OffloopError
from offloop.bus.jetstream import names
from offloop.bus.jetstream.connection import WRONG_LAST_SEQUENCE, passing_errors
from offloop.bus.jetstream.stored import Stored, get
from offloop.bus.printing import one_line
from offloop.bus.runs.directory import host_name

if TYPE_CHECKING:
    from offloop.bus.jetstream.nats_connection import NatsConnection

_Answer = TypeVar("_Answer")

RENEW_SECONDS = 2.0
STALE_SECONDS = 10.0
"""A name that was not renewed for so long is given to the next one that asks for it."""

_LOOK_SECONDS = 0.25
_WRITE_SECONDS = 2.0
_REST_SECONDS = 5.0
"""Servers that have not answered are left alone for so long: each time costs the reader a wait."""
_CLAIM_SECONDS = STALE_SECONDS + 20.0
_TRIES = 5
_ENVELOPE_BYTES = 4096
"""Room for a message's subject and headers."""


class ReplacedError(OffloopError):
    """Another process works under this name now."""


class _Found(NamedTuple):
    """An entry as it is."""

    revision: int = 0
    holder: str = ""
    """Who wrote it."""
    value: bytes = b""


@dataclass
class _Entry:
    """An entry as this process knows it."""

    key: str
    revision: int = 0


class HeldPosition:
    """The position of the reader ``name`` in an attempt of a run, for this process to write until :meth:`close`.

    A name that another process holds is watched for up to ten seconds, which ``say`` reports to the user.

    Raises:
        ConfigurationError: another process works under this name.
        BrokerError: the servers do not answer.
    """

    def __init__(self, nats: "NatsConnection", run: str, name: str, attempt: int, say: Callable[[str], None]) -> None:
        self._nats = nats
        self._run = run
        self._name = name
        self._say = say
        self._identity = f"{host_name()}/{os.getpid()}/{secrets.token_hex(4)}"
        self._holder = _Entry(names.holder_key(run, name))
        self._position = _Entry(names.position_key(run, name, attempt))
        self._replaced: ReplacedError | None = None
        self._rests_until = 0.0
        self._silent = -1
        """The connection on which they have not answered."""
        self._renewal: Future[None] | None = None
        self.found = nats.call(self._claim(), _CLAIM_SECONDS)
        """What was written last, under that name; empty when nothing was."""
        self._renewal = nats.begin(self._renew())

    def write(self, value: bytes) -> None:
        """Puts ``value`` in the place of what was there.

        Raises:
            ReplacedError: another process works under this name now: nothing was written.
            BrokerError: it is not known to be stored; a later one may be.
            ConfigurationError: it is too large.
        """
        if self._replaced is not None:
            raise self._replaced
        most = self._nats.max_payload - _ENVELOPE_BYTES
        if len(value) > most:
            raise ConfigurationError(
                f"the state of consumer {self._name!r} has {len(value):,} bytes, and the servers take {most:,}: "
                "'--state-dir DIR' keeps it in a file",
                value=len(value),
            )
        connection = self._nats.reconnects
        if time.monotonic() < self._rests_until and connection == self._silent:
            raise BrokerError("the servers have not answered", address=self._nats.address)
        try:
            self._nats.call(self._write(self._position, value), _WRITE_SECONDS)
        except BrokerError:
            # Servers that were away and are there again are asked at once.
            if self._nats.is_connected:
                self._rests_until, self._silent = time.monotonic() + _REST_SECONDS, connection
            raise

    def close(self) -> None:
        """Gives the name free, if the servers answer. Can be called more than once."""
        renewal, self._renewal = self._renewal, None
        if renewal is None:
            return
        renewal.cancel()
        if self._replaced is None:
            with suppress(BrokerError, ReplacedError):
                self._nats.call(self._write(self._holder, b""), _WRITE_SECONDS)

    # -- in the connection's thread -----------------------------------------------------------------------------------

    async def _claim(self) -> bytes:
        # Servers of which one died choose a leader for some seconds.
        found = await _until_answered(lambda: self._read(self._holder))
        since = time.monotonic()
        if found.value:
            self._say(
                f"consumer {self._name} was begun by {_in_words(found.holder)} and has not ended: looking for up to "
                f"{STALE_SECONDS:g} s whether it is at work"
            )
        while found.value and time.monotonic() - since < STALE_SECONDS:
            await asyncio.sleep(_LOOK_SECONDS)
            asked = time.monotonic()
            again = await _until_answered(lambda: self._read(self._holder))
            if time.monotonic() - asked > _WRITE_SECONDS:
                # Who works under the name could not say so either.
                since = time.monotonic()
            if again.value and again.revision != found.revision:
                raise self._at_work(again)
            found = again
        self._holder.revision = found.revision
        try:
            await _until_answered(lambda: self._write(self._holder, self._identity.encode()))
        except ReplacedError:
            raise self._at_work(await self._read(self._holder)) from None
        for _ in range(_TRIES):
            last = await _until_answered(lambda: self._read(self._position))
            self._position.revision = last.revision
            # The one before may be writing just now.
            with suppress(ReplacedError):
                await _until_answered(functools.partial(self._write, self._position, last.value))
                return last.value
        raise self._at_work(last)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            try:
                with suppress(BrokerError, *passing_errors()):  # the next time comes soon
                    await self._write(self._holder, self._identity.encode())
            except ReplacedError as error:
                self._replaced = error
                return

    async def _write(self, entry: _Entry, value: bytes) -> None:
        """Writes an entry, unless another process has."""
        from nats.js.errors import APIError, NoStreamResponseError

        for _ in range(_TRIES):
            headers = {names.HOLDER: self._identity, "Nats-Expected-Last-Subject-Sequence": str(entry.revision)}
            try:
                written = await self._nats.jetstream.publish(
                    _subject(entry.key), value, headers=headers, stream=_STREAM
                )
            except NoStreamResponseError:
                """The bucket was removed, or its servers are away: reading it finds out."""
            except APIError as error:
                if error.err_code not in WRONG_LAST_SEQUENCE:
                    raise
            else:
                entry.revision = written.seq
                return
            found = await self._read(entry)
            if found.revision and found.revision >= entry.revision and found.holder != self._identity:
                raise ReplacedError(
                    f"consumer {self._name!r} of run {self._run!r} was taken over by {_in_words(found.holder)}: "
                    "this one ends, and keeps nothing more"
                )
            # It is our own, of which the answer was lost; or the servers went back to an older state.
            entry.revision = found.revision
        raise TimeoutError("the entry changes again and again")

    async def _read(self, entry: _Entry) -> _Found:
        found = await get(self._nats.client, _STREAM, last_by_subj=_subject(entry.key))
        if isinstance(found, Stored):
            return _Found(found.sequence, found.headers.get(names.HOLDER, "?"), found.data)
        if not found.has_stream:
            raise BrokerError(
                f"NATS at {self._nats.address} has no bucket {names.POSITIONS_BUCKET}: the next bridge that starts "
                "there makes it; '--state-dir DIR' keeps the consumer's progress in a file",
                address=self._nats.address,
            )
        return _Found()

    def _at_work(self, found: _Found) -> ConfigurationError:
        return ConfigurationError(
            f"a consumer named {self._name!r} is at work on run {self._run!r} already, {_in_words(found.holder)}: stop "
            "that one, or choose another '--name'"
        )


async def _until_answered(ask: Callable[[], Awaitable[_Answer]]) -> _Answer:
    """Asks until the servers answer; who waits for that has a limit."""
    while True:
        try:
            return await ask()
        except passing_errors():
            await asyncio.sleep(_LOOK_SECONDS)


_STREAM = f"KV_{names.POSITIONS_BUCKET}"


def _subject(key: str) -> str:
    return f"$KV.{names.POSITIONS_BUCKET}.{key}"


def _in_words(identity: str) -> str:
    """``HOST/PID/TOKEN`` in words."""
    host, _, rest = one_line(identity[:200]).partition("/")
    return f"process {rest.partition('/')[0]} of {host}" if rest else "another process"
