"""The command ``consumer``: attach callbacks to a run, or replay a recording through them."""

import contextlib
import os
import signal
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import get_args

import click
from click.core import ParameterSource

from bus.errors import ConfigurationError
from bus.recording import Recording
from bus.replay import Replay
from bus.replay_keys import KEYS_HELP, ReplayKeys, has_keyboard
from bus.replay_moments import Moment
from bus.replay_options import ReplayChoice, moment_given, rate_given
from bus.replay_pace import Pace
from bus.runs import RUN_FILE, RunInfo, read_run
from bus.security import client_security
from bus.subscriber import Subscriber
from bus.terminal import run_command
from consumers.attach import RemoteRunInfo, Stream, attach, find_or_wait, find_remote, newest_or_wait
from consumers.callback import Callback, demand_of
from consumers.logger import LoggerDestination
from consumers.members import decides_of, numbered_names
from consumers.progress import Committed
from consumers.registry import CALLBACKS, LOGGERS, create_selected
from consumers.runner import COMMIT_EVENTS, OnError, RunnerStatistics, wanted_events
from consumers.session import run_session, told_outcomes
from consumers.state_file import StateFile, check_name

__all__ = ["consumer", "main"]

STATE_DIR = "consumers"
"""Where in a run's directory named consumers keep how far they are."""

EXIT_TROUBLE = 1
EXIT_LOST = 4


def _split(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> list[str]:
    return [name.strip() for value in values for name in value.split(",") if name.strip()]


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--callbacks",
    "-c",
    callback=_split,
    metavar="NAME[,NAME...]",
    multiple=True,
    default=["metrics,speed,lr"],
    show_default=True,
    help="Callbacks to run; '--list' shows them. Others as package.module:Class or file.py:Class.",
)
@click.option(
    "--log",
    "-l",
    "loggers",
    callback=_split,
    metavar="NAME[,NAME...]",
    multiple=True,
    default=["console"],
    show_default=True,
    help="Where to log to.",
)
@click.option(
    "-o", "options", metavar="NAME.OPTION=VALUE", multiple=True, help="Sets an option of a callback or logger."
)
@click.option("--run", metavar="NAME|PATH", help="The run to attach to; without it the newest live one.")
@click.option(
    "--runs-dir", type=click.Path(path_type=Path), help="Where runs live [default: $OFFLOOP_RUNS_DIR or runs]."
)
@click.option(
    "--broker", metavar="ADDRESS", help="Reads everything through the broker there, such as tcp://10.0.0.1:5570."
)
@click.option("--key", metavar="FILE", help="Your secret key for that broker [default: $OFFLOOP_KEY].")
@click.option("--broker-key", metavar="FILE", help="That broker's public key [default: $OFFLOOP_BROKER_KEY].")
@click.option(
    "--replay", type=click.Path(path_type=Path), metavar="PATH", help="Reads a recording or a run's directory."
)
@click.option(
    "--rate",
    callback=rate_given,
    metavar="RATE",
    help="How fast to replay: 1 as it was, 10 ten times as fast, max at once. Default: max. In a terminal keys work: "
    f"{KEYS_HELP}.",
)
@click.option(
    "--start",
    callback=moment_given,
    metavar="TIME",
    help="Replays from there on, after the events before the first batch: 2ep, 100ba, 0.5dur; 90sec of training; +90s "
    "after the recording began; 2026-11-21T10:00.",
)
@click.option(
    "--until", callback=moment_given, metavar="TIME", help="Replays up to there; what is at that time is included."
)
@click.option(
    "--loop", is_flag=True, help="Replays again and again, each time with new callbacks and loggers, until Ctrl-C."
)
@click.option("--paused", is_flag=True, help="Begins the replay standing still, for the same keys.")
@click.option("--wait", is_flag=True, help="Waits for the next run, or with --run for that one to exist.")
@click.option(
    "--on-error",
    type=click.Choice(get_args(OnError)),
    default="continue",
    show_default=True,
    help="What a callback that raises gets: further events, none, or the end of the consumer.",
)
@click.option(
    "--name",
    metavar="NAME",
    help="Keeps how far this consumer is, under that name in the run's directory. The same command goes on from there "
    "after whatever ended it, and its files come out as if nothing had happened. After an error with "
    "'--on-error stop' it goes on before that error.",
)
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Where '--name' keeps that. Default: 'consumers' in the run's directory.",
)
@click.option(
    "--commit-every",
    type=click.IntRange(min=1),
    default=COMMIT_EVENTS,
    show_default=True,
    metavar="N",
    help="With '--name', after how many events to keep how far it is; once a second in any case.",
)
@click.version_option(package_name="offloop", prog_name="consumer")
@click.option("--list", "show_list", is_flag=True, help="Shows callbacks and loggers with their options, and exits.")
def consumer(
    callbacks: list[str],
    loggers: list[str],
    options: tuple[str, ...],
    run: str | None,
    runs_dir: Path | None,
    broker: str | None,
    key: str | None,
    broker_key: str | None,
    replay: Path | None,
    rate: float | None,
    start: Moment | None,
    until: Moment | None,
    loop: bool,
    paused: bool,
    wait: bool,
    on_error: OnError,
    name: str | None,
    state_dir: Path | None,
    commit_every: int,
    show_list: bool,
) -> int:
    """Runs callbacks on a training run, from outside and without slowing it.

    With nothing else it attaches to the live run and gets its whole history first; when no run is live it reads the
    newest recording, and when there is none it waits for a run.

    Exit code: 0 when everything was handled, however the run ended; 1 for an error of a callback or logger; 4 when the
    run was lost or its recording is damaged.
    """
    if show_list:
        _print_list()
        return 0
    if replay and (run or wait):
        raise click.UsageError("--replay reads a file: it goes with neither --run nor --wait")
    if broker and (replay or runs_dir):
        raise click.UsageError("--broker reads everything through it: it goes with neither --replay nor --runs-dir")
    if (key or broker_key) and not broker:
        raise click.UsageError("--key and --broker-key are for a broker elsewhere: name it with --broker")
    if name is not None and broker and state_dir is None:
        raise click.UsageError(
            "--name keeps how far a consumer is in the run's directory, which is on another machine: "
            "add --state-dir DIR"
        )
    chosen_replay = ReplayChoice(rate, start, until, loop, paused)
    if chosen_replay.option and not _names_file(run, replay):
        raise click.UsageError(
            f"{chosen_replay.option} is for a recording: name it with '--replay FILE'; 'bus replay FILE' replays it "
            "for other consumers"
        )
    if loop and name is not None:
        raise click.UsageError("--loop begins anew each time, and --name goes on from before: give one of them")
    if name is not None:
        check_name(name)
    elif state_dir:
        raise click.UsageError("--state-dir is where '--name' keeps how far a consumer is: give it a name too")
    logs_by_default = _is_default("loggers")

    def create() -> tuple[list[Callback], list[LoggerDestination]]:
        made, destinations = create_selected(callbacks, loggers, options)
        return made, _beside_terminal(made, destinations, logs_by_default)

    made, destinations = create()
    wanted_events(made)
    demand_of(made)
    pace = Pace(chosen_replay.rate_or_max, paused=paused)
    keys = _keys(pace, chosen_replay, made)
    found: RunInfo | RemoteRunInfo | Recording
    if broker:
        found = find_remote(broker, run, client_security(key, broker_key), wait, _say)
    else:
        found = _find(run, runs_dir, replay, wait)

    replays: list[Replay] = []

    def open_stream(chosen: Sequence[Callback], after: Mapping[int, tuple[int, int]] | None) -> Stream:
        if isinstance(found, Recording) and chosen_replay.option:
            events = wanted_events(chosen)
            replays.append(Replay(Recording(found.path), pace, start, until, events=events, after=after))
            return replays[-1]
        if isinstance(found, Recording):
            return Recording(found.path)
        return attach(found, wanted_events(chosen), demand_of(chosen), name, after, decides_of(chosen))

    def say_start(stream: Stream, committed: Committed | None) -> None:
        if isinstance(stream, Subscriber) and stream.live:
            _say(f"attached to run {stream.run_name}, which is live; Ctrl-C leaves it")
        if committed is not None:
            _say_committed(committed, str(name))

    progress = None if name is None else _open_state(state_dir, name, found)
    code = 0
    with keys:
        while True:
            stream, statistics = run_session(
                open_stream, made, destinations, on_error, progress, commit_every, say_start
            )
            code = max(code, _report(stream, statistics, sorted(demand_of(made).fields)))
            is_empty = bool(replays) and not statistics.handled and not any(one.given for one in replays)
            if not loop or statistics.interrupted or is_empty:
                break
            made, destinations = create()
            pace.rewind()
            replays.clear()
    if is_empty and (start or until or loop) and not statistics.interrupted:
        _say(
            f"nothing was replayed: no event that these callbacks want is {chosen_replay.bounds}; 'bus info PATH' "
            "tells how long the run was"
        )
        return max(code, EXIT_TROUBLE)
    if not statistics.interrupted:
        _linger(made)
    return code


def main() -> None:
    """Entry point of the command."""
    run_command(consumer)


def _is_default(option: str) -> bool:
    return click.get_current_context().get_parameter_source(option) is ParameterSource.DEFAULT


def _names_file(run: str | None, replay: Path | None) -> bool:
    return replay is not None or (run is not None and Path(run).is_file())


def _keys(pace: Pace, chosen: ReplayChoice, callbacks: Sequence[Callback]) -> contextlib.AbstractContextManager[object]:
    """What makes keys in the terminal drive a replay, where there are a pace and a terminal that is free for it."""
    has_terminal = not any(callback.owns_terminal for callback in callbacks)
    if chosen.paused and not has_terminal:
        raise click.UsageError("--paused waits for keys, which a callback that draws on the whole terminal takes")
    if chosen.paused or (chosen.is_paced and has_terminal and has_keyboard()):
        return ReplayKeys(pace, lambda: os.kill(os.getpid(), signal.SIGINT), _say)
    return contextlib.nullcontext()


def _beside_terminal(
    callbacks: Sequence[Callback], destinations: list[LoggerDestination], is_default: bool
) -> list[LoggerDestination]:
    """The destinations that can be had beside callbacks that draw on the whole terminal, of which there can be one."""
    owners = [
        shown for shown, callback in zip(numbered_names(callbacks), callbacks, strict=True) if callback.owns_terminal
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


def _linger(callbacks: Sequence[Callback]) -> None:
    """Lets callbacks with something to be looked at stay until they are left."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        # First those that have the terminal: they give it back.
        for callback in sorted(callbacks, key=lambda one: not one.owns_terminal):
            callback.linger()
    except KeyboardInterrupt:
        """That is how they are left."""
    finally:
        signal.signal(signal.SIGTERM, before)


def _find(run: str | None, runs_dir: Path | None, replay: Path | None, wait: bool) -> RunInfo | Recording:
    if _names_file(run, replay):
        return Recording(replay or Path(str(run)))
    return find_or_wait(run, runs_dir, wait, _say) if run else newest_or_wait(runs_dir, wait, _say)


def _open_state(directory: Path | None, name: str, found: RunInfo | RemoteRunInfo | Recording) -> StateFile:
    if isinstance(found, RemoteRunInfo):
        assert directory is not None  # asked for above
        return StateFile(directory, name, found.name, found.attempt)
    if isinstance(found, Recording):
        return StateFile(directory or found.path.parent / STATE_DIR, name, found.run_name, found.attempt)
    return StateFile(directory or found.path / STATE_DIR, name, found.name, found.last.number)


def _say_committed(committed: Committed, name: str) -> None:
    if committed.ending is not None:
        _say(f"consumer {name} has handled this run to its end already: nothing is logged again")
    elif committed.last is not None:
        _say(f"consumer {name} goes on after {committed.handled} events")


def _say(message: str) -> None:
    click.echo(message, err=True)


def _report(stream: Stream, statistics: RunnerStatistics, fields: Collection[str]) -> int:
    """Says how it went, in the last lines on standard error; returns the exit code."""
    missing = [
        f"missing: events {gap.first} to {gap.last} of rank {gap.rank}, which nobody has" for gap in statistics.gaps
    ]
    for field in fields:
        if field in statistics.fields_since:
            _say(f"{field} is there from batch {statistics.fields_since[field]} on")
        elif isinstance(stream, Recording | Replay):
            _say(f"{field} is not in this recording: attach while the training runs, so that it is asked for")
        else:
            _say(
                f"{field} never came: nobody asked in time, or the training has no such field (its own output says so)"
            )
    for line in told_outcomes(statistics):
        _say(line)
    problems = [*statistics.problems, *missing]
    for problem in problems:
        _say(problem)
    handled = f"{statistics.handled} events handled"
    if statistics.interrupted:
        _say(f"run {stream.run_name} was left on request: {handled}")
        return EXIT_TROUBLE if problems else 0
    if isinstance(stream, Replay) and statistics.ending is None:
        _say(f"run {stream.run_name} was replayed until {stream.until}: {handled}")
        return EXIT_TROUBLE if problems else 0
    if statistics.ending is None or statistics.ending.status == "lost":
        return _report_no_end(stream, handled, EXIT_TROUBLE if problems else 0)
    _say(f"run {stream.run_name} {statistics.ending}: {handled}{_damage(statistics.damage)}")
    return EXIT_LOST if statistics.damage else EXIT_TROUBLE if problems else 0


def _report_no_end(stream: Stream, handled: str, code: int) -> int:
    if _is_live(stream):
        _say(f"run {stream.run_name} is still live: {handled}, which is what is recorded so far")
        return code
    why = stream.ending.error if stream.ending is not None and stream.ending.error else "nothing says how it ended"
    _say(f"run {stream.run_name} was lost, {why}: {handled}{_damage(stream.damage)}")
    return EXIT_LOST


def _damage(damage: str | None) -> str:
    return f"; {damage}, all else was read" if damage else ""


def _is_live(stream: Stream) -> bool:
    if not isinstance(stream, Recording | Replay) or not (stream.path.parent / RUN_FILE).exists():
        return False
    run = read_run(stream.path.parent)
    return run.live and run.recording == stream.path


def _print_list() -> None:
    click.echo("Callbacks (--callbacks NAME,NAME, or package.module:Class, or file.py:Class)")
    click.echo("\n".join(CALLBACKS.listing()))
    click.echo("\nLoggers (--log NAME,NAME)")
    click.echo("\n".join(LOGGERS.listing()))
