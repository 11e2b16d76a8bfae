"""The commands ``offloop edit`` and ``rm``."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from offloop.bus.cli import options
from offloop.bus.errors import ConfigurationError
from offloop.bus.printing import say, table
from offloop.bus.terminal import CliCommand

EXIT_KEPT = 1


def _chosen_runs(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (options.runs_dir_option, options.where_option, click.argument("runs", metavar="[RUN]...", nargs=-1)):
        command = option(command)
    return command


def _tags(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> list[str]:
    return [tag.strip() for value in values for tag in value.split(",")]


@click.command(cls=CliCommand, name="edit", short_help="Tag, note, pin, archive or rename runs.", frequent=("--tag",))
@_chosen_runs
@options.reporting
@click.option("--tag", callback=_tags, multiple=True, metavar="TAG,...", help="Add these tags; more than once.")
@click.option("--untag", callback=_tags, multiple=True, metavar="TAG,...", help="Remove these tags; more than once.")
@click.option("--note", metavar="TEXT", help="Replace the note; an empty TEXT removes it.")
@click.option("--pin/--no-pin", default=None, help="List them before all others.")
@click.option("--archive/--no-archive", default=None, help="Leave them out of lists, without deleting them.")
@click.option("--rename", metavar="NAME", help="Rename the run, which must have ended, and its folder.")
def edit_runs(
    runs: tuple[str, ...],
    where: str | None,
    runs_dir: str | None,
    tag: list[str],
    untag: list[str],
    note: str | None,
    pin: bool | None,
    archive: bool | None,
    rename: str | None,
    report: options.Report,
) -> None:
    """Change the tags, note or name of each RUN, or pin or archive it.

    'offloop show' shows them. In its recordings a renamed run keeps its old name."""
    from offloop.bus.index.annotations import annotate
    from offloop.bus.index.manage import rename_run

    is_annotated = bool(tag or untag) or any(value is not None for value in (note, pin, archive))
    if not is_annotated and rename is None:
        raise click.UsageError("no change is given: use --tag, --untag, --note, --pin, --archive or --rename")
    paths = choose_paths(runs, where, runs_dir, archived=archive is False)
    if rename is not None and len(paths) > 1:
        raise click.UsageError(f"--rename is for one run, not for {len(paths)}")
    for path in paths:
        if is_annotated:
            said = annotate(path, add=tag, remove=untag, note=note, pinned=pin, archived=archive)
            changes = {
                ", ".join(said.tags) or "no tags": bool(tag or untag),
                "the note is written" if note else "the note is removed": note is not None,
                "pinned" if pin else "no longer pinned": pin is not None,
                "archived" if archive else "no longer archived": archive is not None,
            }
            made = "; ".join(change for change, is_made in changes.items() if is_made)
            report(f"run {path.name}: {made}", {"run": path.name, **msgspec.structs.asdict(said)})
        # Last, because all changes before can be repeated under the old name.
        if rename is not None:
            target = rename_run(path, rename)
            report(f"run {path.name} is now {target.name}, in {target}", {"run": path.name, "renamed": target.name})


@click.command(cls=CliCommand, name="rm", short_help="Delete runs.")
@_chosen_runs
@options.archived_option
@options.reporting
@click.option("--yes", is_flag=True, help="Do not ask: for scripts.")
def remove_runs(
    runs: tuple[str, ...], where: str | None, runs_dir: str | None, archived: bool, yes: bool, report: options.Report
) -> int:
    """Delete each RUN that has ended, with its folder: recordings, checkpoints, notes.

    Asks first, and shows the size. Targets of symbolic links are kept.

    Exit code: 0 if they were deleted, or none was chosen, 1 if they were kept."""
    from offloop.bus.index.entry import size_of
    from offloop.bus.index.manage import check_ended, remove_run
    from offloop.bus.types.units import BYTES, number_text

    if archived and where is None:
        raise click.UsageError("--archived needs --where: a named run is deleted in any case")
    paths = choose_paths(runs, where, runs_dir, archived=archived)
    if not paths:
        return 0
    ids = [check_ended(path) for path in paths]
    sizes = [size_of(path) for path in paths]
    what = f"{len(paths)} run{'s' * (len(paths) > 1)}, {number_text(sum(sizes), BYTES)}"
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigurationError(f"{what} would be deleted: add --yes where no terminal can ask")
        for line in table([(str(path), number_text(size, BYTES)) for path, size in zip(paths, sizes, strict=True)]):
            say(line)
        if not click.confirm(f"Delete {what}?"):
            say("nothing was deleted")
            return EXIT_KEPT
    for path, size, run_id in zip(paths, sizes, ids, strict=True):
        remove_run(path, run_id)
        report(f"run {path.name} is deleted: {number_text(size, BYTES)} freed", {"run": path.name, "freed": size})
    return 0


def choose_paths(runs: Sequence[str], where: str | None, runs_dir: str | None, *, archived: bool = False) -> list[Path]:
    """Return the directories of named runs, or of those for which an expression is true."""
    from offloop.bus.cli.runs import choose, read_index
    from offloop.bus.index.table import RunTable
    from offloop.bus.runs.directory import find_run
    from offloop.bus.runs.directory import runs_dir as chosen

    if bool(runs) == (where is not None):
        raise click.UsageError("name the runs, or choose them with --where")
    if runs:
        # find_run() refuses links, so it is called before the path is resolved. A run may be named twice, or as ".".
        return list(dict.fromkeys(find_run(run, runs_dir).path.resolve() for run in runs))
    known = RunTable({entry.run: entry for entry in read_index(runs_dir)})
    paths = [chosen(runs_dir) / entry.run for entry in choose(known, where, archived=archived)]
    if not paths:
        say(f"{where!r} is true of no run", err=True)
    return paths
