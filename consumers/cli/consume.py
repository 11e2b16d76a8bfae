"""What the command ``consumer`` does with its options."""

import contextlib
import gc
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click
from click.core import ParameterSource

from offloop.bus.cli.options import ReplayChoice
from offloop.bus.errors import ConfigurationError
from offloop.bus.recording.window import Bound
from offloop.bus.types.demand import check_max_delay, shortest_delay
from offloop.consumers.api.callback import Callback, OnError, demand_of
from offloop.consumers.api.logger import LoggerDestination
from offloop.consumers.cli.registry import CALLBACKS, LOGGERS, create_selected
from offloop.consumers.cli.report import EXIT_TROUBLE, report, say, say_start
from offloop.consumers.cli.selector import RunSelector, SourceStreams, open_state
from offloop.consumers.runner.checkpoint_states import CheckpointStates
from offloop.consumers.runner.entries import requested_events, unique_names
from offloop.consumers.runner.session import run_session
from offloop.consumers.runner.state_file import check_name


@dataclass(frozen=True, kw_only=True)
class ConsumerOptions:
    """The options of the command, as it reads them; its help says what each is."""

    callbacks: list[str]
    loggers: list[str]
    options: tuple[str, ...]
    run: str | None
    ranks: tuple[int, ...]
    last: bool
    runs_dir: str | None
    stream: str | None
    replay: Path | None
    rate: float | None
    start: Bound | None
    until: Bound | None
    loop: bool
    wait: bool
    on_error: OnError
    name: str | None
    state_dir: Path | None
    commit_every: int
    max_delay: float | None
    show_list: bool

    @property
    def source(self) -> RunSelector:
        """The run or recording to read."""
        return RunSelector(self.run, self.runs_dir, self.stream, self.replay, self.wait, self.last, self.ranks)

    @property
    def choice(self) -> ReplayChoice:
        """The way to replay a recording."""
        return ReplayChoice(self.rate, self.start, self.until, self.loop)

    def check(self) -> None:
        """Raises for options that do not go together, or for a value that is not allowed."""
        if not self.callbacks:
            raise click.UsageError("--callbacks names none: give one at least; '--list' shows what there is")
        self.source.check()
        if self.choice.option and not self.source.is_file:
            raise click.UsageError(
                f"{self.choice.option} is for a recording: name it with '--replay FILE'; 'offloop replay FILE' replays "
                "it for other consumers"
            )
        if self.loop and self.name is not None:
            raise click.UsageError("--loop begins anew each time, and --name goes on from before: give one of them")
        if self.name is not None:
            check_name(self.name)
        elif self.state_dir:
            raise click.UsageError("--state-dir is where '--name' keeps how far a consumer is: give it a name too")
        if self.max_delay is not None:
            check_max_delay(self.max_delay, "--max-delay")

    def create(self) -> tuple[list[Callback], list[LoggerDestination]]:
        """The callbacks and loggers, new ones with each call."""
        made, destinations = create_selected(self.callbacks, self.loggers, self.options)
        return made, beside_terminal(made, destinations, _is_default("loggers"))


def consume(options: ConsumerOptions) -> int:
    """Runs the command and returns its exit code."""
    if options.show_list:
        _print_list()
        return 0
    options.check()
    made, destinations = options.create()
    requested_events(made)
    demand_of(made)
    for callback in made:
        callback.check()
    for destination in destinations:
        destination.check()
    if options.callbacks == ["top"] and not destinations and options.name is None and options.source.names_nothing:
        # Only now, because it takes time.
        from offloop.consumers.dashboard.terminal.home import show_all_runs

        show_all_runs(options.runs_dir, made[0].every)
        return 0
    return _run(options, made, destinations)


def _run(options: ConsumerOptions, made: list[Callback], destinations: list[LoggerDestination]) -> int:
    found, name, choice = options.source.find(say), options.name, options.choice
    delay = shortest_delay([options.max_delay, *(destination.max_delay for destination in destinations)])
    streams = SourceStreams(found, choice, name, delay)
    progress = None if name is None else open_state(options.state_dir, name, found, say)
    states = None if name is None else CheckpointStates(name, options.state_dir)
    code = 0
    while True:
        with _frozen():
            events, statistics = run_session(
                streams.open,
                made,
                destinations,
                options.on_error,
                progress,
                options.commit_every,
                partial(say_start, name=name),
                states,
            )
        code = max(code, report(events, statistics, sorted(demand_of(made).fields - statistics.source.fields.keys())))
        is_empty = streams.gave_nothing and not statistics.handled
        if not options.loop or statistics.interrupted or is_empty:
            break
        made, destinations = options.create()
        streams.rewind()
    if statistics.interrupted:
        return code
    if is_empty and (options.start or options.until or options.loop):
        say(
            f"nothing was replayed: no event that these callbacks request is {choice.bounds}; 'offloop show PATH' "
            "shows how long the run was"
        )
        return max(code, EXIT_TROUBLE)
    hold_open(made)
    return code


@contextlib.contextmanager
def _frozen() -> Iterator[None]:
    """Keeps the garbage collector from going through everything that is loaded again and again: a tenth of the time
    that a long history takes."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _is_default(option: str) -> bool:
    return click.get_current_context().get_parameter_source(option) is ParameterSource.DEFAULT


def _print_list() -> None:
    click.echo("Callbacks (--callbacks NAME,NAME, or package.module:Class, or file.py:Class)")
    click.echo("\n".join(CALLBACKS.listing()))
    click.echo("\nLoggers (--log NAME,NAME)")
    click.echo("\n".join(LOGGERS.listing()))


def beside_terminal(
    callbacks: Sequence[Callback], destinations: list[LoggerDestination], is_default: bool
) -> list[LoggerDestination]:
    """The destinations that can be had beside callbacks that draw on the whole terminal: none of them when
    ``is_default``, that is when nobody named them.

    Raises:
        ConfigurationError: two would write to the terminal, of which one draws on all of it.
    """
    owners = [
        shown for shown, callback in zip(unique_names(callbacks), callbacks, strict=True) if callback.owns_terminal
    ]
    if len(owners) > 1:
        raise ConfigurationError(f"{' and '.join(owners)} both draw on the whole terminal: give one of them")
    if not owners:
        return destinations
    if is_default:
        return []
    writing = [type(one).__name__ for one in destinations if one.writes_to_terminal]
    if writing:
        raise ConfigurationError(
            f"{owners[0]} draws on the whole terminal, where {' and '.join(writing)} would write too: "
            "log to a file ('--log csv'), or run them in a second terminal"
        )
    return destinations


def hold_open(callbacks: Sequence[Callback]) -> None:
    """Keeps callbacks open that show something, until SIGINT or SIGTERM."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        # First those that have the terminal: they give it back.
        for callback in sorted(callbacks, key=lambda one: not one.owns_terminal):
            callback.hold_open()
    except KeyboardInterrupt:
        """The signal ends it."""
    finally:
        signal.signal(signal.SIGTERM, before)
