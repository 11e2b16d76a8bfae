"""What bridges say of their runs, as a reader elsewhere knows it."""

import asyncio
import math
import time
from contextlib import suppress
from dataclasses import dataclass

import msgspec
from nats.aio.msg import Msg

from offloop.bus.jetstream import names
from offloop.bus.jetstream.connection import PASSING, NatsClient
from offloop.bus.jetstream.stored import last_of_each, list_subjects
from offloop.bus.runs.listing import ListedRun

FRESH_SECONDS = 5.0
"""For how long a bridge that says nothing new counts as there."""
PATIENCE = 60.0
"""For how long the bridge of a run that continues is waited for, in seconds, when the stream lacks something."""
_SILENT_SECONDS = 20.0
"""How often entries of live runs of which nothing is heard are looked up."""
_SUBJECTS = f"$KV.{names.RUNS_BUCKET}."
_STREAM = f"KV_{names.RUNS_BUCKET}"
_LOOK_SECONDS = 0.05
_FOLLOW_SECONDS = 0.25
_FIRST_SECONDS = 2.5
"""For how long an entry that was found is waited on to be said anew: bridges do so once a second."""


@dataclass
class _Entry:
    said: ListedRun
    found: float
    """When this reader first had it, by this machine's ``time.monotonic``."""
    heard: float = -math.inf
    """When it was last said anew; never for one that was found."""


class KnownRuns:
    """The entries of the bucket with runs. They are looked up once, and after that heard as bridges write them: whether
    a bridge is there is decided by when this reader heard it, never by clocks of two machines. Coroutines run in the
    connection's thread, everything else in any."""

    def __init__(self, client: NatsClient) -> None:
        self._client = client
        self._entries: dict[str, _Entry] = {}
        """By subject."""
        self._connection = -1
        """After how many lost connections all entries were looked up; -1 before the first time."""

    async def follow(self) -> None:
        """Keeps the entries up to date until it is cancelled: looks all of them up after each lost connection, and
        once in a while those of live runs of which nothing is heard."""
        # The subscription is there again after each lost connection.
        await self._client.subscribe(f"{_SUBJECTS}>", cb=self._hear)
        looked = -math.inf
        while True:
            with suppress(*PASSING):
                connection, now = self._client.stats["reconnects"], time.monotonic()
                subjects: set[str] = set()
                if connection != self._connection:
                    subjects = {*await list_subjects(self._client, _STREAM, f"{_SUBJECTS}>"), *self._entries}
                elif now - looked > _SILENT_SECONDS:
                    silent = now - _SILENT_SECONDS
                    subjects = {one for one, entry in self._entries.items() if entry.said.live and entry.heard < silent}
                    looked = now
                found = {one.subject: one.data for one in await last_of_each(self._client, _STREAM, subjects)}
                for subject in subjects:
                    self._take(subject, found.get(subject, b""), is_heard=False)
                self._connection = connection
            await asyncio.sleep(_FOLLOW_SECONDS)

    async def until_known(self, run: str | None) -> None:
        """Waits until all entries were looked up, and those that say that a run is live had time to be heard."""
        while self._connection < 0:
            await asyncio.sleep(_LOOK_SECONDS)
        while any(
            entry.said.live and entry.heard < entry.found and time.monotonic() - entry.found < _FIRST_SECONDS
            for entry in self._of(run)
        ):
            await asyncio.sleep(_LOOK_SECONDS)

    def runs(self, name: str | None = None, host: str | None = None) -> list[ListedRun]:
        """The entries of all runs, or of one, the newest attempt of each; ``live`` says whether its bridge is there.
        Of a run on several hosts that of the first rank's host, or of ``host``, or with ``*`` those of all of them. The
        newest run comes first."""
        newest: dict[tuple[str, str], _Entry] = {}
        for entry in sorted(self._of(name), key=_precedence):
            of = str(entry.said.host)
            if host in (None, "*", of):
                newest[entry.said.run, of if host == "*" else ""] = entry
        now = time.monotonic()
        # Where the bridge is silent the run may continue unseen: more may come.
        runs = [
            msgspec.structs.replace(one.said, live=one.said.live and now - one.heard < FRESH_SECONDS)
            for one in newest.values()
        ]
        return sorted(runs, key=lambda run: run.started or 0.0, reverse=True)

    def _of(self, run: str | None) -> list[_Entry]:
        # Copied in one step: the connection's thread changes them.
        return [entry for entry in list(self._entries.values()) if run in (None, entry.said.run)]

    def is_going_on(self, run: str, host: str | None = None, attempt: int | None = None) -> bool:
        """Whether more of a run may come, from one host or any, of one attempt or the newest, by what was last said of
        it. A host that died in an attempt before has nothing to say of this one."""
        said = [entry.said for entry in self._of(run)]
        newest = max((one.attempt for one in said), default=0)
        states = [one.status for one in said if one.attempt == newest and host in (None, one.host)]
        return attempt in (None, newest) and any(state in ("live", "paused", "running") for state in states)

    def may_answer(self, run: str, once: bool) -> bool:
        """Whether the host of the first rank may still give what the stream lacks: the run continues there, and its
        bridge is not silent, or, for a reader that asks more than ``once``, was not for :data:`PATIENCE`."""
        newest = self._newest(run)
        if newest is None or not self.is_going_on(run):
            return False
        is_current = self._client.stats["reconnects"] == self._connection
        now = time.monotonic()
        is_there = now - newest.heard < FRESH_SECONDS
        return not is_current or is_there or (not once and now - max(newest.heard, newest.found) < PATIENCE)

    def _newest(self, run: str) -> _Entry | None:
        return max(self._of(run), key=_precedence, default=None)

    def copied(self, run: str, attempt: int) -> int:
        """How many bytes of the recording of an attempt were in the servers when its bridge had done; 0 before."""
        newest = self._newest(run)
        bridge = None if newest is None else newest.said.bridge
        return bridge.copied if bridge is not None and bridge.has_all(attempt) else 0

    async def _hear(self, message: Msg) -> None:
        if message.subject.startswith(_SUBJECTS):  # as in names.is_request
            self._take(message.subject, message.data, is_heard=True)

    def _take(self, subject: str, value: bytes, is_heard: bool) -> None:
        if not value:  # it was removed
            self._entries.pop(subject, None)
            return
        try:
            said = msgspec.json.decode(value, type=ListedRun)
        except (ValueError, RecursionError):
            return
        if not subject.startswith(f"{_SUBJECTS}{names.token(said.run)}."):
            return
        now, known = time.monotonic(), self._entries.get(subject)
        if known is None:
            self._entries[subject] = _Entry(said, now, now if is_heard else -math.inf)
        elif is_heard or _time_of(said) > _time_of(known.said):
            # What has changed since it was last seen was said in between.
            self._entries[subject] = _Entry(said, known.found, now)


def _precedence(entry: _Entry) -> tuple[int, bool]:
    """Of what hosts say of a run, the greatest counts: of the newest attempt, by the host of the first rank."""
    return entry.said.attempt, 0 in entry.said.ranks


def _time_of(said: ListedRun) -> float:
    """When an entry was written, by its host's clock: of one host's entries the later one is the newer one."""
    return 0.0 if said.bridge is None else said.bridge.time
