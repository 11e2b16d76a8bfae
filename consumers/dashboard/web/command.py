"""The command ``offloop ui``."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from offloop.bus.cli.options import (
    certificate_key_option,
    certificate_option,
    runs_dir_option,
    stream_options,
    wait_option,
)
from offloop.bus.printing import say
from offloop.bus.terminal import CliCommand
from offloop.consumers.dashboard.web.access import FIRST_PORT, Listening

if TYPE_CHECKING:
    from offloop.consumers.runner.places import FolderRuns

_FILE = click.Path(path_type=Path, dir_okay=False)
_LOOK_SECONDS = 1.0


@click.command(
    cls=CliCommand,
    short_help="Show all runs, or the named ones, in the browser.",
    frequent=("--runs-dir", "--port", "--open-browser", "--wait"),
)
@click.argument("arguments", nargs=-1, metavar="[RUN... | RUNS_DIR]")
@runs_dir_option
@stream_options
@wait_option
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address to listen at; others need --tokens and TLS."
)
@click.option(
    "--port", type=click.IntRange(0, 65535), metavar="PORT", help=f"Default: {FIRST_PORT}, or the next that is free."
)
@click.option("--tokens", type=_FILE, metavar="FILE", help="Secrets that links carry; made if missing.")
@certificate_option
@certificate_key_option
@click.option("--open-browser", is_flag=True, help="Open the page in a browser of this machine.")
@click.option(
    "--every",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    metavar="N",
    help="Batches between two measurements of the phases.",
)
def ui(
    arguments: tuple[str, ...], runs_dir: str | None, stream: str | None, wait: bool, every: int, **serving: Any
) -> None:
    """Show a table of all runs in the browser, until Ctrl-C: to sort, filter, tag, compare and open them.

    With RUN, begin with a page of these runs, over one another. A RUN is a name, a run's folder, or a recording; live
    ones are followed. Every attempt of a run has its own lines; in NATS, the newest one and later ones.

    RUNS_DIR is a folder of runs, as --runs-dir. Default, unless --stream is given: $OFFLOOP_RUNS_DIR, else 'runs' in
    the current folder."""
    if wait and not arguments:
        raise click.UsageError("--wait is for runs that do not exist yet: name them, as in 'offloop ui NAME --wait'")
    from offloop.consumers.dashboard.web.follow import FollowedRuns
    from offloop.consumers.dashboard.web.site import Site
    from offloop.consumers.runner.places import FolderRuns, place_of

    folders = [] if wait else [one for one in arguments if _is_folder_of_runs(one, FolderRuns(runs_dir))]
    runs = [one for one in dict.fromkeys(arguments) if one not in folders]
    if runs and folders:
        raise click.UsageError(f"{runs[0]!r} is a run and {folders[0]!r} a folder of runs: give runs or folders")
    folders += [] if runs_dir is None else [runs_dir]
    if len(folders) + (stream is not None) > 1:
        raise click.UsageError("a page shows the runs of one place: give one RUNS_DIR, --runs-dir or --stream")
    place = place_of(next(iter(folders), None), stream)
    listening = Listening(**serving, as_flags=True)
    followed = FollowedRuns(place, every)
    if waiting := [run for run in runs if not followed.add(run, wait)]:
        say(f"waiting for {', '.join(waiting)} {place} ... (Ctrl-C ends)", err=True)
    site = Site(listening, place, followed.runs if runs else None, every)
    site.start()
    followed.start()
    try:
        while site.wait(_LOOK_SECONDS):
            followed.look()
    finally:
        followed.leave()
        site.stop()
        followed.stop()


def _is_folder_of_runs(path: str, here: "FolderRuns") -> bool:
    from offloop.bus.runs.directory import RUN_FILE

    return os.path.isdir(path) and not os.path.isfile(os.path.join(path, RUN_FILE)) and not here.has(path)
