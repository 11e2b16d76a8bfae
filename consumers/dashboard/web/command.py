"""The command ``bus dashboard``."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from bus.cli.options import broker_options, check_broker, runs_dir_option
from bus.printing import say
from bus.terminal import HELP
from consumers.dashboard.web.access import FIRST_PORT, Listening

_FILE = click.Path(path_type=Path, dir_okay=False)


def _serving_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds where a page is served, and who gets to it."""
    for option in (
        click.option(
            "--every",
            type=click.IntRange(min=1),
            default=10,
            show_default=True,
            metavar="N",
            help="After how many batches the phases of a step are measured.",
        ),
        click.option("--open-browser", is_flag=True, help="Opens the page in a browser of this machine."),
        click.option("--certificate-key", type=_FILE, metavar="FILE", help="Its key."),
        click.option("--certificate", type=_FILE, metavar="FILE", help="TLS certificate, as PEM."),
        click.option(
            "--tokens", type=_FILE, metavar="FILE", help="The secrets that links carry; made if it does not exist."
        ),
        click.option(
            "--port",
            type=click.IntRange(0, 65535),
            metavar="PORT",
            help=f"Default: {FIRST_PORT}, or the next that is free.",
        ),
        click.option(
            "--host", default="127.0.0.1", show_default=True, help="Address to listen at; others take --tokens and TLS."
        ),
    ):
        command = option(command)
    return command


@click.command(short_help="Show runs on a page in the browser.", context_settings=HELP)
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@runs_dir_option
@broker_options("Shows runs of the broker there, such as tcp://10.0.0.1:5570, through it alone.")
@click.option("--wait", is_flag=True, help="Waits for runs that do not exist yet.")
@_serving_options
def dashboard(
    runs: tuple[str, ...],
    runs_dir: str | None,
    broker: str | None,
    key: str | None,
    broker_key: str | None,
    wait: bool,
    host: str,
    port: int | None,
    tokens: Path | None,
    certificate: Path | None,
    certificate_key: Path | None,
    open_browser: bool,
    every: int,
) -> None:
    """Show runs on a page in the browser, over one another, until Ctrl-C.

    Each RUN is a name, a run's folder, or a recording; live ones are followed. Without any it is those that are live,
    or else the newest one, and those that become live meanwhile. Every attempt of a run has lines of its own; at a
    broker elsewhere, the newest one and those that begin later.
    """
    check_broker(broker, key, broker_key, runs_dir)
    from bus.net.curve import client_security
    from consumers.dashboard.web.follow import RunsElsewhere, RunsHere, serve_runs

    where = RunsHere(runs_dir) if broker is None else RunsElsewhere(broker, client_security(key, broker_key))
    listening = Listening(host, port, tokens, certificate, certificate_key, open_browser, as_flags=True)
    serve_runs(runs, listening, where, wait, every, partial(say, err=True))


@click.command(short_help="Show a table of all runs in the browser.", context_settings=HELP)
@click.argument("runs_dir", required=False, metavar="[RUNS_DIR]")
@_serving_options
def ui(
    runs_dir: str | None,
    host: str,
    port: int | None,
    tokens: Path | None,
    certificate: Path | None,
    certificate_key: Path | None,
    open_browser: bool,
    every: int,
) -> None:
    """Show a table of all runs in the browser, until Ctrl-C: to sort, filter, tag, compare and open them.

    RUNS_DIR is where runs live. Default: $OFFLOOP_RUNS_DIR, else 'runs' in the current folder.
    """
    from consumers.dashboard.web.home import serve_home

    serve_home(
        runs_dir, Listening(host, port, tokens, certificate, certificate_key, open_browser, as_flags=True), every
    )
