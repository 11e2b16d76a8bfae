"""The process in which callbacks given to a trainer run: ``python -m consumers.cli.attached``.

On standard input it is told what to do: one line of JSON, ``{"sys_path": [...], "run": "..."}``, with ``broker``,
``key``, ``broker_key`` and ``path`` where the run's directory, ``path``, is not there yet or on another machine, and
``shows``, whether to say at the end where loggers wrote; then a pickle of ``{"callbacks": [...], "loggers": [...]}``.
The line comes first because unpickling imports the user's modules, for which the trainer's ``sys.path`` has to be in
place. The pickle comes from the parent process through a pipe of its own; nothing else is ever unpickled.
"""

import json
import os
import pickle
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from bus.errors import ConfigurationError, OffloopError
from bus.net.curve import ClientSecurity, client_security
from bus.net.requests import list_remote_runs
from bus.printing import say
from bus.runs.directory import RUN_FILE
from bus.subscriber.subscriber import Subscriber
from bus.types.demand import shortest_delay
from consumers.api.callback import Callback
from consumers.api.logger import LoggerDestination
from consumers.callbacks import TrainerMetrics
from consumers.loggers import ConsoleLogger
from consumers.runner.checkpoint_states import CheckpointStates
from consumers.runner.entries import Subscription, wanted_events
from consumers.runner.session import format_outcomes, format_places, run_session

NAME = "callbacks"
"""What the consumer of a trainer's own callbacks is called."""


def run_attached(
    run: str,
    callbacks: Sequence[Callback],
    loggers: Sequence[LoggerDestination],
    broker: str | None = None,
    security: ClientSecurity | None = None,
    shows: bool = False,
) -> int:
    """Runs a trainer's callbacks until its run ends; returns the exit code, 1 if one of them or a logger failed.

    ``run`` is the run's directory, or its name at the broker at ``broker``. Loggers get what the trainer itself has to
    say too; callbacks without a logger log to the console.
    """
    made = list(callbacks)
    if loggers and not any(isinstance(callback, TrainerMetrics) for callback in made):
        made.insert(0, TrainerMetrics())
    wanted_events(made)

    destinations = list(loggers) or [ConsoleLogger()]
    delay = shortest_delay(destination.max_delay for destination in destinations)

    def open_stream(chosen: Sequence[Callback], after: Mapping[int, tuple[int, int]] | None) -> Subscriber:
        return Subscriber(run, broker=broker, security=security, **vars(Subscription.of(chosen, NAME, after, delay)))

    _, statistics = run_session(open_stream, made, destinations, checkpoint_states=CheckpointStates(NAME))
    for line in format_outcomes(statistics):
        say(line, err=True)
    for line in (*statistics.problems, *(format_places(statistics) if shows else ())):
        say(line, err=True)
    return 1 if statistics.problems else 0


def read_order(stream: BinaryIO) -> dict[str, Any]:
    """Reads what the trainer sends.

    Raises:
        ConfigurationError: it cannot be read, or an object in it cannot be made in this process.
    """
    try:
        order: dict[str, Any] = json.loads(stream.readline())
        sys.path[:] = order["sys_path"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"standard input does not begin with a line of JSON with sys_path and run: {error!r}"
        ) from None
    try:
        order |= pickle.load(stream)
    except Exception as error:  # unpickling runs the constructors of the user's classes, which may raise anything
        raise ConfigurationError(
            f"the callbacks and loggers given to the trainer cannot be made in their own process: "
            f"{type(error).__name__}: {error}"
        ) from error
    return order


def main() -> None:
    """Entry point."""
    # Ctrl-C in the terminal reaches the trainer and this process alike: the trainer ends the run, and this process is
    # to see the end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        order = read_order(sys.stdin.buffer)
        run, broker, security = order["run"], order.get("broker"), None
        if broker is not None:
            security = client_security(order.get("key"), order.get("broker_key"))
            # Asked for it, the broker makes what is not there yet.
            list_remote_runs(broker, security, run)
            if (Path(order["path"]) / RUN_FILE).exists():
                run, broker, security = order["path"], None, None
        code = run_attached(run, order["callbacks"], order["loggers"], broker, security, order.get("shows", False))
    except OffloopError as error:
        say(f"error: {error}", err=True)
        code = 1
    except BrokenPipeError:
        # Whoever read our output is gone; nothing may be flushed to it at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)


if __name__ == "__main__":
    main()
