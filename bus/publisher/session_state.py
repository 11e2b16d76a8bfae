"""State machine of a publisher's session with its broker, without sockets, processes or a clock."""

import logging
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from offloop.bus.errors import OffloopError
from offloop.bus.protocol.frames import Control
from offloop.bus.publisher.launch import TEMPORARY, error_by_name
from offloop.bus.publisher.outbox import Outbox
from offloop.bus.types.timeouts import Timeouts

_log = logging.getLogger("offloop")

PROBE_SECONDS = 0.5  # after this long without a message, a publisher with unacknowledged events asks the broker for one
HELLO_AGAIN_SECONDS = 2.0  # after this long without a welcome, a publisher that lost its broker sends hello again


class Hello(NamedTuple):
    """Action: connect anew and continue the attempt."""

    demand: Any  # the last reported demand, in wire format


class Say(NamedTuple):
    """Action: send a message that may get lost."""

    kind: str
    content: dict[str, Any]


Action: TypeAlias = Hello | Say


class SessionState:
    """One rank's session with its broker, across the broker's death and return.

    Each method takes an occurrence and returns the actions to carry out. ``now`` is in seconds on a monotonic clock.
    Events wait in ``outbox`` until they are acknowledged. While no broker serves the run, the outbox is paused."""

    def __init__(self, run_name: str, welcome: dict[str, Any], outbox: Outbox, timeouts: Timeouts, now: float) -> None:
        self.outbox = outbox
        self.acknowledged: int = 0  # number of the last event that the broker has on disk
        self.write_error: str | None = None  # why the broker cannot record at the moment
        self.restarts: int = 0  # number of times that the broker was lost and found again or restarted
        self.lost: bool = False  # no broker will serve the run any more
        self._run_name = run_name
        self._timeouts = timeouts
        self._demand: Any = None
        self._heard = now
        self._is_waiting = False  # at the last tick events waited for an acknowledgement
        self._probed = self._greeted = 0.0
        self._is_silence_reported = False
        self._delay: str | None = None
        self._reported_lost = 0  # last event reported as lost
        self._end: int | None = None
        self._ended = False
        self._note_welcome(welcome)

    @property
    def is_final(self) -> bool:
        """No further event will be acknowledged."""
        return self.lost or (self.write_error is not None and self._ended)

    def receive(self, message: Control, now: float) -> list[Action]:
        """Apply a message. Unknown kinds come from a newer broker and are skipped."""
        self._heard = now
        kind, content = message.kind, message.content
        if kind == "ack":
            self._note_acknowledged(content.get("seq"))
        elif kind == "demand":
            self._demand = content.get("demand", self._demand)
        elif kind == "retransmit":
            self._retransmit(content.get("after"))
        elif kind == "ended":
            self._ended = True
        elif kind == "unknown":
            return self._lose("was replaced by one that does not know the run yet", now)
        elif kind == "welcome":
            return self._resume(content)
        elif kind == "refused":
            self._take_refusal(error_by_name(str(content.get("error")), str(content.get("reason"))))
        elif kind == "trouble":
            self.write_error = str(content.get("reason"))
            _log.warning(
                "run %s continues, but events after %d are not recorded at the moment: %s",
                *(self._run_name, self.acknowledged, self.write_error),
            )
        elif kind == "recovered":
            self.write_error = None
            _log.warning("run %s is recorded again", self._run_name)
        elif kind == "training_ended" and content.get("is_final"):
            self.end_with_training()
        elif kind == "notice":
            _log.warning("run %s: %s", self._run_name, content.get("text"))
        return []

    def _resume(self, welcome: dict[str, Any]) -> list[Action]:
        if self._was_ended_by_broker(welcome):
            self._give_up("declared this trainer lost, and ended the recording")
            return []
        self._note_acknowledged(welcome.get("acknowledged"))
        self._note_welcome(welcome)
        self._retransmit(self.acknowledged)
        self.outbox.paused = False
        self._delay = None
        return []

    def _note_welcome(self, welcome: dict[str, Any]) -> None:
        self.run_dir: Path = Path(str(welcome.get("path")))
        self.recording: Path = self.run_dir / str(welcome.get("recording"))
        self._demand = welcome.get("demand", self._demand)

    def _was_ended_by_broker(self, welcome: dict[str, Any]) -> bool:
        """Whether a broker has written the stream's end itself, possibly in place of an event of this publisher."""
        acknowledged, ended = welcome.get("acknowledged"), welcome.get("ended")
        return (isinstance(acknowledged, int) and acknowledged > self.outbox.seq) or ended not in (None, self._end)

    def _note_acknowledged(self, number: Any) -> None:
        if isinstance(number, int) and number > self.acknowledged:
            self.acknowledged = number
            self.outbox.acknowledge(number)
            self.write_error = None
            self._is_silence_reported = False

    def _retransmit(self, after: Any) -> None:
        """Send all kept events to a broker that has those up to ``after``; report events lost in between once."""
        lost = self.outbox.first - 1
        if isinstance(after, int) and lost > max(after, self._reported_lost):
            _log.warning(
                "run %s: events %d to %d are not recorded: the broker was away, or its disk full, for longer than "
                "backlog_bytes can hold",
                *(self._run_name, max(after, self._reported_lost) + 1, lost),
            )
            self._reported_lost = lost
        self.outbox.retransmit()

    def _take_refusal(self, why: OffloopError) -> None:
        if not self.outbox.paused:
            _log.warning("the broker of run %s refuses a request: %s", self._run_name, why)
        elif isinstance(why, TEMPORARY):
            # tick() sends hello again.
            self._report_delay(why)
        else:
            self._give_up(f"refuses events: {why}")

    def _report_delay(self, why: Exception) -> None:
        if str(why) != self._delay:
            self._delay = str(why)
            _log.warning("run %s is not recorded yet, retrying: %s", self._run_name, why)

    def tick(self, now: float) -> list[Action]:
        """Check for silence; called regularly."""
        outbox = self.outbox
        actions: list[Action] = []
        if self.lost:
            return actions
        was_waiting, self._is_waiting = self._is_waiting, bool(outbox.size)
        if outbox.paused:
            if now - self._greeted > HELLO_AGAIN_SECONDS:
                # The last hello may have reached a broker that died since.
                actions = self._greet(now)
        elif not (was_waiting and outbox.size):
            # A broker is silent from here on at the earliest: in a loop that pauses the last tick may be long ago.
            self._heard = now
        elif now - max(self._heard, self._probed) > PROBE_SECONDS:
            # A restarted broker does not know this publisher, and is silent until it receives a message.
            self._probed = now
            actions = [self.report({})]
        if now - self._heard <= self._timeouts.silence:
            return actions
        if not self._is_silence_reported:
            self._is_silence_reported = True
            _log.warning(
                "the broker of run %s has not answered for %g s: the training continues, and events after %d "
                "are kept for it",
                *(self._run_name, self._timeouts.silence, self.acknowledged),
            )
        return actions

    def end(self, last: int) -> None:
        self._end = last

    def report(self, statistics: dict[str, Any]) -> Say:
        """Return a report of the counts and of the last event sent, which the broker must have by now."""
        return Say("report", {**statistics, "last_sent": self.outbox.last_sent})

    def _lose(self, what: str, now: float) -> list[Action]:
        """Note the loss of the broker: events are kept until the next welcome."""
        if self.outbox.paused:
            return []
        _log.warning(
            "the broker of run %s %s: the training continues, and events after %d are sent again",
            *(self._run_name, what, self.acknowledged),
        )
        self.restarts += 1
        self.outbox.paused = True
        return self._greet(now)

    def _greet(self, now: float) -> list[Action]:
        self._greeted = now
        return [Hello(self._demand)]

    def broker_failed(self, error: Exception) -> None:
        self._report_delay(error)

    def broker_died(self, refusal: OffloopError | None) -> None:
        """Note the end of the own broker, with its error, if any. It must be restarted unless the run is lost now."""
        if refusal is not None and not isinstance(refusal, TEMPORARY):
            self._give_up(f"does not resume it: {refusal}")
        elif refusal is not None:
            self._report_delay(refusal)

    def broker_restarted(self, how: str, now: float) -> list[Action]:
        return self._greet(now) if self.outbox.paused else self._lose(f"{how}; another one is started", now)

    def _give_up(self, why: str) -> None:
        """Note that no broker will serve the run: the training continues, its further events are lost."""
        _log.warning(
            "the broker of run %s %s: the training continues, nothing after event %d is recorded",
            *(self._run_name, why, self.acknowledged),
        )
        self.lost = True
        self.outbox.clear()

    def is_silent(self, now: float) -> bool:
        """Return whether events wait for an acknowledgement, and the broker has sent nothing for a while."""
        return bool(self.outbox.size) and now - self._heard > self._timeouts.silence

    def end_with_training(self) -> None:
        """Note that the run has ended without this process, an actor; its further events are dropped."""
        unrecorded = self.outbox.seq - self.acknowledged
        if unrecorded and not self._ended:
            _log.warning("run %s has ended: %d events of this process are not recorded", self._run_name, unrecorded)
        self.lost = True
        self.outbox.clear()

    def close(self) -> None:
        """End the session and warn about dropped events."""
        dropped = self.outbox.dropped
        self.outbox.clear()
        if dropped:
            _log.warning("%d events of run %s were dropped: the broker read too slowly", dropped, self._run_name)
