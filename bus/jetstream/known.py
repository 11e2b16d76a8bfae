"""Entries of bridges about their runs, as known to a reader on another machine."""

import asyncio
import math
import time
from dataclasses import dataclass

import msgspec

from offloop.bus.jetstream import names
from offloop.bus.jetstream.connection import NatsClient
from offloop.bus.jetstream.stored import Stored, follow_last
from offloop.bus.runs.listing import ListedRun

FRESH_SECONDS = 5.0  # a bridge without a new entry for this long counts as gone
_SUBJECTS = f"$KV.{names.RUNS_BUCKET}."
_STREAM = f"KV_{names.RUNS_BUCKET}"
_LOOK_SECONDS = 0.05
_FIRST_SECONDS = 2.5  # how long to wait for a new entry of a live run: bridges write one every second


@dataclass
class _Entry:
    said: ListedRun
    found: float  # time at which this reader first had it, by ``time.monotonic``
    heard: float = -math.inf  # time of its last renewal; never, if it was only looked up


class KnownRuns:
    """Entries of the bucket with runs: looked up once, then received as bridges write them.

    A bridge counts as present by the time at which this reader heard from it; clocks of two machines are never
    compared. Coroutines run in the connection's thread, other methods in any thread."""

    def __init__(self, client: NatsClient) -> None:
        self._client = client
        self._entries: dict[str, _Entry] = {}  # entries by subject
        self._are_known = False  # all entries were looked up

    async def follow(self) -> None:
        await follow_last(self._client, _STREAM, f"{_SUBJECTS}>", self._take_all)

    async def until_known(self, run: str | None) -> None:
        """Wait until all entries were looked up, and live runs had time to renew theirs."""
        while not self._are_known:
            await asyncio.sleep(_LOOK_SECONDS)
        while any(
            entry.said.live and entry.heard < entry.found and time.monotonic() - entry.found < _FIRST_SECONDS
            for entry in self._of(run)
        ):
            await asyncio.sleep(_LOOK_SECONDS)

    def runs(self, name: str | None = None, *, every_host: bool = False) -> list[ListedRun]:
        """Return the entries of all runs or of one, newest run first; each is of the newest attempt.

        Of several hosts the entry is that of the first rank's host, unless ``every_host``. ``live`` says whether the
        bridge is present."""
        newest: dict[tuple[str, str], _Entry] = {}
        # The last one stays.
        for entry in sorted(self._of(name), key=lambda one: (one.said.attempt, 0 in one.said.ranks)):
            newest[entry.said.run, str(entry.said.host) if every_host else ""] = entry
        now = time.monotonic()
        # A run whose bridge is silent is not live here, but may continue.
        runs = [
            msgspec.structs.replace(one.said, live=one.said.live and now - one.heard < FRESH_SECONDS)
            for one in newest.values()
        ]
        return sorted(runs, key=lambda run: run.started or 0.0, reverse=True)

    def _of(self, run: str | None) -> list[_Entry]:
        # list() copies in one step; the connection's thread changes the entries.
        return [entry for entry in list(self._entries.values()) if run in (None, entry.said.run)]

    def is_going_on(self, run: str) -> bool:
        return any(one.is_going_on for one in self.runs(run))

    def copied(self, run: str, attempt: int) -> int:
        """Return the copied size of an attempt's recording once its bridge was done; 0 before."""
        bridges = [one.bridge for one in self.runs(run) if one.bridge is not None]
        return sum(bridge.copied for bridge in bridges if bridge.has_all(attempt))

    def _take_all(self, messages: list[Stored], are_live: bool) -> None:
        for message in messages:
            self._take(message.subject, message.data, are_live)
        if not are_live:
            lately, there = time.monotonic() - FRESH_SECONDS, {message.subject for message in messages}
            for subject in [one for one, entry in self._entries.items() if one not in there and entry.heard < lately]:
                del self._entries[subject]
            self._are_known = True

    def _take(self, subject: str, value: bytes, is_heard: bool) -> None:
        if not value:  # the entry was removed
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
            # A changed entry was renewed since it was last seen.
            self._entries[subject] = _Entry(said, known.found, now)


def _time_of(said: ListedRun) -> float:
    """Time of an entry by its host's clock, to compare entries of one host."""
    return 0.0 if said.bridge is None else said.bridge.time
