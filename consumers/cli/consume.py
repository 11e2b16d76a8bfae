"""Runs the command ``consumer`` with its options."""

import contextlib
import gc
import math
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click
from click.core import ParameterSource

from offloop.bus.cli.options import bounds_in_words
from offloop.bus.errors import ConfigurationError, RunNotFoundError
from offloop.bus.recording.recording import Recording
from offloop.bus.recording.replay import Pace, Replay
from offloop.bus.runs.directory import find_run
from offloop.bus.terminal import handle_signals
from offloop.bus.types.demand import check_max_delay, shortest_delay
from offloop.bus.types.time import Time
from offloop.consumers.api.callback import Callback, OnError, demand_of
from offloop.consumers.api.logger import LoggerDestination
from offloop.consumers.cli.registry import CALLBACKS, LOGGERS, create_selected
from offloop.consumers.cli.report import EXIT_TROUBLE, report, say, say_start
from offloop.consumers.runner.checkpoint_states import STATE_DIR, CheckpointStates
from offloop.consumers.runner.entries import Subscription, requested_events, unique_names
from offloop.consumers.runner.places import (
    FoundRun,
    Stream,
    find_or_wait,
    live_or_wait,
    newest_run,
    place_of,
)
from offloop.consumers.runner.runner import OnStart, run_session
from offloop.consumers.runner.state_file import StateFile, check_name
from offloop.consumers.runner.statistics import RunnerStatistics


@dataclass(frozen=True, kw_only=True)
class ConsumerOptions:
    callbacks: list[str]
    loggers: list[str]
    options: tuple[str, ...]
    run: str | None
    last: bool
    every_run: bool
    runs_dir: str | None
    stream: str | None
    replay: Path | None
    rate: float | None
    start: Time | None
    until: Time | None
    wait: bool
    on_error: OnError
    name: str | None
    state_dir: Path | None
    commit_every: int
    max_delay: float | None
    show_list: bool

    @property
    def is_file(self) -> bool:
        return self.replay is not None or (self.run is not None and not self.stream and Path(self.run).is_file())

    @property
    def replay_option(self) -> str | None:
        given = {"--rate": self.rate, "--start": self.start, "--until": self.until}
        return next((name for name, value in given.items() if value is not None), None)

    def check(self) -> None:
        if not self.callbacks:
            raise click.UsageError("--callbacks is empty: give at least one; '--list' shows the known ones")
        if self.run == "":
            raise click.UsageError(
                "--run is empty: give the name or folder of a run; without it the newest live one is read"
            )
        if self.replay and (self.run or self.wait):
            raise click.UsageError("--replay reads a file: it excludes --run and --wait")
        if self.last and (self.replay or self.run or self.wait):
            raise click.UsageError("--last reads the newest run: it excludes --replay, --run and --wait")
        if self.every_run and (self.replay or self.run or self.wait or self.last or self.stream):
            raise click.UsageError("--all is for a folder: it excludes --run, --last, --wait, --replay and --stream")
        if self.every_run and self.name is None:
            raise click.UsageError("--all reads recent runs to their end once: give it a --name, to keep what was read")
        if self.stream and self.replay:
            raise click.UsageError("--stream reads runs from NATS: it excludes --replay")
        if self.replay_option and not self.is_file:
            raise click.UsageError(f"{self.replay_option} is for a recording: name it with '--replay FILE'")
        if self.name is not None:
            check_name(self.name)
            if self.stream and not self.state_dir:
                raise click.UsageError("--name keeps the position in the run's folder; with --stream give --state-dir")
        elif self.state_dir:
            raise click.UsageError("--state-dir is the folder of the position that '--name' keeps: give --name too")
        if self.max_delay is not None:
            check_max_delay(self.max_delay, "--max-delay")

    def create(self) -> tuple[list[Callback], list[LoggerDestination]]:
        made, destinations = create_selected(self.callbacks, self.loggers, self.options)
        return made, _beside_terminal(made, destinations)

    def find(self) -> FoundRun | Recording:
        """Return the named run or recording, or the live run, waiting for it if necessary.

        Raises RunNotFoundError, RecordingError or BrokerError."""
        if self.replay is not None and not self.replay.exists():
            # A name that is not a run's either is reported as a file.
            with contextlib.suppress(RunNotFoundError, ConfigurationError):
                return Recording(find_run(str(self.replay), self.runs_dir).recording)
        if self.is_file:
            return Recording(self.replay or Path(str(self.run)))
        place = place_of(self.runs_dir, self.stream)
        if self.run:
            return find_or_wait(place, self.run, self.wait, say)
        return (newest_run if self.last else live_or_wait)(place, say)


def consume(options: ConsumerOptions) -> int:
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
    if options.every_run:
        from offloop.consumers.cli.every_run import follow_all

        return follow_all(options, made)
    return _run(options, made, destinations)


def _run(options: ConsumerOptions, made: list[Callback], destinations: list[LoggerDestination]) -> int:
    found = options.find()
    progress = None if options.name is None else open_state(options, found)
    with _frozen():
        on_start = partial(say_start, name=options.name)
        code, statistics, streams = run_on(options, found, made, destinations, progress, on_start)
    if statistics.interrupted:
        return code
    if streams.gave_nothing and not statistics.handled and (options.start or options.until):
        say(
            "nothing was replayed: no event that these callbacks request is "
            f"{bounds_in_words(options.start, options.until)}; 'offloop show PATH' shows how long the run was"
        )
        return max(code, EXIT_TROUBLE)
    _hold_open(made)
    return code


def run_on(
    options: ConsumerOptions,
    found: FoundRun | Recording,
    made: list[Callback],
    destinations: list[LoggerDestination],
    progress: StateFile | None,
    on_start: OnStart,
) -> "tuple[int, RunnerStatistics, _Streams]":
    """Run to the end of the stream and report on it; return the exit code, the statistics and the streams."""
    delay = shortest_delay([options.max_delay, *(destination.max_delay for destination in destinations)])
    streams = _Streams(found, options, delay)
    states = None if options.name is None else CheckpointStates(options.name, options.state_dir)
    events, statistics = run_session(
        streams.open, made, destinations, options.on_error, progress, options.commit_every, on_start, states
    )
    fields = sorted(demand_of(made).fields - statistics.source.fields.keys())
    return report(events, statistics, fields), statistics, streams


class _Streams:
    def __init__(self, found: FoundRun | Recording, options: ConsumerOptions, max_delay: float | None) -> None:
        self._found, self._options, self._max_delay = found, options, max_delay
        self._pace = Pace(math.inf if options.rate is None else options.rate)
        self._replays: list[Replay] = []

    @property
    def gave_nothing(self) -> bool:
        """True if the replays had no event that callbacks with separate streams request.

        The shared stream is the first, and brings the run's hyperparameters too."""
        return bool(self._replays) and not any(replay.given for replay in self._replays[1:])

    def open(self, callbacks: Sequence[Callback], after: Mapping[int, tuple[int, int]] | None) -> Stream:
        found, options = self._found, self._options
        if not isinstance(found, Recording):
            return found.attach(Subscription.of(callbacks, options.name, after, self._max_delay))
        recording = Recording(found.path)
        if options.replay_option is None:
            return recording
        events = requested_events(callbacks)
        replay = Replay(recording, self._pace, options.start, options.until, events=events, after=after)
        self._replays.append(replay)
        return replay


def open_state(options: ConsumerOptions, found: FoundRun | Recording) -> StateFile:
    """Return the file of a named consumer's progress: in its own folder, or in the run's."""
    directory, name = options.state_dir, str(options.name)
    if isinstance(found, Recording):
        return StateFile(directory or found.path.parent / STATE_DIR, name, found.run_name, found.attempt, found.run_id)
    return StateFile(directory or Path(found.key) / STATE_DIR, name, found.name, found.attempt, found.id)


@contextlib.contextmanager
def _frozen() -> Iterator[None]:
    """Exclude loaded objects from garbage collection, which takes a tenth of the time of a long history."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _print_list() -> None:
    click.echo("Callbacks (--callbacks NAME,NAME, or package.module:Class, or file.py:Class)")
    click.echo("\n".join(CALLBACKS.listing()))
    click.echo("\nLoggers (--log NAME,NAME)")
    click.echo("\n".join(LOGGERS.listing()))


def _beside_terminal(callbacks: Sequence[Callback], destinations: list[LoggerDestination]) -> list[LoggerDestination]:
    """Return the destinations that work beside callbacks that draw on the whole terminal.

    Default destinations are left out. Raises ConfigurationError when two would write to the terminal."""
    owners = [
        shown for shown, callback in zip(unique_names(callbacks), callbacks, strict=True) if callback.owns_terminal
    ]
    if len(owners) > 1:
        raise ConfigurationError(f"{' and '.join(owners)} both draw on the whole terminal: give one of them")
    if not owners:
        return destinations
    if click.get_current_context().get_parameter_source("loggers") is ParameterSource.DEFAULT:
        return []
    writing = [type(one).__name__ for one in destinations if one.writes_to_terminal]
    if writing:
        raise ConfigurationError(
            f"{owners[0]} draws on the whole terminal, where {' and '.join(writing)} would write too: "
            "log to a file ('--log csv'), or run them in a second terminal"
        )
    return destinations


def _hold_open(callbacks: Sequence[Callback]) -> None:
    with handle_signals(signal.default_int_handler, signal.SIGTERM), contextlib.suppress(KeyboardInterrupt):
        # First those on the terminal: they give it back.
        for callback in sorted(callbacks, key=lambda one: not one.owns_terminal):
            callback.hold_open()
