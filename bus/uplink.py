"""A publisher's side of the conversation with its broker, through the broker's death and return."""

import contextlib
import logging
import time
from typing import Any

import zmq

from bus.broker_start import TEMPORARY, named_error
from bus.errors import OffloopError
from bus.link import BrokerLink
from bus.outbox import Outbox
from bus.wire import encode_control

__all__ = ["Uplink"]

_log = logging.getLogger("offloop")

SILENCE_SECONDS = 5.0
PROBE_SECONDS = 0.5
HELLO_AGAIN_SECONDS = 2.0
SETTLE_SECONDS = 5.0
POLL_MILLISECONDS = 20


class Uplink:
    """Hands frames to the broker, keeps them until they are on disk there, and hears what it says; never waits but in
    :meth:`settle`.

    A broker of our own that dies is started again, and whatever broker comes back is sent what it lacks, as far as
    ``limit`` bytes reach. :attr:`lost` is true once no broker will take the run any more; everything is then
    forgotten."""

    def __init__(self, link: BrokerLink, limit: int) -> None:
        self.run_name = link.run_name
        self.outbox = Outbox(link.send, limit)
        self.acknowledged = 0
        """Number of the last event that the broker has on disk."""
        self.trouble: str | None = None
        """Why the broker records nothing at the moment."""
        self.restarts = 0
        """How often the broker was lost and a new one had to be found or started."""
        self.lost = False
        self.news: list[dict[str, Any]] = [link.welcome]
        """What the broker has reported of consumers, in order, in the form of the wire: ``demand`` and all
        ``consumers``, or only those of them that have come further. The reader empties it."""
        self.commands: list[Any] = []
        """Commands that have come, in the form of the wire; whoever reads them empties it."""
        self._link = link
        self._demand = link.welcome.get("demand")
        self._heard = time.monotonic()
        self._probed = self._asked = 0.0
        self._silence_named = False
        self._delay: str | None = None
        self._named = 0
        """Number of the last event that was named as lost."""
        self._ended = False

    def listen(self) -> None:
        """Takes what the broker has said, and looks whether it is still there."""
        while not self.lost and (message := self._link.receive()) is not None:
            self._heard = time.monotonic()
            self._take(message.kind, message.content)
        self._look_after_broker()
        self._mind_silence()

    def _take(self, kind: str, content: dict[str, Any]) -> None:
        # Kinds that are not known come from a newer broker: they are skipped.
        if kind == "ack":
            self._note_acknowledged(content.get("seq"))
        elif kind in ("demand", "consumers"):
            self._demand = content.get("demand", self._demand)
            self.news.append(content)
        elif kind == "command":
            self.commands.append(content)
        elif kind == "resend":
            self._send_again(content.get("after"))
        elif kind == "ended":
            self._ended = True
        elif kind == "unknown":
            self._find_again("is another one, which does not know the run yet")
        elif kind == "welcome":
            if self._is_ahead_of_us(content.get("acknowledged")):
                self._give_up("took this trainer for lost while it could not be reached, and ended the record")
                return
            self._note_acknowledged(content.get("acknowledged"))
            self._demand = content.get("demand", self._demand)
            self.news.append(content)
            self._send_again(self.acknowledged)
            self.outbox.paused = False
            self._delay = None
        elif kind == "refused":
            self._take_refusal(named_error(str(content.get("error")), str(content.get("reason"))))
        elif kind == "trouble":
            self.trouble = str(content.get("reason"))
            _log.warning(
                "run %s goes on, but events after %d are not recorded at the moment: %s",
                *(self.run_name, self.acknowledged, self.trouble),
            )
        elif kind == "recovered":
            self.trouble = None
            _log.warning("run %s is recorded again", self.run_name)
        elif kind == "notice":
            _log.warning("run %s: %s", self.run_name, content.get("text"))

    def _take_refusal(self, why: OffloopError) -> None:
        if not self.outbox.paused:
            _log.warning("the broker of run %s refuses a request: %s", self.run_name, why)
        elif isinstance(why, TEMPORARY):
            # Hello is said again.
            self._note_delay(why)
        else:
            self._give_up(f"refuses events: {why}")

    def _note_delay(self, why: OffloopError) -> None:
        if str(why) != self._delay:
            self._delay = str(why)
            _log.warning("run %s is not recorded yet, and it is tried again: %s", self.run_name, why)

    def _send_again(self, after: Any) -> None:
        """Begins again with the oldest event that is kept, for a broker that has all up to ``after``; what came between
        the two is lost, and is named once."""
        lost = self.outbox.first - 1
        if isinstance(after, int) and lost > max(after, self._named):
            _log.warning(
                "run %s: events %d to %d are not recorded: the broker was away, or its disk full, for longer than "
                "backlog_bytes can hold",
                *(self.run_name, max(after, self._named) + 1, lost),
            )
            self._named = lost
        self.outbox.rewind()

    def _is_ahead_of_us(self, number: Any) -> bool:
        return isinstance(number, int) and number > self.outbox.count

    def _note_acknowledged(self, number: Any) -> None:
        if isinstance(number, int) and number > self.acknowledged:
            self.acknowledged = number
            self.outbox.acknowledge(number)
            self.trouble = None
            self._silence_named = False

    def _find_again(self, what: str) -> None:
        """Says hello to whatever broker there is; until it answers, what is published is kept."""
        if self.outbox.paused:
            return
        _log.warning(
            "the broker of run %s %s: the training goes on, and what came after event %d is sent again",
            *(self.run_name, what, self.acknowledged),
        )
        self.restarts += 1
        self.outbox.paused = True
        self._renew()

    def _renew(self) -> None:
        self._asked = time.monotonic()
        try:
            self._link.renew(self._demand)
        except (OffloopError, zmq.ZMQError) as error:
            self._give_up(f"cannot be reached again: {error}")

    def _look_after_broker(self) -> None:
        process = self._link.process
        how = process.ended() if process is not None and not self.lost else None
        if process is None or how is None:
            return
        refusal = process.refusal()
        if refusal is not None and not isinstance(refusal, TEMPORARY):
            self._give_up(f"does not take it up again: {refusal}")
            return
        if refusal is not None:
            self._note_delay(refusal)
        if process.restart():
            if self.outbox.paused:
                self._renew()
            else:
                self._find_again(f"{how}; another one is started")

    def _mind_silence(self) -> None:
        now = time.monotonic()
        if self.lost:
            return
        if self.outbox.paused:
            if now - self._asked > HELLO_AGAIN_SECONDS:
                # The broker that heard the last one may be gone already.
                self._renew()
        elif not self.outbox.size:
            self._heard = now
        elif now - max(self._heard, self._probed) > PROBE_SECONDS:
            # A broker that was started again says nothing to somebody whom it does not know, unless it is spoken to.
            self._probed = now
            self.report({})
        if now - self._heard <= SILENCE_SECONDS:
            return
        if not self.outbox.paused and self._link.address.startswith("tcp://"):
            # The connection may be dead, and nobody closed it: the broker is lost until it is found again.
            self.restarts += 1
            self.outbox.paused = True
            self._renew()
        if not self._silence_named:
            self._silence_named = True
            _log.warning(
                "the broker of run %s has not answered for %d s: the training goes on, and what came after event %d "
                "is kept for it",
                *(self.run_name, SILENCE_SECONDS, self.acknowledged),
            )

    def _give_up(self, why: str) -> None:
        """No broker will take the run any more: the training goes on, and what it publishes goes nowhere."""
        _log.warning(
            "the broker of run %s %s: the training goes on, nothing after event %d is recorded",
            *(self.run_name, why, self.acknowledged),
        )
        self.lost = True
        self.outbox.clear()

    def report(self, statistics: dict[str, Any]) -> None:
        """Tells the broker how the publisher is doing, for whoever asks there, and which event it must have by now."""
        self.say("report", {**statistics, "last_sent": self.outbox.last_sent})

    def say(self, kind: str, content: dict[str, Any]) -> None:
        """Tells the broker something that may be lost."""
        if not self.outbox.paused and not self.lost:
            with contextlib.suppress(zmq.Again):
                self._link.send(encode_control(kind, content), zmq.NOBLOCK)

    def wait(self) -> None:
        """Waits for the broker's next word, for a moment at most."""
        self._link.socket.poll(POLL_MILLISECONDS)

    def settle(self, last: int) -> None:
        """Waits until the broker has everything up to event ``last`` on disk, for as long as it gets on with that; says
        what is missing if it does not come to that."""
        deadline = time.monotonic() + SETTLE_SECONDS
        before = self.acknowledged
        while self.acknowledged < last and not (self.trouble and self._ended) and not self.lost:
            if time.monotonic() > deadline:
                _log.warning(
                    "the broker of run %s does not answer: events %d to %d may not be recorded",
                    *(self.run_name, self.acknowledged + 1, last),
                )
                return
            self.outbox.send()
            self.wait()
            self.listen()
            if self.acknowledged > before:
                before = self.acknowledged
                deadline = time.monotonic() + SETTLE_SECONDS

    def close(self) -> None:
        """Ends the connection."""
        self._link.close()
        dropped = self.outbox.dropped
        self.outbox.clear()
        if dropped:
            _log.warning(
                "%d events of run %s were given up: the broker did not read them in time", dropped, self.run_name
            )
