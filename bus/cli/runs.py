"""The commands ``offloop runs`` and ``show``."""

import sys
from collections.abc import Sequence
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from offloop.bus.cli import options
from offloop.bus.printing import is_screen, say, say_table, short_text
from offloop.bus.terminal import EXIT_LOST, CliCommand

if TYPE_CHECKING:
    from offloop.bus.index.entry import RunEntry
    from offloop.bus.index.table import RunTable

_QUIET_SECONDS = 1.0
_REPORT_SECONDS = 5.0


@click.command(
    cls=CliCommand,
    name="runs",
    short_help="List the runs.",
    frequent=("--where", "--sort", "--columns", "--live", "--json"),
)
@options.place_options
@click.option("--live", is_flag=True, help="Only the runs that are live.")
@options.where_option
@click.option("--sort", metavar="COLUMN", help="Sort by a column; with '-' before its name the greatest first.")
@click.option("--columns", callback=options.split_names, metavar="NAME,...", help="Columns to show besides the name.")
@options.archived_option
@options.json_option
@click.option("--csv", "as_csv", is_flag=True, help="The table as CSV, with exact values and full names.")
def list_runs(
    runs_dir: str | None,
    stream: str | None,
    live: bool,
    where: str | None,
    sort: str | None,
    columns: list[str] | None,
    archived: bool,
    as_json: bool,
    as_csv: bool,
) -> None:
    """List the runs: pinned ones, then the newest first.

    EXPR compares columns with numbers and texts: "lr > 0.01 and status == finished", "tags == baseline",
    "loss/train/total.min < 0.5 or not tags". Operators are == != < <= > >= and ~ (contains), combined by and, or, not
    and parentheses.

    A COLUMN, also in EXPR, is a hyperparameter (optimizer/lr), a metric (loss/train/total is the last value; append
    .min, .max or .best for others), or one of run, id, status, error, reason, started, ended, duration, attempts,
    reached, epoch, batch, sample, planned, size, tags, note, pinned, archived, checkpoints. The end of a name is enough
    (lr)."""
    if as_json and (columns is not None or as_csv):
        raise click.UsageError("--columns and --csv are for the table: --json has all of it")
    from offloop.bus.cli.describe import summary
    from offloop.bus.index.entry import listed_entry
    from offloop.bus.index.table import RunTable
    from offloop.bus.runs.directory import runs_dir as chosen

    if stream is not None:
        from offloop.bus.jetstream.nats_connection import NatsConnection

        listed = {run.run: run for run in NatsConnection.at(stream).runs()}
        entries, place = [listed_entry(run) for run in listed.values()], f"at {stream}"
    else:
        entries = read_index(runs_dir)
        listed, place = {}, f"in {chosen(runs_dir)}"
        if not entries:
            place += "; 'trainer digits' makes one"
    table = RunTable({entry.run: entry for entry in entries})
    shown = choose(table, where, archived=archived)
    # Any run may have the column, not only the shown ones.
    shown = table.sort(shown, sort) if sort is not None else sorted(shown, key=lambda entry: not entry.pinned)
    shown = [entry for entry in shown if entry.is_going_on or not live]
    if as_json:
        described = [listed.get(entry.run) or summary(chosen(runs_dir) / entry.run, entry) for entry in shown]
        options.say_json(described)
    elif as_csv:
        from offloop.bus.tools.export import csv_line

        found = table.columns(("run", *_names(table, shown, columns)))
        values = ([column.value(entry) for column in found] for entry in shown)
        rows = ([", ".join(one) if isinstance(one, tuple) else one for one in row] for row in values)
        text = "".join(map(csv_line, ([column.name for column in found], *rows)))
        if is_screen(sys.stdout):
            for line in text.splitlines():
                say(line)
        else:
            print(text, end="")  # click.echo would remove colours from the exact text
    elif shown:
        _say_runs(table, shown, columns)
    else:
        if entries and where is not None:
            place += f" of which {where!r} is true"
        elif any(entry.archived for entry in entries) and not archived and not live:
            place += " but archived ones: '--archived' lists them"
        say(f"no {'live ' if live else ''}runs {place}")


def read_index(runs_dir: str | None) -> "list[RunEntry]":
    """Return every run of a folder, the newest first. Reports a long read."""
    from offloop.bus.index.entry import newest_first
    from offloop.bus.index.index import RunIndex
    from offloop.bus.runs.directory import check_named

    check_named(runs_dir)
    with RunIndex(runs_dir) as index:
        left = index.refresh(_QUIET_SECONDS)
        if left and index.problem:
            say(f"{index.problem}, so the runs are read anew each time", err=True)
        while left:
            say(f"reading {left:,} more run{'s' * (left > 1)} ...", err=True)
            left = index.refresh(_REPORT_SECONDS)
        return newest_first(index.entries.values())


def choose(table: "RunTable", where: str | None, *, archived: bool) -> "list[RunEntry]":
    chosen = table.newest_first
    if where is not None and chosen:
        chosen = table.where(chosen, where)
    return [entry for entry in chosen if archived or not entry.archived]


def _names(table: "RunTable", shown: "Sequence[RunEntry]", requested: list[str] | None) -> tuple[str, ...]:
    return table.usual_among(shown) if requested is None else tuple(table.column(name).name for name in requested)


def _say_runs(table: "RunTable", shown: "Sequence[RunEntry]", requested: list[str] | None) -> None:
    from offloop.bus.index.columns import OF_RUN

    columns = table.columns(("run", *_names(table, shown, requested)))
    heads = [column.name.upper() if column.name in OF_RUN else column.head for column in columns]
    cells = [[column.text(entry) for entry in shown] for column in columns]
    if requested is None:
        # The reason why a run cannot be read.
        heads, cells = [*heads, "PROBLEM"], [*cells, [entry.problem or "" for entry in shown]]
        filled = [any(texts) for texts in cells]
        heads, cells = list(compress(heads, filled)), list(compress(cells, filled))
    # One run must not make the table too wide for the others.
    say_table([tuple(heads), *zip(*([short_text(text) for text in texts] for texts in cells), strict=True)])


@click.command(
    cls=CliCommand, name="show", short_help="Show one run or recording.", frequent=("--details", "--json", "--runs-dir")
)
@click.argument("run")
@click.option("--details", is_flag=True, help="Also how it was started, recorded and served.")
@options.json_option
@options.place_options
def show_run(run: str, details: bool, as_json: bool, runs_dir: str | None, stream: str | None) -> None:
    """Show the results of a RUN: metrics with their last and best values, hyperparameters, tags and note.

    RUN is a name, a run's folder or a recording. A metric has a best value if its name, or the run, says whether higher
    or lower is better.

    The details are the command, the versions, the recording with its events and gaps, and the state of a live run's
    broker, trainer and consumers. Of a recording, or a run in NATS, everything is shown without --details.

    Exit code: 0, or 3 if RUN is a damaged recording."""
    from offloop.bus.cli import describe
    from offloop.bus.index.index import read_entry
    from offloop.bus.runs.directory import find_run, is_being_recorded

    if stream is not None or Path(run).is_file():
        # Asked first, as the run may end meanwhile. While it is recorded, the last record may not be whole yet.
        is_going_on = stream is not None or is_being_recorded(Path(run))
        described = (
            describe.describe_recording(Path(run)) if stream is None else describe.describe_stream_run(stream, run)
        )
        if as_json:
            options.say_json({"run": described["run"], "details": described})
        else:
            describe.say_details(described)
        if not is_going_on and described["damage"]:
            click.get_current_context().exit(EXIT_LOST)
        return
    info = find_run(run, runs_dir)
    entry = read_entry(info)
    if as_json:
        shown = {**describe.summary(info.path, entry), "details": describe.describe_run(info)}
        options.say_json(shown)
        return
    describe.say_results(info, entry)
    if details:
        describe.say_more_details(describe.describe_run(info))
