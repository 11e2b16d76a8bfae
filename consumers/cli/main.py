"""The command ``offloop consume``, or ``consumer``: attach callbacks to a run, or replay a recording through them."""

from pathlib import Path
from typing import Any, Final, get_args

import click

from offloop.bus.cli.options import (
    place_options,
    rate_option,
    split_names,
    start_option,
    until_option,
    wait_option,
)
from offloop.bus.terminal import CliCommand, run_command
from offloop.consumers.api.callback import OnError
from offloop.consumers.delivery.commit import COMMIT_EVENTS

callbacks_option: Final = click.option(
    "--callbacks",
    "-c",
    callback=split_names,
    metavar="NAME,...",
    multiple=True,
    default=["metrics,speed,lr"],
    show_default=True,
    help="Callbacks to run.",
)
loggers_option: Final = click.option(
    "--log",
    "-l",
    "loggers",
    callback=split_names,
    metavar="NAME,...",
    multiple=True,
    default=["console"],
    show_default=True,
    help="Where to log to.",
)
settings_option: Final = click.option(
    "-o", "options", metavar="NAME.OPTION=VALUE", multiple=True, help="Set an option of a callback or logger."
)


@click.command(
    cls=CliCommand,
    short_help="Run callbacks and loggers on a run.",
    frequent=("--callbacks", "--log", "-o", "--run", "--last", "--replay", "--name", "--list"),
)
@callbacks_option
@loggers_option
@settings_option
@click.option("--run", metavar="NAME|PATH", help="The run to read. Default: the newest live one.")
@click.option("--last", is_flag=True, help="Read the newest run, live or not.")
@click.option("--all", "every_run", is_flag=True, help="All runs of the folder, also new ones, until Ctrl-C.")
@place_options
@click.option(
    "--replay", type=click.Path(path_type=Path), metavar="PATH", help="Read a recording: a file, or a run's newest."
)
@rate_option
@start_option
@until_option
@wait_option
@click.option(
    "--on-error",
    type=click.Choice(get_args(OnError)),
    default="continue",
    metavar="ACTION",
    help="After an error: continue (default), disable, stop.",
)
@click.option("--name", metavar="NAME", help="Keep the position, and resume from it next time.")
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="With --name: folder of the position's file.",
)
@click.option(
    "--commit-every",
    type=click.IntRange(min=1),
    default=COMMIT_EVENTS,
    metavar="N",
    hidden=True,
    help="With --name: events between two saves, at most a second apart.",
)
@click.option("--max-delay", type=float, metavar="SECONDS", hidden=True, help="How late events may come: 0 to 1.")
@click.version_option(package_name="offloop", prog_name="consumer")
@click.option("--list", "show_list", is_flag=True, help="Show callbacks, loggers, their options, and exit.")
def consumer(**options: Any) -> int:
    """Run callbacks on a run, in a separate process, without slowing the training.

    By default attach to the live run, or wait for one, and read its history first. Callbacks are names that --list
    shows, package.module:Class or file.py:Class.

    Exit code: 0 when all was handled, or it was detached; 1 after an error of a callback or logger; 3 when the run was
    lost or damaged; 130 after Ctrl-C while it waited for a run."""
    from offloop.consumers.cli.consume import ConsumerOptions, consume

    return consume(ConsumerOptions(**options))


def main() -> None:
    run_command(consumer)
