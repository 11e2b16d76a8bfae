"""A publisher's session with its broker, which it starts or joins."""

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq

from offloop.bus import processes
from offloop.bus.errors import BrokerError, ConfigurationError, OffloopError
from offloop.bus.net.channels import receive_control
from offloop.bus.net.nats_addresses import find_servers
from offloop.bus.net.sockets import in_use
from offloop.bus.protocol.frames import Control, check_run_name, encode_control
from offloop.bus.publisher.description import Info, describer
from offloop.bus.publisher.launch import BrokerProcess, error_by_name
from offloop.bus.publisher.outbox import Outbox
from offloop.bus.publisher.session_state import Action, Hello, Say, SessionState
from offloop.bus.publisher.stacks import register_stacks
from offloop.bus.runs.directory import SOCKET_FILES, absolute_runs_dir, new_run_name
from offloop.bus.runs.writing import socket_address
from offloop.bus.types.actor import ActorName
from offloop.bus.types.timeouts import Timeouts

_log = logging.getLogger("offloop")
SEND_QUEUE = 1000
POLL_SECONDS = 0.02
LAST_WORDS_SECONDS = 0.2
"""How long to wait for the last messages of a broker that has exited, before the next one is started."""
_FOR_THE_PUBLISHER = frozenset(("welcome", "demand", "consumers", "command", "training_ended"))


class BrokerSession:
    """Session with a broker that has sent ``welcome``. Carries out the actions of its :attr:`state`.

    ``process`` is the broker's process if this publisher started it. Only :meth:`wait`, :meth:`flush` and :meth:`close`
    wait. The session lives until :meth:`close`, also without a reference to it."""

    def __init__(
        self,
        address: str,
        hello: dict[str, Any],
        describe: Callable[[str], dict[str, Any]],
        backlog_bytes: int,
        timeouts: Timeouts,
        process: BrokerProcess | None = None,
    ) -> None:
        self.run_name: str = hello["run"]
        self.address = address
        self.process = process
        self.info: dict[str, Any] = describe(self.run_name)
        self._hello = {**hello, "info": self.info}
        self._timeouts = timeouts
        self._is_silent = False
        self._exited: float | None = None  # when the own broker was found to have finished
        _check_threads()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self.socket: zmq.Socket[bytes] = self._connect()
            self.welcome: dict[str, Any] = self._greet()
            self._hello["new"] = False
            if (name := str(self.welcome.get("run", self.run_name))) != self.run_name:
                # The description may depend on the run's name.
                self.run_name, self.info = name, describe(name)
                self._hello |= {"run": name, "info": self.info}
                self.welcome = self._greet()
            self._hello["new_attempt"] = None
        except BaseException:
            self._context.destroy(linger=0)
            raise
        outbox = Outbox(self._send, backlog_bytes)
        self.state: SessionState = SessionState(self.run_name, self.welcome, outbox, timeouts, time.monotonic())
        in_use.add(self)

    def _connect(self) -> "zmq.Socket[bytes]":
        dealer: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.SNDHWM, SEND_QUEUE)
        dealer.setsockopt(zmq.RECONNECT_IVL, 50)
        # The broker identifies a publisher by this name, also after a reconnect.
        dealer.setsockopt(zmq.IDENTITY, b"p" + os.urandom(16))
        dealer.connect(self.address)
        return dealer

    def _greet(self) -> dict[str, Any]:
        self.socket.send(encode_control("hello", self._hello), zmq.NOBLOCK)
        deadline = time.monotonic() + self._timeouts.welcome
        while self.socket.poll(max(0, int(1000 * (deadline - time.monotonic())))):
            message = receive_control(self.socket)
            if message is None:
                continue
            if message.kind == "welcome":
                attempt, *place = (message.content.get(name) for name in ("attempt", "path", "recording"))
                if type(attempt) is int and all(isinstance(part, str) for part in place):
                    # An actor gets its number from the broker.
                    self._hello["rank"] = message.content.get("rank", self._hello["rank"])
                    return message.content
                raise BrokerError(f"the process at {self.address} is not a broker: its welcome lacks a required value")
            if message.kind == "refused":
                reason = message.content.get("reason", "the broker refused without a reason")
                raise error_by_name(str(message.content.get("error")), str(reason), self.run_name)
        raise BrokerError(
            f"no broker answers at {self.address}: give further ranks of this host the Publisher.address of the first "
            "one, and start the ranks of other hosts with '--stream'"
        )

    def receive(self) -> Control | None:
        """Return the next message for the publisher: a command, the demand, or the consumers' progress."""
        state = self.state
        while not state.lost and (message := self._next()) is not None:
            self._do(state.receive(message, time.monotonic()))
            if (message.kind in _FOR_THE_PUBLISHER or "timestamp" in message.content) and not state.lost:
                return message
        return None

    def _next(self) -> Control | None:
        return receive_control(self.socket)

    def _send(self, message: bytes, flags: int = zmq.NOBLOCK) -> None:
        self.socket.send(message, flags)

    def _renew(self, demand: Any) -> None:
        """Connect anew and continue the attempt, with the last ``demand``; on failure the old connection is kept."""
        again = {**self._hello, "attempt": self.welcome["attempt"], "demand": demand}
        before, self.socket = self.socket, self._connect()
        # Its unsent messages are for the old broker.
        before.close(linger=0)
        self._send(encode_control("hello", again))

    def tick(self) -> None:
        self._restart_broker()
        self._do(self.state.tick(time.monotonic()))

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            try:
                match action:
                    case Hello():
                        self._renew(action.demand)
                    case Say():
                        self.say(action.kind, action.content)
            except (OffloopError, zmq.ZMQError, OSError) as error:
                self.state.broker_failed(error)

    def _restart_broker(self) -> None:
        process = self.process
        if process is None or self.state.lost:
            return
        how = process.ended()
        if how is None:
            self._exited = None
            return
        # The last acknowledgement of a finished broker may still be on its way.
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
        self._do([self.state.report(statistics)])

    def say(self, kind: str, content: dict[str, Any]) -> None:
        """Send a message that may get lost."""
        if not self.state.outbox.paused and not self.state.lost:
            with contextlib.suppress(zmq.Again):
                self._send(encode_control(kind, content))

    def wait(self) -> None:
        self.socket.poll(round(POLL_SECONDS * 1000))

    def flush(self, last: int) -> None:
        """Wait while the broker records events up to ``last`` and makes progress; warn about unrecorded ones."""
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
                    *(self.run_name, state.acknowledged + 1, last),
                )
                return
            state.outbox.send()
            self.wait()
            while self.receive() is not None:
                pass  # commands and demand have no effect after the end
            self.tick()

    def close(self) -> None:
        """Close the connection. A broker that was silent in :meth:`flush` is not waited for again."""
        in_use.discard(self)
        self._context.destroy(linger=0)
        if self.process is not None:
            self.process.leave(0.0 if self._is_silent else self._timeouts.broker_exit)
        self.state.close()


def connect(
    run_name: str | None,
    where: str | os.PathLike[str] | None,
    broker: str | None,
    rank: int,
    world_size: int,
    info: Info,
    *,
    backlog_bytes: int,
    timeouts: Timeouts,
    local_world_size: int | None = None,
    attempt: int | None = None,
    run_id: str | None = None,
    flight: dict[str, Any] | None = None,
    stream_to: str | None = None,
    resume: bool = False,
    actor: ActorName | None = None,
) -> BrokerSession:
    """Join the broker at ``broker``, or start one in the run's directory; see :class:`offloop.bus.Publisher`."""
    name = check_run_name(run_name) if run_name is not None else new_run_name("run", where)
    _check_place(broker, rank, world_size, local_world_size, stream_to)
    is_new = not resume and attempt is None
    describe = describer(info)
    pid = os.getpid()
    hello = {
        "run": name,
        "rank": rank,
        "world_size": world_size,
        "local_world_size": local_world_size,
        "pid": pid,
        "started": processes.start_time(pid),
        "host": socket.gethostname(),
        # Identity across restarts of the broker: another process must not continue this one's numbers.
        "publisher_id": os.urandom(16).hex(),
        "flight": flight,
        "stacks": register_stacks(),
        "new_attempt": attempt,
        "new": is_new,
        **({} if actor is None else {"role": actor.role, "name": actor.name or None, "exclusive": actor.is_exclusive}),
    }
    if broker is not None:
        return BrokerSession(broker, hello, describe, backlog_bytes, timeouts)
    servers = find_servers(stream_to)
    root = absolute_runs_dir(where)
    # Check the path's length and the description before a directory is made and a process is started.
    socket_address(root / name / SOCKET_FILES[0])
    describe(name)
    process = BrokerProcess(root, name, timeouts, run_id=run_id, servers=servers, is_new=is_new)
    try:
        address = socket_address(root / process.name / SOCKET_FILES[0])
        return BrokerSession(address, {**hello, "run": process.name}, describe, backlog_bytes, timeouts, process)
    except BaseException:
        process.kill()
        raise


def _check_threads() -> None:
    """Raise BrokerError if this process can have no more threads: libzmq would abort it."""
    # libzmq starts two. These may take a moment to be gone, so there are more of them.
    end = threading.Event()
    tried = [threading.Thread(target=end.wait, daemon=True) for _ in range(4)]
    started: list[threading.Thread] = []
    try:
        for thread in tried:
            thread.start()
            started.append(thread)
    except RuntimeError as error:
        raise BrokerError(f"the connection to the broker needs threads: {error}; raise 'ulimit -u'") from None
    finally:
        end.set()
        for thread in started:
            thread.join()


def _check_place(
    broker: str | None, rank: int, world_size: int, local_world_size: int | None, stream_to: str | None
) -> None:
    if not 0 <= rank < world_size:
        raise ConfigurationError(f"rank is {rank} and world_size {world_size}: ranks go from 0 to world_size - 1")
    if local_world_size is not None and not 1 <= local_world_size <= world_size:
        raise ConfigurationError(f"local_world_size is {local_world_size}: it goes from 1 to world_size, {world_size}")
    if broker is not None and stream_to is not None:
        raise ConfigurationError("stream_to is only for the rank that starts the broker: omit broker or stream_to")
    if broker is not None and not broker.startswith("ipc://"):
        raise ConfigurationError(
            f"broker is {broker!r}: use the Publisher.address of the first rank on this host (ipc://...); from other "
            "machines a run is read with stream_to='nats://HOST:4222'",
            value=broker,
        )
    if broker is None and rank > 0 and local_world_size is None:
        raise ConfigurationError(
            f"rank {rank} needs the address of its run's broker: rank 0 starts one and has it as Publisher.address; "
            "name it with broker="
        )
