"""The commands ``bus tag``, ``note``, ``pin``, ``archive``, ``rename`` and ``rm``: what people do to their runs."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from offloop.bus.cli.options import runs_dir_option
from offloop.bus.errors import ConfigurationError, RunNotFoundError
from offloop.bus.printing import say, table
from offloop.bus.terminal import HELP

EXIT_KEPT = 1

_where_option = click.option("--where", metavar="EXPR", help="The runs that 'bus runs --where EXPR' lists.")
_undo_option = click.option("--undo", is_flag=True, help="Take it back.")


def _chosen_runs(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the arguments that say which runs: their names, or ``--where``."""
    for option in (runs_dir_option, _where_option, click.argument("runs", metavar="[RUN]...", nargs=-1)):
        command = option(command)
    return command


@click.command(name="tag", short_help="Add tags to runs, or remove them.", context_settings=HELP)
@_chosen_runs
@click.option("--add", multiple=True, metavar="TAG,...", help="Add these tags; more than once.")
@click.option("--remove", multiple=True, metavar="TAG,...", help="Remove these tags; more than once.")
def tag_runs(
    runs: tuple[str, ...], where: str | None, runs_dir: str | None, add: tuple[str, ...], remove: tuple[str, ...]
) -> None:
    """Add tags to each RUN, or remove them; without --add and --remove show them."""
    from offloop.bus.index.annotations import annotate, read_annotations

    added, removed = ([tag.strip() for tags in given for tag in tags.split(",")] for given in (add, remove))
    try:
        paths = _choose(runs, where, runs_dir)
    except RunNotFoundError as error:
        if added or removed or len(runs) < 2 or error.run == runs[0]:
            raise
        # The tag was taken for a run.
        raise ConfigurationError(
            f"{error}; to tag run {runs[0]!r} with it: bus tag {runs[0]} --add {error.run}"
        ) from None
    for path in paths:
        said = annotate(path, add=added, remove=removed) if added or removed else read_annotations(path)
        say(f"run {path.name}: {', '.join(said.tags) or 'no tags'}")


@click.command(name="note", short_help="Write or show the note of a run.", context_settings=HELP)
@click.argument("run")
@click.argument("text", required=False)
@runs_dir_option
def note_run(run: str, text: str | None, runs_dir: str | None) -> None:
    """Write TEXT as the note of a RUN, in the place of the one before; without TEXT show it.

    An empty TEXT removes it.
    """
    from offloop.bus.index.annotations import annotate, read_annotations

    [path] = _choose([run], None, runs_dir)
    if text is None:
        for line in read_annotations(path).note.splitlines():
            say(line)
        return
    annotate(path, note=text)
    say(f"run {path.name}: {'the note is written' if text else 'the note is removed'}")


@click.command(name="pin", short_help="List runs before all others.", context_settings=HELP)
@_chosen_runs
@_undo_option
def pin_runs(runs: tuple[str, ...], where: str | None, runs_dir: str | None, undo: bool) -> None:
    """Pin each RUN: 'bus runs' and dashboards list it before all others."""
    from offloop.bus.index.annotations import annotate

    for path in _choose(runs, where, runs_dir):
        annotate(path, pinned=not undo)
        say(f"run {path.name} is {'no longer pinned' if undo else 'pinned'}")


@click.command(name="archive", short_help="Leave runs out of lists, without deleting them.", context_settings=HELP)
@_chosen_runs
@_undo_option
def archive_runs(runs: tuple[str, ...], where: str | None, runs_dir: str | None, undo: bool) -> None:
    """Archive each RUN: it stays as it is, and is left out of lists unless they are asked for archived runs."""
    from offloop.bus.index.annotations import annotate

    for path in _choose(runs, where, runs_dir, archived=undo):
        annotate(path, archived=not undo)
        say(f"run {path.name} is {'no longer archived' if undo else 'archived'}")


@click.command(name="rename", short_help="Give a run another name.", context_settings=HELP)
@click.argument("run")
@click.argument("name")
@runs_dir_option
def rename_run(run: str, name: str, runs_dir: str | None) -> None:
    """Give a RUN that has ended another NAME, and its folder with it. In its recordings it keeps the name it had."""
    from offloop.bus.index import manage

    [path] = _choose([run], None, runs_dir)
    target = manage.rename_run(path, name)
    say(f"run {path.name} is now {target.name}, in {target}")


@click.command(name="rm", short_help="Delete runs.", context_settings=HELP)
@_chosen_runs
@click.option("--archived", is_flag=True, help="With --where: also runs that are archived.")
@click.option("--yes", is_flag=True, help="Do not ask: for scripts.")
def remove_runs(runs: tuple[str, ...], where: str | None, runs_dir: str | None, archived: bool, yes: bool) -> int:
    """Delete each RUN that has ended, with its folder and everything in it: recordings, checkpoints, notes.

    Asks before, with the size that it frees. What its symbolic links lead to is kept.

    Exit code: 0 when they were deleted, or none was chosen, 1 when they were kept.
    """
    from offloop.bus.cli.describe import size_text
    from offloop.bus.index.entry import size_of
    from offloop.bus.index.manage import check_ended, remove_run

    if archived and where is None:
        raise click.UsageError("--archived goes with --where: a run that is named is deleted in any case")
    paths = _choose(runs, where, runs_dir, archived=archived)
    if not paths:
        return 0
    for path in paths:
        check_ended(path)
    sizes = [size_of(path) for path in paths]
    what = f"{len(paths)} run{'s' * (len(paths) > 1)}, {size_text(sum(sizes))}"
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigurationError(f"{what} would be deleted: without a terminal to ask in, add --yes")
        for line in table([(str(path), size_text(size)) for path, size in zip(paths, sizes, strict=True)]):
            say(line)
        if not click.confirm(f"Delete {what}?"):
            say("nothing was deleted")
            return EXIT_KEPT
    for path, size in zip(paths, sizes, strict=True):
        remove_run(path)
        say(f"run {path.name} is deleted: {size_text(size)} freed")
    return 0


def _choose(runs: Sequence[str], where: str | None, runs_dir: str | None, *, archived: bool = False) -> list[Path]:
    """The directories of the runs that are named or for which an expression is true; says when it is true of none."""
    from offloop.bus.cli.runs import choose, read_index
    from offloop.bus.runs.directory import find_run
    from offloop.bus.runs.directory import runs_dir as chosen

    if bool(runs) == (where is not None):
        raise click.UsageError("name the runs, or choose them with --where")
    if runs:
        # One that is named twice, or as ".", is found to be no link before it is resolved.
        return list(dict.fromkeys(find_run(run, runs_dir).path.resolve() for run in runs))
    paths = [chosen(runs_dir) / entry.run for entry in choose(read_index(runs_dir), where, archived=archived)]
    if not paths:
        say(f"{where!r} is true of no run")
    return paths
