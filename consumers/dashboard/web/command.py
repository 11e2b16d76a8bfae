"""The commands ``offloop dashboard`` and ``offloop ui``."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from offloop.bus.cli.options import broker_options, check_broker, runs_dir_option, stream_options
from offloop.bus.printing import say
from offloop.bus.terminal import HELP
from offloop.consumers.dashboard.web.access import FIRST_PORT, Listening

_FILE = click.Path(path_type=Path, dir_okay=False)
_LOOK_SECONDS = 1.0


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
    from offloop.bus.net.curve import client_security
    from offloop.consumers.dashboard.web.follow import NamedRuns
    from offloop.consumers.dashboard.web.places import RunsElsewhere, RunsHere
    from offloop.consumers.dashboard.web.site import Site

    where = RunsHere(runs_dir) if broker is None else RunsElsewhere(broker, client_security(key, broker_key))
    listening = Listening(host, port, tokens, certificate, certificate_key, open_browser, as_flags=True)
    named = NamedRuns(runs, where, wait, every)
    if named.waiting or not named.runs:
        say(f"waiting for {', '.join(named.waiting) or 'a run'} {where} ... (Ctrl-C ends)", err=True)
    site = Site(listening, [where], named.runs, every)
    site.start()
    named.start()
    try:
        while site.wait(_LOOK_SECONDS):
            named.look()
    finally:
        named.leave()
        site.stop()
        named.stop()


@click.command(short_help="Show a table of all runs in the browser.", context_settings=HELP)
@click.argument("runs_dirs", nargs=-1, metavar="[RUNS_DIR]...")
@click.option("--broker", "brokers", multiple=True, metavar="ADDRESS", help="Also the runs of the broker there.")
@click.option("--key", metavar="FILE", help="Your secret key for brokers. Default: $OFFLOOP_KEY.")
@click.option(
    "--broker-key",
    "broker_keys",
    multiple=True,
    metavar="FILE",
    help="A broker's public key: one for all, or one for each in their order. Default: $OFFLOOP_BROKER_KEY.",
)
@functools.partial(stream_options, into="stream")
@_serving_options
def ui(
    runs_dirs: tuple[str, ...],
    brokers: tuple[str, ...],
    key: str | None,
    broker_keys: tuple[str, ...],
    stream: str | None,
    host: str,
    port: int | None,
    tokens: Path | None,
    certificate: Path | None,
    certificate_key: Path | None,
    open_browser: bool,
    every: int,
) -> None:
    """Show a table of all runs in the browser, until Ctrl-C: to sort, filter, tag, compare and open them.

    RUNS_DIR is where runs live, and there may be several. Default, unless --broker or --stream is given:
    $OFFLOOP_RUNS_DIR, else 'runs' in the current folder.
    """
    if (key or broker_keys) and not brokers:
        raise click.UsageError("--key and --broker-key are for a broker elsewhere: name it with --broker")
    if len(broker_keys) > 1 and len(broker_keys) != len(brokers):
        raise click.UsageError(
            f"{len(broker_keys)} times --broker-key for {len(brokers)} times --broker: give one for all or for each"
        )
    from offloop.consumers.dashboard.web.places import RunsElsewhere, places_of
    from offloop.consumers.dashboard.web.site import Site

    elsewhere = [] if stream is None else [RunsElsewhere(stream)]
    here = places_of(runs_dirs, brokers, key, broker_keys) if runs_dirs or brokers or not elsewhere else []
    places = [*here, *elsewhere]
    listening = Listening(host, port, tokens, certificate, certificate_key, open_browser, as_flags=True)
    site = Site(listening, places, every=every)
    site.start()
    try:
        while site.wait(_LOOK_SECONDS):
            pass
    finally:
        site.stop()
