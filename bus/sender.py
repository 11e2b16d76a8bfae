"""Sends commands to the trainer of a live run, and waits for what becomes of them."""

import getpass
import os
import socket
import time

import zmq

from bus.commands import Argument, Command, Outcome, check_command
from bus.errors import BrokerError, ConfigurationError
from bus.run_source import exchange, next_answer
from bus.runs import RunInfo
from bus.security import ClientSecurity, client_security_for
from bus.stream_link import connected

__all__ = ["WAIT_SECONDS", "send_command", "send_command_through", "sent_by"]

ANSWER_SECONDS = 5.0
WAIT_SECONDS = 30.0


def send_command(
    run: RunInfo,
    name: str,
    *arguments: Argument,
    wait: float = WAIT_SECONDS,
    security: ClientSecurity | None = None,
    reason: str | None = None,
) -> Outcome:
    """Sends a command to a live run, through its broker, and waits up to ``wait`` seconds until it takes effect.

    ``reason`` says why and by whom, see :func:`sent_by`. ``security`` holds the keys for the broker, by default those
    that the environment names.

    Raises:
        ConfigurationError: there is no such command, or the run is not live.
        BrokerError: the broker does not answer, or refuses.
    """
    check_command(name, arguments, reason)
    if not run.live or run.door is None:
        raise ConfigurationError(f"run {run.name!r} is {run.status}, so there is nobody to tell: 'bus runs --live'")
    return send_command_through(run.door, run.name, name, *arguments, wait=wait, security=security, reason=reason)


def send_command_through(
    address: str,
    run: str,
    name: str,
    *arguments: Argument,
    wait: float = WAIT_SECONDS,
    security: ClientSecurity | None = None,
    reason: str | None = None,
) -> Outcome:
    """As :func:`send_command`, for the run of that name at the broker at ``address``."""
    command = check_command(name, arguments, reason)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        door = connected(context, zmq.DEALER, address, security or client_security_for(address))
        told = exchange(door, "command", {"run": run, **command.to_wire()}, ANSWER_SECONDS)
        if told is None:
            raise BrokerError(f"the broker at {address} does not answer: it may be busy or gone; 'bus runs' tells")
        command = command._replace(id=str(told.get("id", "")))
        if not told.get("ranks"):
            raise BrokerError(
                f"the broker of run {run!r} has no connection to its trainer at the moment: try again, or look with "
                "'bus info' how the run is"
            )
        return _await(door, command, wait) or Outcome(command, None, None)
    finally:
        context.destroy(linger=0)


def sent_by(what: str, reason: str | None = None) -> str:
    """The reason of a command that a person sends with ``what``, such as ``bus send``: it names the user and this
    machine, and says why where the person has said it."""
    by = f"{what} by {_user()}@{socket.gethostname()}"
    return f"{by}: {reason}" if reason else by


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in some containers
        return str(os.getuid())


def _await(door: "zmq.Socket[bytes]", command: Command, wait: float) -> Outcome | None:
    deadline = time.monotonic() + wait
    while door.poll(max(0, int(1000 * (deadline - time.monotonic())))):
        answer = next_answer(door)
        if answer is not None and answer.kind == "applied" and answer.content.get("id") == command.id:
            return Outcome.from_wire(command, answer.content)
        if answer is not None and answer.kind == "refused":
            raise BrokerError(str(answer.content.get("reason")))
    return None
