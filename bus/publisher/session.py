"""Carries out what the state of a publisher's session asks for, with a connection and processes."""

import contextlib
import logging
import time
from typing import Any

import zmq

from offloop.bus.errors import OffloopError
from offloop.bus.protocol.frames import Control, encode_control
from offloop.bus.publisher.connection import BrokerConnection
from offloop.bus.publisher.outbox import Outbox
from offloop.bus.publisher.session_state import Action, Hello, Say, SessionState
from offloop.bus.types.timeouts import Timeouts

_log = logging.getLogger("offloop")
POLL_SECONDS = 0.02
LAST_WORDS_SECONDS = 0.2
"""For which the last messages of a broker that has exited are waited for before another one is started."""
_FOR_THE_PUBLISHER = frozenset(("welcome", "demand", "consumers", "command", "statistics"))


class BrokerSession:
    """A publisher's session with its broker over ``connection``; never waits but in :meth:`wait` and :meth:`flush`.
    What it has come to is in :attr:`state`.

    At most ``limit`` bytes of events are kept."""

    def __init__(self, connection: BrokerConnection, limit: int, timeouts: Timeouts) -> None:
        outbox = Outbox(connection.send, limit)
        self.state = SessionState(connection.run_name, connection.welcome, outbox, timeouts, time.monotonic())
        self._connection = connection
        self._is_silent = False
        self._exited: float | None = None
        """When our own broker was found to have finished."""
        self._timeouts = timeouts

    def receive(self) -> Control | None:
        """The next message that is for the publisher: commands, the demand, and how far consumers are."""
        state = self.state
        while not state.lost and (message := self._connection.receive()) is not None:
            self._do(state.receive(message, time.monotonic()))
            if message.kind in _FOR_THE_PUBLISHER and not state.lost:
                return message
        return None

    def tick(self) -> None:
        """Looks after a broker that is silent or dead."""
        self._restart_broker()
        self._do(self.state.tick(time.monotonic()))

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            try:
                match action:
                    case Hello():
                        self._connection.renew(action.demand)
                    case Say():
                        self.say(action.kind, action.content)
            except (OffloopError, zmq.ZMQError, OSError) as error:
                self.state.broker_failed(error)

    def _restart_broker(self) -> None:
        """Starts our own broker again if it has died."""
        process = self._connection.process
        if process is None or self.state.lost:
            return
        how = process.ended()
        if how is None:
            self._exited = None
            return
        # The last acknowledgement of a broker that has finished may still be on its way here.
        if process.has_finished:
            now = time.monotonic()
            self._exited = now if self._exited is None else self._exited
            if now - self._exited < LAST_WORDS_SECONDS:
                return
        self.state.broker_died(process.refusal())
        try:
            is_restarted = not self.state.lost and process.restart()
        except OSError as error:
            self.state.broker_failed(error)
        else:
            if is_restarted:
                self._do(self.state.broker_restarted(how, time.monotonic()))

    def report(self, statistics: dict[str, Any]) -> None:
        """Reports to the broker how the publisher is doing."""
        self._do([self.state.report(statistics)])

    def say(self, kind: str, content: dict[str, Any]) -> None:
        """Sends the broker a message that may be lost."""
        if not self.state.outbox.paused and not self.state.lost:
            with contextlib.suppress(zmq.Again):
                self._connection.send(encode_control(kind, content), zmq.NOBLOCK)

    def wait(self) -> None:
        """Waits a moment for the broker's next message."""
        self._connection.socket.poll(round(POLL_SECONDS * 1000))

    def flush(self, last: int) -> None:
        """Waits until the broker has everything up to ``last``, the end of the stream, on disk, for as long as it makes
        progress. What it has not recorded then is reported."""
        state = self.state
        state.end(last)
        before, deadline = None, 0.0
        while state.acknowledged < last and not state.is_final:
            if before != (before := state.acknowledged):
                deadline = time.monotonic() + self._timeouts.flush
            elif time.monotonic() > deadline:
                self._is_silent = True
                _log.warning(
                    "the broker of run %s does not answer: events %d to %d may not be recorded",
                    *(self._connection.run_name, state.acknowledged + 1, last),
                )
                return
            state.outbox.send()
            self.wait()
            while self.receive() is not None:
                pass  # commands and demand have no effect any more
            self.tick()

    def close(self) -> None:
        """Ends the connection; a broker that did not answer in time is not waited for again."""
        self._connection.close(waits=not self._is_silent)
        self.state.close()
