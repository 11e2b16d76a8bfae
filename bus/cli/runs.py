"""The commands ``offloop runs`` and ``show``: what came out of runs."""

import json
from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from offloop.bus.cli.options import (
    archived_option,
    json_option,
    place_options,
    where_option,
)
from offloop.bus.cli.tables import Rows, cell_text, number_text, say_table, short_text
from offloop.bus.errors import RunDirectoryError
from offloop.bus.printing import one_line, say, table
from offloop.bus.strict_json import plain
from offloop.bus.terminal import CliCommand
from offloop.bus.types.hyperparameters import chosen_first, is_of_the_training, value_text

if TYPE_CHECKING:
    from offloop.bus.index.entry import MetricValues, RunEntry
    from offloop.bus.runs.directory import RunInfo

_QUIET_SECONDS = 1.0
_REPORT_SECONDS = 5.0
_RESULTS = ("run", "status", "error", "reason", "started", "lasted", "config")
"""The details that are among the results too."""


@click.command(
    cls=CliCommand,
    name="runs",
    short_help="List the runs.",
    frequent=("--where", "--sort", "--columns", "--live", "--json"),
)
@place_options
@click.option("--live", is_flag=True, help="Only the runs that are live.")
@where_option
@click.option("--sort", metavar="COLUMN", help="In the order of a column; with '-' in front of it the greatest first.")
@click.option("--columns", metavar="NAME,...", help="Which columns to show beside the name.")
@archived_option
@json_option
def list_runs(
    runs_dir: str | None,
    stream: str | None,
    live: bool,
    where: str | None,
    sort: str | None,
    columns: str | None,
    archived: bool,
    as_json: bool,
) -> None:
    """List the runs: pinned ones, then the newest first.

    EXPR compares what a run has with numbers and texts: "lr > 0.01 and status == finished", "tags == baseline",
    "loss/train/total.min < 0.5 or not tags". Signs are == != < <= > >= and ~ (contains), combined by and, or, not and
    parentheses.

    A COLUMN, in EXPR too, is a hyperparameter (optimizer/lr), a metric (loss/train/total: its last value; .min, .max
    and .best behind it are others), or one of run, id, status, error, reason, started, ended, duration, attempts,
    epoch, batch, sample, planned, size, tags, note, pinned, archived, checkpoints. The end of a name is enough (lr).
    """
    if columns is not None and as_json:
        raise click.UsageError("--columns is for the table: --json has all of them")
    if stream is not None:
        given = {"--where": where, "--sort": sort, "--columns": columns, "--archived": archived}
        if refused := [name for name, value in given.items() if value]:
            raise click.UsageError(f"{refused[0]} is for runs on this machine: NATS has the list alone")
        from offloop.bus.net.requests import list_stream_runs

        listed = list_stream_runs(stream)
        _print_listed([run for run in listed if not live or _is_going_on(run)], as_json, f"at {stream}", live)
        return
    # What the plain list shows is known before all recordings are read.
    entries = read_index(runs_dir, is_whole=any((where, sort, columns, as_json)))
    shown = choose(entries, where, archived=archived)
    if sort is not None:
        from offloop.bus.index.query import Columns
        from offloop.bus.index.query import sort as sorted_by

        # A column is found by what any run has, and not only those that are shown.
        shown = sorted_by(shown, sort.removeprefix("-"), reverse=sort.startswith("-"), columns=Columns(entries))
    else:
        shown = sorted(shown, key=lambda entry: not entry.pinned)
    shown = [entry for entry in shown if entry.is_going_on or not live]
    if shown and columns is not None and not as_json:
        say_table(_column_rows(shown, columns, entries))
        return
    from offloop.bus.runs.directory import runs_dir as chosen

    place = f"in {chosen(runs_dir)}"
    if not entries:
        place += "; 'trainer digits' makes one"
    elif where is not None:
        place += f" of which {where!r} is true"
    elif not archived and not live:
        place += " but archived ones: '--archived' lists them"
    listed = [_summary(chosen(runs_dir) / entry.run, entry, as_json) for entry in shown]
    _print_listed(listed, as_json, place, live)


def read_index(runs_dir: str | None, *, is_whole: bool = True) -> "list[RunEntry]":
    """Every run of a folder, the newest first: by default with all its metrics. Says on standard error when it takes a
    while."""
    from offloop.bus.index.entry import newest_first
    from offloop.bus.index.index import RunIndex

    with RunIndex(runs_dir) as index:
        left = index.refresh(_QUIET_SECONDS)
        if left and index.problem:
            say(f"{index.problem}, so the runs are read anew each time", err=True)
        while left if is_whole else index.unknown:
            say(f"reading {left:,} more run{'s' * (left > 1)} ...", err=True)
            left = index.refresh(_REPORT_SECONDS)
        return newest_first(index.entries.values())


def choose(entries: "Sequence[RunEntry]", where: str | None, *, archived: bool) -> "list[RunEntry]":
    """The runs of which an expression is true, without archived ones unless they are requested."""
    from offloop.bus.index import query

    chosen = query.where(entries, where) if where is not None and entries else list(entries)
    return [entry for entry in chosen if archived or not entry.archived]


def _print_listed(listed: list[dict[str, Any]], as_json: bool, place: str, live: bool) -> None:
    from offloop.bus.cli.describe import lasted, when

    if as_json:
        click.echo(json.dumps(plain(listed), indent=2))
        return
    if not listed:
        say(f"no {'live ' if live else ''}runs {place}")
        return
    is_tagged = any(run.get("tags") for run in listed)
    is_local = "recording" in listed[0]
    rows: Rows = [("RUN", "STATUS", "STARTED", "LASTED", "REACHED", "TAGS", "RECORDING" if is_local else "")]
    for run in listed:
        took = lasted(run["started"], run["ended"], live=_is_going_on(run))
        # Of a run that cannot be read, why stands where its recording would.
        tags, recording = ", ".join(run.get("tags", ())), run.get("recording") or run.get("problem") or ""
        # One run must not make the table too wide for the others.
        reached, tags = short_text(_reached(run)), short_text(tags)
        rows.append((run["run"], run["status"], when(run["started"]), took, reached, tags, recording))
    say_table(rows if is_tagged else [(*row[:5], row[6]) for row in rows])


def _column_rows(shown: "Sequence[RunEntry]", names: str, entries: "Sequence[RunEntry]") -> Rows:
    from offloop.bus.index.query import OF_RUN, Columns

    columns = Columns(entries)
    requested = [name.strip() for name in names.split(",") if name.strip()]
    found = [(name, *columns.find(name)) for name in ("run", *requested)]
    header = tuple(name.upper() if whole in OF_RUN else name for name, whole, _ in found)
    return [header, *(tuple(cell_text(whole, value_of(entry)) for _, whole, value_of in found) for entry in shown)]


def _summary(path: Path, entry: "RunEntry", is_whole: bool) -> dict[str, Any]:
    listed = {
        "run": entry.run,
        "status": entry.status,
        "paused": _paused(path) if entry.status == "paused" else None,
        "started": entry.started,
        "ended": entry.ended,
        "attempt": entry.attempt,
        "reason": entry.reason,
        "reached": None if entry.epoch is None else _reached_of(entry),
        "recording": str(path / entry.recording) if entry.recording else None,
        "path": str(path),
        "tags": entry.tags,
        "problem": entry.problem,
    }
    return {**listed, **_results(entry)} if is_whole else listed


def _reached_of(entry: "RunEntry") -> dict[str, Any]:
    return {"epoch": entry.epoch, "batch": entry.batch, "sample": entry.sample, "planned": entry.planned}


def _results(entry: "RunEntry") -> dict[str, Any]:
    """What came out of a run, for programs."""
    return {
        "id": entry.id,
        "error": entry.error,
        "tags": entry.tags,
        "note": entry.note,
        "pinned": entry.pinned,
        "archived": entry.archived,
        "size": entry.size,
        "checkpoints": [msgspec.structs.asdict(one) for one in entry.checkpoints],
        "hyperparameters": entry.hyperparameters,
        "metrics": {name: _metric(values) for name, values in entry.metrics.items()},
    }


def _metric(values: "MetricValues") -> dict[str, Any]:
    found: dict[str, Any] = {"last": values.last, "last_step": values.last_step}
    if values.low_step < 0:
        return {**found, "min": None, "min_step": None, "max": None, "max_step": None}
    least = {"min": values.low, "min_step": values.low_step}
    return {**found, **least, "max": values.high, "max_step": values.high_step}


def _paused(path: Path) -> dict[str, Any] | None:
    from offloop.bus.runs.directory import read_run

    try:
        paused = read_run(path).paused
    except RunDirectoryError:
        return None  # It is deleted just now.
    return None if paused is None else paused._asdict()


def _is_going_on(listed: dict[str, Any]) -> bool:
    from offloop.bus.index.entry import GOING_ON

    return listed["status"] in GOING_ON


def _reached(listed: dict[str, Any]) -> str:
    """How far a run came: of one that ended early, of how many batches too."""
    reached = listed.get("reached")
    if not isinstance(reached, dict):
        return ""
    planned = reached.get("planned")
    return f"{reached.get('epoch')}ep {reached.get('batch')}ba{f' of {planned}' if planned else ''}"


# -- one run -----------------------------------------------------------------------------------------------------------


@click.command(
    cls=CliCommand, name="show", short_help="Show one run or recording.", frequent=("--details", "--json", "--runs-dir")
)
@click.argument("run")
@click.option("--details", is_flag=True, help="Also how it was started, recorded and served.")
@json_option
@place_options
def show_run(
    run: str,
    details: bool,
    as_json: bool,
    runs_dir: str | None,
    stream: str | None,
) -> None:
    """Show what came out of a RUN: its metrics with their last and best values, its hyperparameters, tags and note.

    RUN is a name, a run's folder or a recording. A metric has a best value where its name, or the run, says which
    values are better.

    The details are the command, the versions, the recording with its events and gaps, and the state of a live run's
    broker, trainer and consumers. Of a recording, and of a run in NATS, they are shown alone.
    """
    from offloop.bus.cli.describe import describe_recording, describe_run, describe_stream_run
    from offloop.bus.index.index import read_entry
    from offloop.bus.runs.directory import find_run

    if stream is not None or Path(run).is_file():
        described = describe_recording(Path(run)) if stream is None else describe_stream_run(stream, run)
        if as_json:
            click.echo(json.dumps(plain({"run": described["run"], "details": described}), indent=2))
        else:
            _say_details(described)
        return
    info = find_run(run, runs_dir)
    entry = read_entry(info)
    if as_json:
        shown = {**_summary(info.path, entry, is_whole=True), "details": describe_run(info)}
        click.echo(json.dumps(plain(shown), indent=2))
        return
    _say_results(info, entry)
    if details:
        _say_more_details(describe_run(info))


def _say_results(info: "RunInfo", entry: "RunEntry") -> None:
    say_table([line for line in _lines(info, entry) if line[1]])
    if entry.metrics:
        say("metrics")
        say_table([("  NAME", "LAST", "STEP", "", "BEST", "STEP", "FULL NAME"), *_metric_rows(entry)])
    if entry.checkpoints:
        say("checkpoints")
        say_table([("  FILE", "BATCH", "SIZE", "METRIC", "VALUE", ""), *_checkpoint_rows(entry)])
    if names := chosen_first(filter(is_of_the_training, entry.hyperparameters)):
        say("hyperparameters")
        say_table([(f"  {name}", one_line(value_text(entry.hyperparameters[name]))) for name in names])


def _say_details(described: dict[str, Any]) -> None:
    """Prints the details alone, of a run or recording without results."""
    from offloop.bus.cli.describe import hyperparameter_lines, lines

    shown = table(list(lines(described)))
    if described.get("hyperparameters"):
        shown.append("hyperparameters")
        shown += table([(f"  {name}", text) for name, text in hyperparameter_lines(described)])
    for line in shown:
        say(line)


def _say_more_details(described: dict[str, Any]) -> None:
    """Prints the details below the results, without what these say."""
    from offloop.bus.cli.describe import hyperparameter_lines, lines

    more = [(label, text) for label, text in lines(described) if label not in _RESULTS]
    more += [(name, text) for name, text in hyperparameter_lines(described) if not is_of_the_training(name)]
    for line in ("details", *table([(f"  {label}", text) for label, text in more])):
        say(line)


def _lines(info: "RunInfo", entry: "RunEntry") -> Iterator[tuple[str, str]]:
    from offloop.bus.cli.describe import lasted, size_text, when

    yield "run", info.name
    yield "status", f"{entry.status}, pinned" if entry.pinned else entry.status
    yield "error", entry.error or ""
    yield "reason", entry.reason or ""
    yield "started", when(entry.started)
    yield "lasted", lasted(entry.started, entry.ended, live=entry.is_going_on)
    yield "reached", "" if entry.epoch is None else _reached({"reached": _reached_of(entry)})
    yield "attempts", str(entry.attempts) if entry.attempts > 1 else ""
    yield "archived", "yes" if entry.archived else ""
    yield "checkpoints", str(sum(one.exists for one in entry.checkpoints) or "")
    yield "size", f"{size_text(entry.size)} in {info.path}"
    yield "trouble", entry.problem or ""
    yield "tags", ", ".join(entry.tags)
    yield from zip(chain(["note"], repeat("")), entry.note.splitlines(), strict=False)


def _checkpoint_rows(entry: "RunEntry") -> Iterator[tuple[str, ...]]:
    from offloop.bus.cli.describe import size_text
    from offloop.bus.index.checkpoints import compared_by
    from offloop.bus.types.metric_names import MetricNames

    names = MetricNames(entry.metrics)
    for one in entry.checkpoints:
        metric, value = compared_by(one)
        marks = [word for word, holds in (("best", one.is_best), ("latest", one.is_latest)) if holds]
        size = size_text(one.size) if one.exists else "deleted"
        number = "" if value is None else number_text(value)
        batch = "" if one.batch is None else str(one.batch)
        yield (f"  {one.path}", batch, size, names.short(metric or ""), number, ", ".join(marks))


def _metric_rows(entry: "RunEntry") -> Iterator[tuple[str, ...]]:
    from offloop.bus.types.metric_names import MetricNames
    from offloop.bus.types.metrics import direction_of, goals_in

    names, goals = MetricNames(entry.metrics), goals_in([entry.hyperparameters])
    for name, values in entry.metrics.items():
        mode = direction_of(name, goals)
        best = (
            (mode, number_text(values.best(mode)), str(values.best_step(mode)))
            if values.low_step >= 0 and mode is not None
            else ("", "", "")
        )
        yield (f"  {names.short(name)}", number_text(values.last), str(values.last_step), *best, name)
