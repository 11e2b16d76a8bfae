"""The command ``consumer``: attach callbacks to a run, or replay a recording through them."""

from functools import partial
from pathlib import Path
from typing import get_args

import click
from click.core import ParameterSource

from bus.cli.replay_keys import KEYS_HELP
from bus.cli.replay_options import ReplayChoice, moment_given, rate_given
from bus.recording.window import Moment
from bus.replay.pace import Pace
from bus.terminal import run_command
from consumers.api.callback import Callback, demand_of
from consumers.api.logger import LoggerDestination
from consumers.cli.metrics import list_metrics as print_metrics
from consumers.cli.registry import CALLBACKS, LOGGERS, create_selected
from consumers.cli.report import EXIT_TROUBLE, report, say, say_start
from consumers.cli.source import Source, SourceStreams, open_state
from consumers.cli.terminal import beside_terminal, linger, replay_keys
from consumers.runner.checkpoint_states import CheckpointStates
from consumers.runner.members import wanted_events
from consumers.runner.runner import COMMIT_EVENTS, OnError
from consumers.runner.session import run_session
from consumers.runner.state_file import check_name

__all__ = ["consumer", "main"]


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
@click.option("--run", metavar="NAME|PATH", help="The run to read, live or not; without it the newest live one.")
@click.option("--last", is_flag=True, help="Reads the newest run, live or not.")
@click.option(
    "--runs-dir", type=click.Path(path_type=Path), help="Where runs live [default: $OFFLOOP_RUNS_DIR or runs]."
)
@click.option(
    "--broker", metavar="ADDRESS", help="Reads everything through the broker there, such as tcp://10.0.0.1:5570."
)
@click.option("--key", metavar="FILE", help="Your secret key for that broker [default: $OFFLOOP_KEY].")
@click.option("--broker-key", metavar="FILE", help="That broker's public key [default: $OFFLOOP_BROKER_KEY].")
@click.option(
    "--replay",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Reads a recording: its path, its run's directory, or its run's name.",
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
@click.option("--wait", is_flag=True, help="With --run: waits for that run to exist.")
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
@click.option(
    "--list-metrics",
    is_flag=False,
    flag_value="",
    metavar="[RUN]",
    help="Shows what the run, by default the newest, has logged so far, by name, with its label, event and last value, "
    "and exits.",
)
@click.version_option(package_name="offloop", prog_name="consumer")
@click.option("--list", "show_list", is_flag=True, help="Shows callbacks and loggers with their options, and exits.")
def consumer(
    callbacks: list[str],
    loggers: list[str],
    options: tuple[str, ...],
    run: str | None,
    last: bool,
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
    list_metrics: str | None,
    show_list: bool,
) -> int:
    """Runs callbacks on a training run, from outside and without slowing it.

    With nothing else it attaches to the live run and gets its whole history first; when none is live it waits for one,
    however long it takes. '--last' reads the newest run that there is.

    Exit code: 0 when everything was handled, however the run ended; 1 for an error of a callback or logger, such as a
    stopper whose metric does not exist; 4 when the run was lost or its recording is damaged; 130 after Ctrl-C before
    there was a run.
    """
    if show_list:
        _print_list()
        return 0
    if not callbacks:
        raise click.UsageError("--callbacks names none: give one at least; '--list' shows what there is")
    if list_metrics and (run or replay):
        raise click.UsageError(f"--list-metrics names run {list_metrics!r} already: leave out --run and --replay")
    if list_metrics == "" and not (run or replay):
        last = True
    source = Source(run or list_metrics or None, runs_dir, broker, key, broker_key, replay, wait, last)
    choice = ReplayChoice(rate, start, until, loop, paused)
    _check_together(source, choice, name, state_dir)
    if list_metrics is not None:
        for line in print_metrics(source.find(say)):
            say(line)
        return 0
    logs_by_default = _is_default("loggers")

    def create() -> tuple[list[Callback], list[LoggerDestination]]:
        made, destinations = create_selected(callbacks, loggers, options)
        return made, beside_terminal(made, destinations, logs_by_default)

    made, destinations = create()
    wanted_events(made)
    demand_of(made)
    for callback in made:
        callback.check()
    for destination in destinations:
        destination.check()
    pace = Pace(choice.rate_or_max, paused=paused)
    keys = replay_keys(pace, choice, made, say)
    found = source.find(say)
    streams = SourceStreams(found, choice, pace, name)
    progress = None if name is None else open_state(state_dir, name, found)
    states = None if name is None else CheckpointStates(name, state_dir)
    code = 0
    with keys:
        while True:
            stream, statistics = run_session(
                streams.open,
                made,
                destinations,
                on_error,
                progress,
                commit_every,
                partial(say_start, name=name),
                states,
            )
            code = max(code, report(stream, statistics, sorted(demand_of(made).fields)))
            is_empty = streams.gave_nothing and not statistics.handled
            if not loop or statistics.interrupted or is_empty:
                break
            made, destinations = create()
            streams.rewind()
    if is_empty and (start or until or loop) and not statistics.interrupted:
        say(
            f"nothing was replayed: no event that these callbacks want is {choice.bounds}; 'bus info PATH' "
            "tells how long the run was"
        )
        return max(code, EXIT_TROUBLE)
    if not statistics.interrupted:
        linger(made)
    return code


def main() -> None:
    """Entry point of the command."""
    run_command(consumer)


def _check_together(source: Source, choice: ReplayChoice, name: str | None, state_dir: Path | None) -> None:
    """Raises for options that do not go together, or for a name that is not allowed."""
    source.check()
    if name is not None and source.broker and state_dir is None:
        raise click.UsageError(
            "--name keeps how far a consumer is in the run's directory, which is on another machine: "
            "add --state-dir DIR"
        )
    if choice.option and not source.is_file:
        raise click.UsageError(
            f"{choice.option} is for a recording: name it with '--replay FILE'; 'bus replay FILE' replays it "
            "for other consumers"
        )
    if choice.loop and name is not None:
        raise click.UsageError("--loop begins anew each time, and --name goes on from before: give one of them")
    if name is not None:
        check_name(name)
    elif state_dir:
        raise click.UsageError("--state-dir is where '--name' keeps how far a consumer is: give it a name too")


def _is_default(option: str) -> bool:
    return click.get_current_context().get_parameter_source(option) is ParameterSource.DEFAULT


def _print_list() -> None:
    click.echo("Callbacks (--callbacks NAME,NAME, or package.module:Class, or file.py:Class)")
    click.echo("\n".join(CALLBACKS.listing()))
    click.echo("\nLoggers (--log NAME,NAME)")
    click.echo("\n".join(LOGGERS.listing()))
