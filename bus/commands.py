"""Commands to the publishers of a live run."""

from bus.errors import BrokerError, ConfigurationError
from bus.run_source import ask_broker
from bus.runs import RunInfo
from bus.security import ClientSecurity

__all__ = ["COMMANDS", "send_command", "send_command_through"]

COMMANDS = ("stop",)
"""What publishers understand: ``stop`` asks the training to end after the batch at hand."""


def send_command(run: RunInfo, command: str, security: ClientSecurity | None = None) -> int:
    """Sends a command to every rank of a live run, through its broker; returns how many ranks it was sent to.

    A rank takes it with the next event that it publishes. ``security`` holds the keys for the broker, by default those
    that the environment names.

    Raises:
        ConfigurationError: there is no such command, or the run is not live.
        BrokerError: the broker does not answer, or refuses.
    """
    if not run.live or run.door is None:
        raise ConfigurationError(f"run {run.name!r} is {run.status}, so there is nobody to tell: 'bus runs --live'")
    return send_command_through(run.door, run.name, command, security)


def send_command_through(address: str, run: str, command: str, security: ClientSecurity | None = None) -> int:
    """As :func:`send_command`, for the run of that name at the broker at ``address``."""
    if command not in COMMANDS:
        raise ConfigurationError(f"command {command!r} is unknown: use {', '.join(COMMANDS)}")
    answer = ask_broker(address, "command", {"run": run, "command": command}, security)
    ranks = answer.get("ranks")
    if not isinstance(ranks, int):
        raise BrokerError(
            f"the broker of run {run!r} answers without the number of ranks that it told ({ranks!r}): "
            "look with 'bus runs' whether the run ends"
        )
    return ranks
