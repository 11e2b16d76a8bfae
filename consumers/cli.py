"""The command ``consumer``: attach callbacks to a run, or replay a recording through them."""

from pathlib import Path
from typing import get_args

import click

from bus.recording import Recording
from bus.runs import RUN_FILE, read_run
from bus.subscriber import Subscriber
from bus.terminal import run_command
from consumers.attach import Stream, attach, find_or_wait, newest_or_wait
from consumers.registry import CALLBACKS, LOGGERS, create_selected
from consumers.runner import OnError, Runner, RunnerStatistics, wanted_events

__all__ = ["consumer", "main"]

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
    "--replay", type=click.Path(path_type=Path), metavar="PATH", help="Reads a recording or a run's directory."
)
@click.option("--wait", is_flag=True, help="Waits for the next run, or with --run for that one to exist.")
@click.option(
    "--on-error",
    type=click.Choice(get_args(OnError)),
    default="continue",
    show_default=True,
    help="What a callback that raises gets: further events, none, or the end of the consumer.",
)
@click.version_option(package_name="offloop", prog_name="consumer")
@click.option("--list", "show_list", is_flag=True, help="Shows callbacks and loggers with their options, and exits.")
def consumer(
    callbacks: list[str],
    loggers: list[str],
    options: tuple[str, ...],
    run: str | None,
    runs_dir: Path | None,
    replay: Path | None,
    wait: bool,
    on_error: OnError,
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
    made, destinations = create_selected(callbacks, loggers, options)
    events = wanted_events(made)
    if replay or (run and Path(run).is_file()):
        stream: Stream = Recording(replay or Path(str(run)))
    elif run:
        stream = attach(find_or_wait(run, runs_dir, wait, _say), events)
    else:
        stream = attach(newest_or_wait(runs_dir, wait, _say), events)
    if isinstance(stream, Subscriber):
        _say(f"attached to run {stream.run_name}, which is live; Ctrl-C leaves it")
    try:
        statistics = Runner(stream, made, destinations, on_error).run()
    finally:
        if isinstance(stream, Subscriber):
            stream.close()
    return _report(stream, statistics)


def main() -> None:
    """Entry point of the command."""
    run_command(consumer)


def _say(message: str) -> None:
    click.echo(message, err=True)


def _report(stream: Stream, statistics: RunnerStatistics) -> int:
    """Says how it went, in the last lines on standard error; returns the exit code."""
    missing = [f"missing: events {gap.first} to {gap.last} of rank {gap.rank}, which nobody has" for gap in stream.gaps]
    problems = [*statistics.problems, *missing]
    for problem in problems:
        _say(problem)
    handled = f"{statistics.handled} events handled"
    if statistics.interrupted:
        _say(f"run {stream.run_name} was left on request: {handled}")
        return EXIT_TROUBLE if problems else 0
    if stream.ending is None or stream.ending.status == "lost":
        return _report_no_end(stream, handled, EXIT_TROUBLE if problems else 0)
    _say(f"run {stream.run_name} {stream.ending}: {handled}{_damage(stream)}")
    return EXIT_LOST if stream.damage else EXIT_TROUBLE if problems else 0


def _report_no_end(stream: Stream, handled: str, code: int) -> int:
    if _is_live(stream):
        _say(f"run {stream.run_name} is still live: {handled}, which is what is recorded so far")
        return code
    why = stream.ending.error if stream.ending is not None and stream.ending.error else "nothing says how it ended"
    _say(f"run {stream.run_name} was lost, {why}: {handled}{_damage(stream)}")
    return EXIT_LOST


def _damage(stream: Stream) -> str:
    return f"; {stream.damage}, all else was read" if stream.damage else ""


def _is_live(stream: Stream) -> bool:
    if not isinstance(stream, Recording) or not (stream.path.parent / RUN_FILE).exists():
        return False
    run = read_run(stream.path.parent)
    return run.live and run.recording == stream.path


def _print_list() -> None:
    click.echo("Callbacks (--callbacks NAME,NAME, or package.module:Class, or file.py:Class)")
    click.echo("\n".join(CALLBACKS.listing()))
    click.echo("\nLoggers (--log NAME,NAME)")
    click.echo("\n".join(LOGGERS.listing()))
