"""The commands that a subscriber has sent: each until the broker has it, and what became of it."""

import math
import time
from collections.abc import Iterable

from bus.commands import Command, Outcome
from bus.stream_link import StreamLink
from bus.wire import Control

__all__ = ["SentCommands"]

AGAIN_SECONDS = 0.2
UNCONFIRMED_SECONDS = 1.0


class SentCommands:
    """Sends commands to a broker's door, and again until the broker says that it has passed them on to the trainer, or
    that it refuses them: also to a broker that comes after that one.

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

    def send(self, command: Command, link: StreamLink | None) -> None:
        """Sends a command, as soon as there is a ``link``."""
        self._sent[command.id] = command
        self._unconfirmed[command.id] = command
        self._again_at = time.monotonic() + UNCONFIRMED_SECONDS
        if link is not None:
            link.tell("command", command.to_wire())

    def send_again(self, link: StreamLink | None) -> None:
        """Sends what nobody has confirmed."""
        self._again_at = time.monotonic() + UNCONFIRMED_SECONDS if self._unconfirmed else math.inf
        for command in tuple(self._unconfirmed.values()):
            if link is not None:
                link.tell("command", command.to_wire())

    def hear(self, message: Control) -> None:
        """Takes what the door says."""
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
