"""Commands of agents: allowed ones only, a limited number, with sender and reason in the recording."""

import signal
import threading
import time
from collections import deque
from collections.abc import Sequence

from offloop.bus.errors import ConfigurationError
from offloop.bus.printing import one_line, say
from offloop.bus.runs.directory import RunInfo
from offloop.bus.subscriber.commands import send_command, sent_by
from offloop.bus.types.commands import Argument, Outcome

_HOUR = 3600.0


class Commander:
    """Sends the ``allowed`` commands, at most ``per_hour`` tries. After SIGUSR1 none is allowed."""

    def __init__(self, allowed: set[str], per_hour: int) -> None:
        self.allowed = allowed
        self._tries: deque[float] = deque(maxlen=per_hour)
        self._lock = threading.Lock()
        signal.signal(signal.SIGUSR1, lambda *_: self.allowed.clear())

    def send(self, run: RunInfo, name: str, arguments: Sequence[Argument], sender: str, reason: str) -> Outcome:
        """Send a command, and wait for its effect. Raises ConfigurationError for one that is not allowed."""
        with self._lock:
            if name not in self.allowed:
                allowed = ", ".join(sorted(self.allowed)) or "none, it is read-only"
                raise ConfigurationError(f"command {name!r} is not allowed: this server allows {allowed}")
            now, tries = time.monotonic(), self._tries
            if len(tries) == tries.maxlen and now < tries[0] + _HOUR:
                raise ConfigurationError(f"{len(tries)} commands an hour are allowed, and were sent: ask a person")
            tries.append(now)
        why = sent_by(f"offloop mcp for {one_line(sender)[:200]}", one_line(reason))
        outcome = send_command(run, name, *arguments, reason=why)
        say(f"run {run.name}: {outcome.with_reason}", err=True)
        return outcome
