"""The flight recorder of a live run: the newest batches of its ranks with all events, recorded for a reason."""

import logging
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from offloop.bus.broker.flight_dump import RankRing, write_dump
from offloop.bus.broker.rank import LiveRank
from offloop.bus.errors import BrokerError, OffloopError, ProtocolError
from offloop.bus.protocol.flight_ring import FlightRingReader
from offloop.bus.protocol.frames import EventBody
from offloop.bus.runs.alerts import FIRING, RunAlert, note_alert
from offloop.bus.runs.directory import RunDirectory, new_run_id
from offloop.bus.runs.flight import ANNOUNCED_DUMPS, MOST_DUMPS, AnnouncedDump, dump_path

_log = logging.getLogger("offloop.broker")

ASKED, FAILED, LOST, NAN = "asked", "failed", "lost", "nan"
_ONCE = (FAILED, LOST, NAN)
"""Reasons that count once in an attempt."""
ALERT_PAUSE = 60.0
"""Seconds between two dumps because of alerts."""
_MOST_DETAIL = 1000

Answer = Callable[[str | None, str | None], object]
"""Called with what was done, or why nothing was."""


class FlightRecorder:
    """Writes the rings of the ranks of one attempt, each time to a file of its own beside the recording.

    A thread writes dumps and alerts one after the other; all else, also the answers to those who asked, is the broker's
    own thread."""

    def __init__(self, directory: RunDirectory, attempt: int) -> None:
        self.rings: dict[int, RankRing] = {}
        """By rank."""
        self._directory = directory
        self._run = directory.name
        self._attempt = attempt
        self._alerted = -math.inf
        self._met: set[str] = set()
        self._announced: list[AnnouncedDump] = []
        self._thread = ThreadPoolExecutor(1, "offloop-flight")
        self._writing: dict[int, tuple[Future[tuple[str | None, str | None]], Answer | None]] = {}
        """By number of the dump."""

    def attach(self, rank: LiveRank, wire: dict[str, Any]) -> str | None:
        """Open the ring that a rank has named in ``hello``; return why that is not possible."""
        if rank.rank in self.rings:
            return None
        where = f"the flight recorder of rank {rank.rank} is not kept"
        if rank.pid is None:
            return f"{where}: the broker is on another machine; let each host have a broker of its own"
        try:
            reader = FlightRingReader(rank.pid, wire)
        except (OSError, ProtocolError) as error:
            return f"{where}: its memory cannot be read by the broker ({error})"
        self.rings[rank.rank] = RankRing(rank, reader)
        return None

    # -- reasons ------------------------------------------------------------------------------------------------------

    def note_loss(self, rank: LiveRank, event: EventBody) -> None:
        """Look at the end of a batch for a loss that is not finite."""
        loss, batch = event.fields.get("loss"), event.timestamp.batch
        if not isinstance(loss, float) or math.isfinite(loss) or NAN in self._met:
            return
        text, now = f"the loss of rank {rank.rank} is {loss} at batch {batch}", time.time()
        name = f"flight-{self._attempt}-{NAN}-{now:.3f}"
        alert = RunAlert(name, FIRING, NAN, text, now, self._attempt, batch)
        # Not here: it may wait for a consumer that writes an alert.
        self._thread.submit(note_alert, self._directory.path, alert)
        self._dump(NAN, text)

    def note_end(self, rank: LiveRank, fields: dict[str, Any]) -> None:
        """Look at how a rank has ended."""
        status = fields.get("status")
        if status in (FAILED, LOST) and status not in self._met:
            self._dump(status, f"rank {rank.rank}: {fields.get('error') or status}")

    def ask(self, reason: str, detail: str, answer: Answer, identity: str | None = None) -> None:
        """Write the rings because a peer requests it, whose request has that ``identity``.

        Raises:
            BrokerError: there are no rings, or too many dumps.
        """
        if not self.rings:
            raise BrokerError(
                f"run {self._run!r} has no flight recorder: start the training with flight_recorder='200ba', or "
                "'trainer --flight-recorder 200ba'"
            )
        now = time.monotonic()
        if reason == "alert" and now - self._alerted < ALERT_PAUSE:
            answer(None, f"another alert had it written less than {ALERT_PAUSE:g} s ago")
            return
        if reason in _ONCE and reason in self._met:
            answer(None, f"it was written because of {reason!r} already")
            return
        if (problem := self._dump(reason, detail, answer, identity)) is not None:
            raise BrokerError(problem)
        if reason == "alert":
            self._alerted = now

    # -- writing ------------------------------------------------------------------------------------------------------

    @property
    def is_writing(self) -> bool:
        """Something is being written, or :meth:`report` has an answer for who asked for it."""
        return bool(self._writing)

    def _dump(self, reason: str, detail: str, answer: Answer | None = None, identity: str | None = None) -> str | None:
        """Decide on a dump; return why there may not be one more."""
        if not self.rings:
            return None
        self._met.add(reason)
        number = self._next_number()
        if number is None:
            problem = (
                f"attempt {self._attempt} of run {self._run!r} has {MOST_DUMPS} dumps of its flight recorder, which is "
                "as many as are written: remove some"
            )
            _log.warning("%s", problem)
            return problem
        detail = detail[:_MOST_DETAIL]
        self._announced.append(AnnouncedDump(identity or new_run_id(), self._attempt, reason, detail, time.time()))
        try:
            ANNOUNCED_DUMPS.write(self._directory.path, self._announced[-MOST_DUMPS:])
        except OffloopError as error:
            _log.warning("run %s: other hosts do not learn of a dump: %s", self._run, error)
        about = {"flight": reason, "flight_detail": detail, "flight_time": str(time.time_ns())}
        self._writing[number] = self._thread.submit(self._write, number, about, dict(self.rings)), answer
        return None

    def _next_number(self) -> int | None:
        for number in range(1, MOST_DUMPS + 1):
            path = dump_path(self._directory.path, self._attempt, number)
            if number not in self._writing and not os.path.lexists(path):
                return number
        return None

    def _write(self, number: int, about: dict[str, str], rings: dict[int, RankRing]) -> tuple[str | None, str | None]:
        """Write a dump, in the thread for that; return what was done, or why nothing was."""
        path = dump_path(self._directory.path, self._attempt, number)
        try:
            done = f"{path.name}: {write_dump(path, self._run, self._attempt, about, rings)}"
        except Exception as error:  # noqa: BLE001  whatever it is, it ends this dump alone
            why = error if isinstance(error, OSError | OffloopError) else repr(error)
            failure = f"{path.name} cannot be written: {why}"
            _log.error("run %s: %s", self._run, failure)
            return None, failure
        _log.info("run %s, %s: %s", self._run, about["flight"], done)
        return done, None

    def report(self) -> None:
        """Answer those who asked for dumps that are written."""
        for number, (writing, answer) in tuple(self._writing.items()):
            if writing.done():
                del self._writing[number]
                if answer is not None:
                    answer(*writing.result())

    def finish(self) -> None:
        """Write everything that is pending, and close the rings."""
        self._thread.shutdown()
        self.report()
        for ring in self.rings.values():
            ring.reader.close()
        self.rings.clear()
