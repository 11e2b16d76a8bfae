"""Connects a publisher to its broker: it starts one in the run's directory, or joins the one of its first rank."""

import os
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any

import zmq

from offloop.bus import processes
from offloop.bus.errors import BrokerError, ConfigurationError
from offloop.bus.net.channels import receive_control
from offloop.bus.net.nats_addresses import find_servers
from offloop.bus.net.sockets import in_use
from offloop.bus.protocol.frames import Control, check_run_name, encode_control
from offloop.bus.publisher.description import Info, describer
from offloop.bus.publisher.launch import BrokerProcess, error_by_name
from offloop.bus.runs.directory import SOCKET_FILES, absolute_runs_dir, new_run_name, socket_address
from offloop.bus.types.event import Event
from offloop.bus.types.timeouts import Timeouts

SEND_QUEUE = 1000


class BrokerConnection:
    """A connection to a broker that has said ``welcome``, and the broker's process when it is ours.

    It stays until :meth:`close`, also without a reference to it."""

    def __init__(
        self,
        address: str,
        hello: dict[str, Any],
        describe: Callable[[str], dict[str, Any]],
        timeouts: Timeouts,
        process: BrokerProcess | None = None,
    ) -> None:
        self.run_name: str = hello["run"]
        self.address = address
        self.process = process
        self.info = describe(self.run_name)
        """The run's description in ``run.json``."""
        self._hello = {**hello, "info": self.info}
        self._timeouts = timeouts
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self.socket = self._connect()
            self.welcome = self._greet()
            self._hello["new"] = False
            if (name := str(self.welcome.get("run", self.run_name))) != self.run_name:
                # What was said of the run may depend on its name.
                self.run_name, self.info = name, describe(name)
                self._hello |= {"run": name, "info": self.info}
                self.welcome = self._greet()
            self._hello["new_attempt"] = None
        except BaseException:
            self._context.destroy(linger=0)
            raise
        in_use.add(self)

    def _connect(self) -> "zmq.Socket[bytes]":
        dealer: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.SNDHWM, SEND_QUEUE)
        dealer.setsockopt(zmq.RECONNECT_IVL, 50)
        # The broker knows a publisher by this name, so that it stays the same one through a reconnect.
        dealer.setsockopt(zmq.IDENTITY, b"p" + os.urandom(16))
        dealer.connect(self.address)
        return dealer

    def _greet(self) -> dict[str, Any]:
        self.socket.send(encode_control("hello", self._hello), zmq.NOBLOCK)
        deadline = time.monotonic() + self._timeouts.welcome
        while self.socket.poll(max(0, int(1000 * (deadline - time.monotonic())))):
            message = self.receive()
            if message is None:
                continue
            if message.kind == "welcome":
                return _checked_welcome(message.content, self.address)
            if message.kind == "refused":
                reason = message.content.get("reason", "the broker refused without a reason")
                raise error_by_name(str(message.content.get("error")), str(reason), self.run_name)
        raise BrokerError(
            f"no broker answers at {self.address}: give further ranks of this host the Publisher.address of the first "
            "one, and start the ranks of other hosts with '--stream'"
        )

    def renew(self, demand: Any = None) -> None:
        """Connects anew and says that the attempt continues, with the ``demand`` that the last broker reported. The
        ``welcome`` comes by :meth:`receive`.

        Raises:
            OSError, zmq.ZMQError: the system has no room for a connection; the last one is still there."""
        again = {**self._hello, "attempt": self.welcome["attempt"], "demand": demand}
        before, self.socket = self.socket, self._connect()
        # What waits in it is for a broker that has forgotten us.
        before.close(linger=0)
        self.send(encode_control("hello", again), zmq.NOBLOCK)

    def send(self, message: bytes, flags: int) -> None:
        """Hands a message to the socket; raises :class:`zmq.Again` when its queue is full."""
        self.socket.send(message, flags)

    def receive(self) -> Control | None:
        """The next message from the broker; ``None`` when there is none now."""
        return receive_control(self.socket)

    def close(self, *, waits: bool = True) -> None:
        """Closes the connection, and ``waits`` a moment for a broker of ours to finish the recording."""
        in_use.discard(self)
        self._context.destroy(linger=0)
        if self.process is not None:
            self.process.leave(self._timeouts.broker_exit if waits else 0.0)


def connect(
    run_name: str | None,
    where: str | os.PathLike[str] | None,
    broker: str | None,
    rank: int,
    world_size: int,
    info: Info,
    events: Iterable[Event],
    is_replay: bool = False,
    timeouts: Timeouts | None = None,
    *,
    local_world_size: int | None = None,
    attempt: int | None = None,
    run_id: str | None = None,
    flight: dict[str, Any] | None = None,
    stream_to: str | None = None,
    resume: bool = False,
) -> BrokerConnection:
    """Joins the broker at ``broker``, or starts one in the run's directory; the arguments are those of
    :class:`offloop.bus.Publisher`. With ``is_replay`` the broker learns that what comes was recorded before.

    Raises:
        OffloopError: one of its errors that says why that did not work.
    """
    name = check_run_name(run_name) if run_name is not None else new_run_name("run", where)
    _check_ranks(rank, world_size, local_world_size)
    if broker is not None and stream_to is not None:
        raise ConfigurationError(
            "stream_to is for the first rank, which starts the broker: leave out broker or stream_to"
        )
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
    is_new = not (resume or is_replay) and attempt is None
    timeouts = timeouts or Timeouts.default
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
        # Who we are, through restarts of the broker: another process must not continue our numbers.
        "publisher_id": os.urandom(16).hex(),
        "events": sorted(event.value for event in events),
        "replay": is_replay,
        "flight": flight,
        "new_attempt": attempt,
        "new": is_new,
    }
    if broker is not None:
        return BrokerConnection(broker, hello, describe, timeouts)
    servers = find_servers(stream_to)
    root = absolute_runs_dir(where)
    # Before a process is started and a directory made.
    socket_address(root / name / SOCKET_FILES[0])
    describe(name)
    process = BrokerProcess(root, name, timeouts, run_id=run_id, servers=servers, is_new=is_new)
    try:
        address = socket_address(root / process.name / SOCKET_FILES[0])
        return BrokerConnection(address, {**hello, "run": process.name}, describe, timeouts, process)
    except BaseException:
        process.kill()
        raise


def _check_ranks(rank: int, world_size: int, local_world_size: int | None) -> None:
    if not 0 <= rank < world_size:
        raise ConfigurationError(f"rank is {rank} and world_size {world_size}: ranks go from 0 to world_size - 1")
    if local_world_size is not None and not 1 <= local_world_size <= world_size:
        raise ConfigurationError(f"local_world_size is {local_world_size}: it goes from 1 to world_size, {world_size}")


def _checked_welcome(content: dict[str, Any], address: str) -> dict[str, Any]:
    attempt, place = content.get("attempt"), (content.get("path"), content.get("recording"))
    if type(attempt) is not int or not all(isinstance(part, str) for part in place):
        raise BrokerError(f"what answers at {address} is not a broker: its welcome lacks what it must have")
    return content
