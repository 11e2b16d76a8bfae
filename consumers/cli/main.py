"""The command ``offloop consume``, or ``consumer``: attach callbacks to a run, or replay a recording through them."""

from pathlib import Path
from typing import Any, get_args

import click

from offloop.bus.cli.options import parse_bound_option, rate_given, stream_options
from offloop.bus.terminal import run_command
from offloop.consumers.api.callback import OnError
from offloop.consumers.delivery.commit import COMMIT_EVENTS


def _ranks(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
    try:
        ranks = tuple(int(rank) for rank in (value or "").split(",") if rank.strip())
    except ValueError:
        ranks = (-1,)
    if min(ranks, default=0) < 0:
        raise click.BadParameter(f"{value!r} is no list of ranks: write 17 or 17,18")
    return ranks


def _split(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> list[str]:
    return [name.strip() for value in values for name in value.split(",") if name.strip()]


callbacks_option = click.option(
    "--callbacks",
    "-c",
    callback=_split,
    metavar="NAME[,NAME...]",
    multiple=True,
    default=["metrics,speed,lr"],
    show_default=True,
    help="Callbacks to run; 'consumer --list' shows them. Others as package.module:Class or file.py:Class.",
)
loggers_option = click.option(
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
settings_option = click.option(
    "-o", "options", metavar="NAME.OPTION=VALUE", multiple=True, help="Sets an option of a callback or logger."
)


@click.command(
    short_help="Run callbacks and loggers on a run.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@stream_options
@callbacks_option
@loggers_option
@settings_option
@click.option("--run", metavar="NAME|PATH", help="The run to read, live or not; without it the newest live one.")
@click.option(
    "--ranks",
    callback=_ranks,
    metavar="RANK,RANK",
    help="With '--stream': only these ranks; their events come from their hosts.",
)
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
    help="How fast to replay: 1 as it was, 10 ten times as fast, max at once. Default: max.",
)
@click.option(
    "--start",
    callback=parse_bound_option,
    metavar="TIME",
    help="Replays from there on, after the events before the first batch: 2ep, 100ba, 0.5dur; 90sec of training; +90s "
    "after the recording began; 2026-11-21T10:00.",
)
@click.option(
    "--until",
    callback=parse_bound_option,
    metavar="TIME",
    help="Replays up to there; what is at that time is included.",
)
@click.option(
    "--loop", is_flag=True, help="Replays again and again, each time with new callbacks and loggers, until Ctrl-C."
)
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
    help="Keeps how far this consumer is, under that name in the run's directory, with '--stream' in NATS. The same "
    "command goes on from there after whatever ended it, and its files come out as if nothing had happened. After an "
    "error with '--on-error stop' it goes on before that error.",
)
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Where '--name' keeps that, in a file. Default: 'consumers' in the run's directory; with '--stream', NATS.",
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
    "--max-delay",
    type=float,
    metavar="SECONDS",
    help="How late events of a fast training may be, 0 to 1; it sends them together, because each sending costs it "
    "time. By default 0.1 for what is shown in the terminal; a training makes none wait longer than it does by itself, "
    "by default 0.05.",
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
def consumer(**options: Any) -> int:
    """Runs callbacks on a training run, from outside and without slowing it.

    With nothing else it attaches to the live run and gets its whole history first; when none is live it waits for one,
    however long it takes. '--last' reads the newest run that there is. '--callbacks top' alone shows a table of all
    runs.

    Exit code: 0 when everything was handled, however the run ended; 1 for an error of a callback or logger, such as a
    stopper whose metric does not exist; 4 when the run was lost or its recording is damaged; 130 after Ctrl-C before
    there was a run.
    """
    from offloop.consumers.cli.consume import consume

    return consume(**options)


def main() -> None:
    """Entry point of the command."""
    run_command(consumer)
