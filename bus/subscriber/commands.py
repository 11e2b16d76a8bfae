"""Sends commands to the trainer of a live run, and waits for what becomes of them."""

import getpass
import math
import os
import socket
import time
from collections.abc import Iterable

import zmq

from bus.errors import BrokerError, ConfigurationError
from bus.net.curve import ClientSecurity, client_security_for
from bus.net.requests import next_answer, request
from bus.net.sockets import connect_socket
from bus.protocol.frames import Control
from bus.runs.directory import RunInfo
from bus.subscriber.subscription import LiveSubscription
from bus.types.commands import WAIT_SECONDS, Argument, Command, Outcome, check_command

AGAIN_SECONDS = 0.2
UNCONFIRMED_SECONDS = 1.0


ANSWER_SECONDS = 5.0


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
    if not run.live or run.control is None:
        raise ConfigurationError(f"run {run.name!r} is {run.status}, so there is nobody to tell: 'bus runs --live'")
    return send_command_through(run.control, run.name, name, *arguments, wait=wait, security=security, reason=reason)


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
        control = connect_socket(context, zmq.DEALER, address, security or client_security_for(address))
        response = request(control, "command", {"run": run, **command.to_wire()}, ANSWER_SECONDS)
        if response is None:
            raise BrokerError(f"the broker at {address} does not answer: it may be busy or gone; 'bus runs' tells")
        command = command._replace(id=str(response.get("id", "")))
        if not response.get("ranks"):
            raise BrokerError(
                f"the broker of run {run!r} has no connection to its trainer at the moment: try again, or look with "
                "'bus info' how the run is"
            )
        return _await(control, command, wait) or Outcome(command, None, None)
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


def _await(control: "zmq.Socket[bytes]", command: Command, wait: float) -> Outcome | None:
    deadline = time.monotonic() + wait
    while control.poll(max(0, int(1000 * (deadline - time.monotonic())))):
        answer = next_answer(control)
        if answer is not None and answer.kind == "applied" and answer.content.get("id") == command.id:
            return Outcome.from_wire(command, answer.content)
        if answer is not None and answer.kind == "refused":
            raise BrokerError(str(answer.content.get("reason")))
    return None


class PendingCommands:
    """Commands that a broker has not confirmed yet. Each is sent again, also to a broker that replaces the first one,
    until the broker reports that it has forwarded or refused it.

    :meth:`hear` may be called on another thread than everything else.
    """

    def __init__(self) -> None:
        self._sent: dict[str, Command] = {}
        self._unconfirmed: dict[str, Command] = {}
        self._refused: dict[str, Outcome] = {}
        self._again_at = math.inf

    @property
    def is_due(self) -> bool:
        """Whether it is time to send again what nobody has confirmed."""
        return time.monotonic() >= self._again_at

    def has(self, name: str) -> bool:
        """Whether a command of that name was sent."""
        return any(command.name == name for command in tuple(self._sent.values()))

    def send(self, command: Command, subscription: LiveSubscription | None) -> None:
        """Sends a command, as soon as there is a ``subscription``."""
        self._sent[command.id] = command
        self._unconfirmed[command.id] = command
        self._again_at = time.monotonic() + UNCONFIRMED_SECONDS
        if subscription is not None:
            subscription.send("command", command.to_wire())

    def send_again(self, subscription: LiveSubscription | None) -> None:
        """Sends what nobody has confirmed."""
        self._again_at = time.monotonic() + UNCONFIRMED_SECONDS if self._unconfirmed else math.inf
        for command in tuple(self._unconfirmed.values()):
            if subscription is not None:
                subscription.send("command", command.to_wire())

    def hear(self, message: Control) -> None:
        """Takes an answer of the broker."""
        name = message.content.get("id")
        if not isinstance(name, str) or name not in self._unconfirmed:
            return
        if message.kind == "refused":
            self._refused[name] = Outcome(self._sent[name], None, None, str(message.content.get("reason")))
        if message.kind == "refused" or (message.kind == "told" and message.content.get("ranks")):
            del self._unconfirmed[name]
        elif message.kind == "told":
            # The broker waits for its trainer still.
            self._again_at = time.monotonic() + AGAIN_SECONDS

    def outcomes(self, answered: Iterable[Outcome]) -> tuple[Outcome, ...]:
        """What became of each, as far as it is known; ``answered`` are those that the training has answered."""
        by_id = {outcome.command.id: outcome for outcome in answered}
        return tuple(
            by_id.get(name) or self._refused.get(name) or Outcome(command, None, None)
            for name, command in tuple(self._sent.items())
        )
