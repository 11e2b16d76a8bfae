"""The process of a trainer's callbacks: ``python -m offloop.consumers.cli.attached``.

Its standard input begins with a line of JSON, ``{"sys_path": [...], "run": "...", "shows": ...}``: the run's directory,
and whether to report at the end where loggers wrote. A pickle of ``{"callbacks": [...], "loggers": [...]}`` follows.
The line comes first because unpickling imports the user's modules, which needs the trainer's ``sys.path``. A text among
the callbacks and loggers is a name, as for ``consumer``. With ``describe`` in the line nothing is run: the last line on
standard output is then the demand of these callbacks as JSON, see :func:`describe`. The pickle comes from the parent
process through a pipe; nothing else is ever unpickled."""

import contextlib
import json
import os
import pickle
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

from offloop.bus.errors import ConfigurationError, OffloopError
from offloop.bus.printing import AboveLastLine, is_screen, say
from offloop.bus.subscriber.subscriber import Subscriber
from offloop.bus.types.demand import barrier_events_of, shortest_delay
from offloop.consumers.api.callback import Callback, demand_of
from offloop.consumers.api.logger import LoggerDestination
from offloop.consumers.callbacks import TrainerMetrics
from offloop.consumers.loggers import ConsoleLogger
from offloop.consumers.runner.checkpoint_states import CheckpointStates
from offloop.consumers.runner.entries import Subscription, requested_events
from offloop.consumers.runner.runner import run_session

if TYPE_CHECKING:
    from offloop.bus.plugins.registry import Registry

NAME = "callbacks"  # name of the consumer of a trainer's own callbacks


def run_attached(
    run: str, callbacks: Sequence[Callback], loggers: Sequence[LoggerDestination], shows: bool = False
) -> int:
    """Run a trainer's callbacks until its run ends; return the exit code, 1 after an error.

    ``run`` is the run's directory. Loggers receive the trainer's metrics too; the default logger is the console."""
    made = list(callbacks)
    if loggers and not any(isinstance(callback, TrainerMetrics) for callback in made):
        made.insert(0, TrainerMetrics())
    requested_events(made)
    for callback in made:
        callback.check()

    destinations = list(loggers) or [ConsoleLogger()]
    delay = shortest_delay(destination.max_delay for destination in destinations)

    def open_stream(chosen: Sequence[Callback], after: Mapping[int, tuple[int, int]] | None) -> Subscriber:
        return Subscriber(run, **vars(Subscription.of(chosen, NAME, after, delay)))

    _, statistics = run_session(open_stream, made, destinations, checkpoint_states=CheckpointStates(NAME))
    for line in statistics.outcome_lines:
        say(line, err=True)
    for line in (*statistics.problems, *(statistics.place_lines if shows else ())):
        say(line, err=True)
    return 1 if statistics.problems else 0


def create_named(callbacks: Iterable[Any], loggers: Iterable[Any]) -> tuple[list[Callback], list[LoggerDestination]]:
    """Replace each name once by an object. Raises ConfigurationError."""
    given = [*callbacks], [*loggers]
    if not any(isinstance(one, str) for one in (*given[0], *given[1])):
        return given
    # Only now, because it takes time.
    from offloop.consumers.cli.registry import CALLBACKS, LOGGERS

    return _create(CALLBACKS, given[0]), _create(LOGGERS, given[1])


def _create(registry: "Registry[Any]", given: list[Any]) -> list[Any]:
    named = dict.fromkeys(one for one in given if isinstance(one, str))
    made = {name: registry.create(name, {}) for name in named}
    # A name stays at its first place.
    return [made.pop(one) if isinstance(one, str) else one for one in given if not isinstance(one, str) or one in made]


def describe(names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``demand`` and ``barrier_events`` of named callbacks, or the ``error`` on this machine."""
    try:
        callbacks, loggers = create_named(names["callbacks"], names["loggers"])
        requested_events(callbacks)
        for callback in callbacks:
            callback.check()
        for logger in loggers:
            logger.check()
        demand, decides = demand_of(callbacks), barrier_events_of(callbacks)
    except OffloopError as error:
        return {"error": str(error)}
    return {"demand": demand.to_wire(), "barrier_events": sorted(event.value for event in decides)}


def read_order(stream: BinaryIO) -> dict[str, Any]:
    """Read the trainer's input. Raises ConfigurationError if it is malformed or an object cannot be made here."""
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
            f"the callbacks and loggers given to the trainer cannot be created in their process: "
            f"{type(error).__name__}: {error}"
        ) from error
    return order


@contextlib.contextmanager
def _beside_the_trainer() -> Iterator[None]:
    """Print above the progress bar that the trainer may draw on the terminal."""
    originals = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    shared = {name: AboveLastLine(stream) for name, stream in originals.items() if is_screen(stream)}
    for name, stream in shared.items():
        setattr(sys, name, stream)
    try:
        yield
    finally:
        for name, stream in shared.items():
            # The terminal may be gone.
            with contextlib.suppress(OSError):
                stream.close()
            setattr(sys, name, originals[name])


def main() -> None:
    # Ctrl-C in the terminal reaches the trainer too, which ends the run; this process waits for that end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with _beside_the_trainer():
        code = _run_order()
    sys.exit(code)


def _run_order() -> int:
    try:
        order = read_order(sys.stdin.buffer)
        if order.get("describe"):
            say(json.dumps(describe(order)))
            return 0
        callbacks, loggers = create_named(order["callbacks"], order["loggers"])
        code = run_attached(order["run"], callbacks, loggers, order.get("shows", False))
    except OffloopError as error:
        say(f"error: {error}", err=True)
        code = 1
    except BrokenPipeError:
        # The reader of our output is gone; nothing may be flushed to it at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    return code


if __name__ == "__main__":
    main()
