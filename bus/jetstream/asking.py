"""Requests of a bridge, repeated until the servers answer and have room. The bridge's status has the reason."""

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any

from offloop.bus.errors import BrokerError
from offloop.bus.jetstream import names
from offloop.bus.jetstream.connection import PASSING, NatsClient, answer_of, in_words
from offloop.bus.jetstream.run_stream import FULL, STREAM_FULL, WRONG_LAST_SEQUENCE
from offloop.bus.runs.bridged import BridgeStatus

_REST_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0)
_MOST_UNSTORED = 2
_UNSTORED = "the servers answer and store nothing: check whether one of their disks is full"
_AWAY_SECONDS = 0.2


class Asking:
    """Requests of a run's bridge. ``status`` receives the reason for a wait, ``note`` stores it, ``say`` shows it."""

    def __init__(
        self, client: NatsClient, run: str, status: BridgeStatus, note: Callable[[], None], say: Callable[[str], None]
    ) -> None:
        self._client = client
        self._run = run
        self.status = status
        self._note = note
        self.say = say
        self.sent_at: float = -math.inf  # time of the servers' last acceptance, by ``time.monotonic``
        self._full: dict[str, str] = {}  # reasons by subject for which the stream takes no more messages
        self._rests = self._unstored = 0
        self._said: set[str] = set()

    async def until_answered(self, ask: Callable[[], Any]) -> Any:
        """Repeat a request until the servers answer, however long that takes; return the answer."""
        while True:
            try:
                answer = await answer_of(self._client, ask())
            except PASSING as error:
                self.status.state, self.status.reason = "waiting", in_words(error)
                if getattr(error, "err_code", None) in FULL:
                    self._say_full(error)
                await self._rest()
            else:
                if self.status.state in ("connecting", "waiting"):
                    self._note_answer()
                return answer

    async def note_refused(self, subject: str, error: Exception) -> None:
        """Note a message that may not be stored, and rest before a retry. Raise BrokerError if that is hopeless."""
        code = getattr(error, "err_code", None)
        if code in WRONG_LAST_SEQUENCE:
            return
        if code in FULL:
            self._full[subject] = in_words(error)
            self._note_answer()
            self._say_full(error)
        elif code is not None and (getattr(error, "code", None) or 0) < 500:
            raise BrokerError(f"NATS refuses the recording: {in_words(error)}")
        else:
            self.status.state, self.status.reason = "waiting", in_words(error)
            self._unstored += 1
            if self._unstored >= _MOST_UNSTORED and self._client.is_connected:
                self._full[subject] = _UNSTORED
                self._note_answer()
                self._say_once(_UNSTORED, f"run {self._run}: {_UNSTORED}; waiting until they do")
        await self._rest()

    def note_taken(self, subject: str) -> None:
        self._rests = self._unstored = 0
        self.sent_at = time.monotonic()
        self.forget(subject)
        self._note_answer()

    def forget(self, subject: str) -> None:
        self._full.pop(subject, None)

    async def _rest(self) -> None:
        self._note()
        if not self._client.is_connected:
            await asyncio.sleep(_AWAY_SECONDS)
            return
        await asyncio.sleep(_REST_SECONDS[min(self._rests, len(_REST_SECONDS) - 1)])
        self._rests += 1

    def _note_answer(self) -> None:
        """Set the status after an answer: the bridge copies, or waits for room for one of its files."""
        why = next(iter(self._full.values()), "")
        self.status.state, self.status.reason = "paused" if why else "copying", why

    def _say_full(self, error: Exception) -> None:
        why = in_words(error)
        room = (
            f"'nats stream edit {names.stream_of(self._run)} --max-bytes=-1' lets it grow"
            if getattr(error, "err_code", None) == STREAM_FULL
            else "let the servers' operator remove older runs ('offloop server remove RUN --stream "
            f"{self._client.address}') or raise the limit"
        )
        self._say_once(why, f"the stream of run {self._run} is full ({why}): waiting for room; {room}")

    def _say_once(self, why: str, line: str) -> None:
        if why not in self._said:
            self._said.add(why)
            self.say(line)
