"""A publisher's side of the conversation with its broker, through the broker's death and return."""

import contextlib
import logging
import time
from pathlib import Path
from typing import Any

import zmq

from bus.errors import OffloopError
from bus.protocol.frames import CUT, decode_event, encode_control, event_encoder, pack_map, split_frame
from bus.publisher.connection import BrokerConnection
from bus.publisher.launch import TEMPORARY, error_by_name
from bus.publisher.outbox import Outbox
from bus.types.demand import BASE_EVENTS
from bus.types.timeouts import Timeouts

_log = logging.getLogger("offloop")


class BrokerSession:
    """Hands frames to the broker, keeps them until they are on disk there, and hears what it says; never waits but in
    :meth:`flush`.

    A broker of our own that dies is started again, and whatever broker comes back is sent what it lacks, as far as
    ``limit`` bytes reach. When one that stands alone has not come back by the time that half of this is full, or at the
    end, a broker of our own takes its place: in the run's directory if that is on this machine, else in ``runs_dir``,
    with a recording of what came later. :attr:`lost` is true once no broker will take the run any more; everything is
    then forgotten."""

    def __init__(self, connection: BrokerConnection, limit: int, runs_dir: Path, timeouts: Timeouts) -> None:
        self.run_name = connection.run_name
        self.outbox = Outbox(connection.send, limit)
        self.acknowledged = 0
        """Number of the last event that the broker has on disk."""
        self.write_error: str | None = None
        """Why the broker records nothing at the moment."""
        self.restarts = 0
        """How often the broker was lost and a new one had to be found or started."""
        self.lost = False
        self.news: list[dict[str, Any]] = [connection.welcome]
        """What the broker has reported of consumers, in order, in the form of the wire: ``demand`` and all
        ``consumers``, or only those of them that have come further. The reader empties it."""
        self.commands: list[Any] = []
        """Commands that have come, in the form of the wire; whoever reads them empties it."""
        self._connection = connection
        self._timeouts = timeouts
        self._note_paths(connection.welcome)
        self._demand = connection.welcome.get("demand")
        self._heard = time.monotonic()
        self._probed = self._asked = 0.0
        self._silence_named = False
        self._delay: str | None = None
        self._named = 0
        """Number of the last event that was named as lost."""
        self._ended = False
        self._runs_dir = runs_dir
        self._shared_address = connection.address
        self._taking_over = False
        self._refused_to_take_over = False
        self._first_part: tuple[int, Path] | None = None
        """The last event of which the broker before has said that it is recorded, and in which file there, when the
        others are in another one."""

    def listen(self) -> None:
        """Takes what the broker has said, and looks whether it is still there."""
        if self._taking_over:
            self._look_after_successor()
            return
        # What a broker that is left for one of our own says after that is of its record, not of ours.
        while not (self.lost or self._taking_over) and (message := self._connection.receive()) is not None:
            self._heard = time.monotonic()
            self._take(message.kind, message.content)
        if self._taking_over:
            return
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
            self._retransmit(content.get("after"))
        elif kind == "ended":
            self._ended = True
        elif kind == "unknown":
            self._find_again("is another one, which does not know the run yet")
        elif kind == "welcome":
            if self._has_ended_without_us(content):
                why = "took this trainer for lost while it could not be reached, and ended the recording"
                self._give_up(why, is_closed=True)
                return
            self._note_acknowledged(content.get("acknowledged"))
            self._note_paths(content)
            self._demand = content.get("demand", self._demand)
            self.news.append(content)
            self._retransmit(self.acknowledged)
            self.outbox.paused = self._refused_to_take_over = False
            self._delay = None
        elif kind == "refused":
            self._take_refusal(error_by_name(str(content.get("error")), str(content.get("reason"))))
        elif kind == "trouble":
            self.write_error = str(content.get("reason"))
            _log.warning(
                "run %s goes on, but events after %d are not recorded at the moment: %s",
                *(self.run_name, self.acknowledged, self.write_error),
            )
        elif kind == "recovered":
            self.write_error = None
            _log.warning("run %s is recorded again", self.run_name)
        elif kind == "notice":
            _log.warning("run %s: %s", self.run_name, content.get("text"))

    def _note_paths(self, welcome: dict[str, Any]) -> None:
        self.run_dir = Path(str(welcome.get("path")))
        """The run's directory, as the broker sees it."""
        self.recording = self.run_dir / str(welcome.get("recording"))
        """Where the broker records the attempt."""

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

    def _retransmit(self, after: Any) -> None:
        """Retransmits all kept events to a broker that has everything up to ``after``. Events between the two are lost,
        and named once in the log."""
        lost = self.outbox.first - 1
        if isinstance(after, int) and lost > max(after, self._named):
            _log.warning(
                "run %s: events %d to %d are not recorded: the broker was away, or its disk full, for longer than "
                "backlog_bytes can hold",
                *(self.run_name, max(after, self._named) + 1, lost),
            )
            self._named = lost
        self.outbox.retransmit()

    def _has_ended_without_us(self, welcome: dict[str, Any]) -> bool:
        """Whether a broker has written the end of the stream itself, in the place of an event of ours."""
        acknowledged, ended = welcome.get("acknowledged"), welcome.get("ended")
        last = self.outbox.count
        return (isinstance(acknowledged, int) and acknowledged > last) or (isinstance(ended, int) and ended != last)

    def _note_acknowledged(self, number: Any) -> None:
        if isinstance(number, int) and number > self.acknowledged:
            self.acknowledged = number
            self.outbox.acknowledge(number)
            self.write_error = None
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
            self._connection.renew(self._demand)
        except (OffloopError, zmq.ZMQError) as error:
            self._give_up(f"cannot be reached again: {error}")

    def _look_after_broker(self) -> None:
        process = self._connection.process
        if process is not None and process.is_another_ranks:
            return
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
        if self.outbox.paused and self.outbox.is_half_full and not self._refused_to_take_over:
            self._take_over("has not come back")
        if self._taking_over:
            return
        if self.outbox.paused:
            if now - self._asked > self._timeouts.hello_again:
                # The broker that heard the last one may be gone already.
                self._renew()
        elif not self.outbox.size:
            self._heard = now
        elif now - max(self._heard, self._probed) > self._timeouts.probe:
            # A broker that was started again says nothing to somebody whom it does not know, unless it is spoken to.
            self._probed = now
            self.report({})
        if now - self._heard <= self._timeouts.silence:
            return
        if not self.outbox.paused and self._connection.address.startswith("tcp://"):
            # The connection may be dead, and nobody closed it: the broker is lost until it is found again.
            self.restarts += 1
            self.outbox.paused = True
            self._renew()
        if not self._silence_named:
            self._silence_named = True
            _log.warning(
                "the broker of run %s has not answered for %g s: the training goes on, and what came after event %d "
                "is kept for it",
                *(self.run_name, self._timeouts.silence, self.acknowledged),
            )

    def _take_over(self, why: str, *, is_closed: bool = False) -> bool:
        """Has a broker of our own take the place of one that stands alone; whether it is one, and that was begun. With
        ``is_closed`` nothing more can be added to the recording there."""
        if not self._connection.is_shared:
            return False
        self.outbox.paused = True
        self._ended, self.write_error = False, None
        try:
            self._connection.take_over(self._runs_dir, in_place=not is_closed)
        except OSError as error:
            self._note_refusal(error)
            return False
        _log.warning(
            "the broker of run %s at %s %s: the training starts one of its own for what came after event %d",
            *(self.run_name, self._shared_address, why, self.acknowledged),
        )
        self._taking_over = True
        return True

    def _look_after_successor(self) -> None:
        try:
            taken = self._connection.taken()
        except OffloopError as error:
            self._taking_over = False
            self._note_refusal(error)
            self._renew()
            return
        if taken is None:
            return
        self._taking_over = False
        self._heard = time.monotonic()
        if taken.in_place:
            _log.warning("run %s is recorded again, where it was: in %s", self.run_name, taken.path)
        else:
            self._begin_rest()
            _log.warning(
                "run %s is recorded again: what came after event %d, in %s",
                *(self.run_name, self.acknowledged, taken.path),
            )
        self._renew()

    def _begin_rest(self) -> None:
        """The recording of our own broker begins behind what the broker before has recorded, and says so."""
        before = self.outbox.first - 1
        if before > self.acknowledged:
            # What fell off is in neither, and has to be missed between the two.
            self._connection.say_recorded(self.acknowledged)
        else:
            self._connection.say_recorded(max(0, before - 1))
            oldest = self.outbox.oldest
            if before and oldest is not None:
                self.outbox.put_in_front(_mark_before(oldest, before))
        self._first_part = self.acknowledged, self.recording

    def _note_refusal(self, error: Exception) -> None:
        self._refused_to_take_over = True
        _log.warning(
            "run %s cannot be recorded by a broker of its own either: %s; what came after event %d is kept for the one "
            "at %s, as far as backlog_bytes can hold it",
            *(self.run_name, error, self.acknowledged, self._shared_address),
        )

    def _give_up(self, why: str, *, is_closed: bool = False) -> None:
        """No broker will take the run any more: unless one of our own does, the training goes on, and what it publishes
        goes nowhere."""
        if not self._refused_to_take_over and self._take_over(why, is_closed=is_closed):
            return
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
                self._connection.send(encode_control(kind, content), zmq.NOBLOCK)

    def wait(self) -> None:
        """Waits for the broker's next word, for a moment at most."""
        self._connection.socket.poll(round(self._timeouts.poll * 1000))

    def flush(self, last: int) -> None:
        """Waits until the broker has everything up to event ``last`` on disk, for as long as it gets on with that; has
        a broker of our own take the place of one that does not, and says what is missing if neither does."""
        if self._has_recorded(last) or (self._take_over("does not answer") and self._has_recorded(last)):
            return
        if not self.lost and not (self.write_error and self._ended):
            _log.warning(
                "the broker of run %s does not answer: events %d to %d may not be recorded",
                *(self.run_name, self.acknowledged + 1, last),
            )

    def _has_recorded(self, last: int) -> bool:
        """Whether everything up to that event is on disk, after waiting for it as long as the broker gets on."""
        deadline = time.monotonic() + self._patience
        before = self.acknowledged, self._taking_over
        while self.acknowledged < last and not (self.write_error and self._ended) and not self.lost:
            if time.monotonic() > deadline:
                return False
            self.outbox.send()
            self.wait()
            self.listen()
            if before != (before := (self.acknowledged, self._taking_over)):
                deadline = time.monotonic() + self._patience
        return self.acknowledged >= last

    @property
    def _patience(self) -> float:
        return self._timeouts.broker_start if self._taking_over else self._timeouts.flush

    def close(self) -> None:
        """Ends the connection."""
        self._connection.close()
        dropped = self.outbox.dropped
        self.outbox.clear()
        if dropped:
            _log.warning(
                "%d events of run %s were given up: the broker did not read them in time", dropped, self.run_name
            )
        if self._first_part is not None:
            _log.warning(
                "run %s is in two recordings: up to event %d in %s with the broker at %s, what came after in %s; 'bus "
                "merge' makes one of the two",
                *(self.run_name, *self._first_part, self._shared_address, self.recording),
            )


def _mark_before(frame: bytes, number: int) -> bytes:
    """The mark ``$cut`` for everything up to event ``number``, which ``frame`` follows."""
    topic, body = split_frame(frame)
    assert topic is not None  # it is an event
    event = decode_event(body)
    is_base = topic.name.startswith("$") or topic.name in BASE_EVENTS
    encode = event_encoder(topic._replace(name=CUT), event.attempt)
    fields = {"first": 1, "base_first": 1}
    return encode(number, event.base_seq - is_base, event.time, event.timestamp, None, fields, pack_map({}))
