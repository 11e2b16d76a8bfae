"""Sends commands to the trainer of a live run, and waits for their outcomes."""

import contextlib
import getpass
import math
import os
import socket
import time
from collections.abc import Iterable

import msgspec

from offloop.bus.errors import BrokerError, ConfigurationError
from offloop.bus.net.channels import Channel, SocketChannel
from offloop.bus.protocol.frames import Control
from offloop.bus.runs.directory import RunInfo
from offloop.bus.types.commands import WAIT_SECONDS, Argument, Command, Outcome, check_command, new_command_id
from offloop.bus.types.timeouts import Timeouts

_UNCONFIRMED_SECONDS = 1.0  # a command without confirmation by the broker is sent again after this
_UNDELIVERED_SECONDS = 0.2  # the same if the broker has no trainer to forward it to


def send_command(
    run: RunInfo, name: str, *arguments: Argument, wait: float = WAIT_SECONDS, reason: str | None = None
) -> Outcome:
    """Send a command to a live run through its broker, and wait up to ``wait`` seconds for its effect.

    ``reason`` names the sender and why, see :func:`sent_by`. Raises ConfigurationError: the command is unknown, or the
    run is not live; BrokerError: the broker does not answer, or refuses."""
    command = check_command(name, arguments, reason)
    if not run.live or run.control_endpoint is None:
        raise ConfigurationError(f"run {run.name!r} is {run.status}, not live: 'offloop runs --live' lists live runs")
    return perform(SocketChannel(run.control_endpoint), run.recorded_as, command, wait)


def perform(
    channel: Channel, run: str, command: Command, wait: float = WAIT_SECONDS, timeouts: Timeouts | None = None
) -> Outcome:
    """Send a command, and wait for its outcome up to ``wait`` seconds after the broker has it. Close the channel.

    Raises BrokerError: the broker does not answer, or refuses."""
    command = msgspec.structs.replace(command, id=new_command_id())
    is_forwarded = False
    with contextlib.closing(channel):
        channel.send("command", {"run": run, **command.to_wire()})
        deadline = time.monotonic() + (timeouts or Timeouts.default).answer
        while channel.wait(deadline - time.monotonic()):
            if (answer := channel.receive()) is None:
                continue
            kind, content = answer.kind, answer.content
            if kind == "refused" and content.get("id") in (None, command.id):
                raise BrokerError(str(content.get("reason", "the broker refused without a reason")))
            if content.get("id") != command.id:
                continue
            if kind == "applied":
                return Outcome.from_wire(command, content)
            if not is_forwarded and not content.get("ranks"):
                raise BrokerError(
                    f"the broker of run {run!r} has no connection to its trainer at the moment: try again, or "
                    f"look at the run with 'offloop show {run} --details'"
                )
            if not is_forwarded:
                is_forwarded, deadline = True, time.monotonic() + wait
    if not is_forwarded:
        raise BrokerError(f"{channel.peer} does not answer: it may be busy or gone; see 'offloop runs'")
    return Outcome(command, None, None)


def sent_by(what: str, reason: str | None = None) -> str:
    """Return a reason that names the user, this machine, and ``what`` sent the command, such as ``offloop send``."""
    by = f"{what} by {_user()}@{socket.gethostname()}"
    return f"{by}: {reason}" if reason else by


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # the user id has no name, as in some containers
        return str(os.getuid())


class PendingCommands:
    """Commands that a broker has not confirmed. Each is sent again until a broker has forwarded or refused it.

    :meth:`take` may run in another thread. ``now`` is monotonic, in seconds."""

    def __init__(self) -> None:
        self._sent: dict[str, Command] = {}
        self._unconfirmed: dict[str, Command] = {}
        self._refused: dict[str, Outcome] = {}
        self._again_at = math.inf

    def has(self, name: str) -> bool:
        return any(command.name == name for command in tuple(self._sent.values()))

    def add(self, command: Command, now: float) -> None:
        self._sent[command.id] = command
        self._unconfirmed[command.id] = command
        self._again_at = now + _UNCONFIRMED_SECONDS

    def due(self, now: float) -> tuple[Command, ...]:
        return self.send_again(now) if now >= self._again_at else ()

    def send_again(self, now: float) -> tuple[Command, ...]:
        self._again_at = now + _UNCONFIRMED_SECONDS if self._unconfirmed else math.inf
        return tuple(self._unconfirmed.values())

    def take(self, answer: Control, now: float) -> None:
        name = answer.content.get("id")
        if not isinstance(name, str) or name not in self._unconfirmed:
            return
        if answer.kind == "refused":
            self._refused[name] = Outcome(self._sent[name], None, None, str(answer.content.get("reason")))
        if answer.kind == "refused" or (answer.kind == "accepted" and answer.content.get("ranks")):
            del self._unconfirmed[name]
        elif answer.kind == "accepted":
            # The broker still waits for its trainer.
            self._again_at = now + _UNDELIVERED_SECONDS

    def outcomes(self, answered: Iterable[Outcome]) -> tuple[Outcome, ...]:
        by_id = {outcome.command.id: outcome for outcome in answered}
        return tuple(
            by_id.get(name) or self._refused.get(name) or Outcome(command, None, None)
            for name, command in tuple(self._sent.items())
        )
