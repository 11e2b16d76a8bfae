"""The command ``offloop backfill``: run callbacks over runs that have ended."""

import os
from typing import Any

import click

from offloop.bus.cli import options
from offloop.bus.terminal import CliCommand
from offloop.consumers.cli.main import settings_option


@click.command(cls=CliCommand, name="backfill", short_help="Run callbacks over runs that have ended.")
@click.argument("callbacks", callback=options.split_names, metavar="CALLBACK,...")
@click.argument("runs", metavar="[RUN]...", nargs=-1)
@options.where_option
@options.runs_dir_option
@options.json_option
@settings_option
@click.option("--name", default="derived", show_default=True, metavar="NAME", help="Metrics become NAME/METRIC.")
@click.option(
    "--jobs", type=click.IntRange(min=1), default=os.cpu_count() or 1, metavar="N", help="How many at a time."
)
@click.option("--what-if", is_flag=True, help="Say where alerts and stoppers would have acted; change nothing.")
def backfill(**given: Any) -> int:
    """Run callbacks over each RUN that has ended, and add what they log to it.

    CALLBACK is as for 'consumer --callbacks'. Their metrics and tables lie beside the recordings, which do not change;
    charts, 'offloop runs' and offloop.runs() show them. A run that has results of that NAME is left out.

    \b
    offloop backfill nan --where "task == 'digits'"
    offloop backfill my.py:Judge --name judge run-1 run-2
    offloop backfill alert -o "alert.rules=loss > 10" --where "lr > 0.1" --what-if

    Exit code: 0 if all was done, 1 if a run failed."""
    from offloop.consumers.cli.old_runs import run_over

    return run_over(**given)
