"""The command ``offloop alert``: send people messages about runs."""

from typing import Any

import click

from offloop.bus.cli.options import runs_dir_option
from offloop.bus.terminal import CliCommand
from offloop.consumers.cli.main import consumer

_TO = "env:OFFLOOP_ALERT_TO"
_RULES = ("finished", "failed", "lost", "stalled", "nan", "disk")


@click.command(cls=CliCommand, name="alert", short_help="Send messages about runs to your phone.")
@click.argument("run", required=False)
@click.option(
    "--to",
    multiple=True,
    default=[_TO],
    show_default=True,
    metavar="TO",
    help="env:NAME, file:PATH, or an address of Apprise without secrets.",
)
@click.option("--rule", "rules", multiple=True, metavar="RULE", help="A further rule, such as 'loss > 10 for 5ba'.")
@click.option("--all", "every_run", is_flag=True, help="All runs of the folder, present and new, until Ctrl-C.")
@runs_dir_option
@click.option("--name", default="alert", show_default=True, metavar="NAME", help="Keeps what was handled.")
def alert(run: str | None, to: tuple[str, ...], rules: tuple[str, ...], **given: Any) -> int:
    """Send a message when a run has finished, failed, is lost, stalls, has a NaN or little disk space.

    RUN is a name or a folder. Default: the newest live run, or the next one. Further rules and all options are those of
    the callback 'alert'; this is short for 'consumer --callbacks alert' with them.

    \b
    pip install 'offloop[alerts]'
    export OFFLOOP_ALERT_TO=ntfys://ntfy.sh/my-secret-topic
    offloop alert --all"""
    options = {"rules": (*_RULES, *rules), "to": [one.replace(",", "%2C") for one in to]}
    assignments = tuple(f"alert.{name}={','.join(values)}" for name, values in options.items())
    code: int = click.get_current_context().invoke(
        consumer, callbacks=["alert"], loggers=[], options=assignments, run=run, **given
    )
    return code
