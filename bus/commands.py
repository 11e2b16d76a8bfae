"""Commands to the publishers of a live run."""

import time

import zmq

from bus.errors import BrokerError, ConfigurationError, ProtocolError
from bus.runs import RunInfo
from bus.wire import Control, decode_control, encode_control, split_frame

__all__ = ["COMMANDS", "send_command"]

COMMANDS = ("stop",)
"""What publishers understand: ``stop`` asks the training to end after the batch at hand."""

PATIENCE = 5.0


def send_command(run: RunInfo, command: str) -> int:
    """Sends a command to every rank of a live run, through its broker; returns how many ranks it was sent to.

    A rank takes it with the next event that it publishes.

    Raises:
        ConfigurationError: there is no such command, or the run is not live.
        BrokerError: the broker does not answer, or refuses.
    """
    if command not in COMMANDS:
        raise ConfigurationError(f"command {command!r} is unknown: use {', '.join(COMMANDS)}")
    if not run.live or run.door is None:
        raise ConfigurationError(f"run {run.name!r} is {run.status}, so there is nobody to tell: 'bus runs --live'")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        door: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        door.connect(run.door)
        door.send(encode_control("command", {"run": run.name, "command": command}))
        answer = _answer(door)
    finally:
        context.destroy(linger=0)
    if answer is None:
        raise BrokerError(f"the broker of run {run.name!r} does not answer: try again, or end the training's process")
    if answer.kind == "refused":
        raise BrokerError(str(answer.content.get("reason", "the broker refused without a reason")))
    ranks = answer.content.get("ranks")
    if not isinstance(ranks, int):
        raise BrokerError(
            f"the broker of run {run.name!r} answers without the number of ranks that it told ({ranks!r}): "
            "look with 'bus runs' whether the run ends"
        )
    return ranks


def _answer(door: "zmq.Socket[bytes]") -> Control | None:
    deadline = time.monotonic() + PATIENCE
    while door.poll(max(0, int(1000 * (deadline - time.monotonic())))):
        try:
            topic, body = split_frame(door.recv())
            message = decode_control(body) if topic is None else None
        except ProtocolError:
            continue
        if message is not None and message.kind in ("told", "refused"):
            return message
    return None
