"""The command ``offloop compare``: results of runs side by side, or events of two."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from offloop.bus.cli import options
from offloop.bus.errors import OffloopError
from offloop.bus.printing import cut_at_end, cut_in_the_middle, one_line, say, say_table, short_text, shorten
from offloop.bus.strict_json import plain
from offloop.bus.terminal import EXIT_LOST, CliCommand, describe_os_error
from offloop.bus.types.hyperparameters import value_text
from offloop.bus.types.metrics import MetricNames
from offloop.bus.types.units import number_text

if TYPE_CHECKING:
    from offloop.bus.tools.diff import Diff, EventDifference, FieldDifference


EXIT_SAME, EXIT_DIFFERENT, EXIT_TROUBLE = 0, 1, 2

_LISTED = 20
_LONGEST = 60
_LONGEST_NAME = 30


class _Undecided(click.ClickException):
    exit_code = EXIT_TROUBLE


@click.command(
    cls=CliCommand,
    name="compare",
    short_help="Compare the results or events of runs.",
    frequent=("--events", "--all", "--json", "--runs-dir"),
)
@click.argument("runs", metavar="RUN...", nargs=-1, required=True)
@click.option("--events", is_flag=True, help="Compare every event of two runs.")
@click.option("--all", "everything", is_flag=True, help="Also the command, versions and machine.")
@options.json_option
@click.option(
    "--tolerance",
    type=float,
    metavar="NUMBER",
    help="With --events: accept numbers that differ by this much, or by this share of the larger one. Default: 0.",
)
@options.place_options
def compare_runs(
    runs: tuple[str, ...],
    events: bool,
    everything: bool,
    as_json: bool,
    tolerance: float | None,
    runs_dir: str | None,
    stream: str | None,
) -> int:
    """Compare two or more runs: the hyperparameters that differ, and each metric's last and best value side by side.

    For each metric with a best value, * marks the best run. Hyperparameters such as 'command' and 'version/' need
    --all.

    With --events, compare every event of two RUNs or recordings: shows the first event that differs. Names, machines,
    hyperparameters and times are ignored. Exit code then: 0 if they are the same, 1 if they differ, 3 if
    parts are lost and the rest is the same, 2 if they cannot be compared."""
    if len(runs) < 2:
        raise click.UsageError("name two or more runs")
    if not events:
        if needless := next((option for option in ("tolerance", "stream") if options.is_typed(option)), None):
            raise click.UsageError(f"--{needless} needs --events: add it to compare the events of two runs")
        _compare_results(runs, runs_dir, everything=everything, as_json=as_json)
        return EXIT_SAME
    if len(runs) > 2 or everything:
        raise click.UsageError("--events compares two runs, without --all: name two")
    found = _compare_events(runs, runs_dir, stream, tolerance or 0.0)
    if as_json:
        options.say_json({"same": found.same, **asdict(found)})
    else:
        for line in _diff_lines(found):
            say(line)
    if found.same and found.incomplete:
        return EXIT_LOST
    return EXIT_SAME if found.same else EXIT_DIFFERENT


def _compare_results(runs: Sequence[str], runs_dir: str | None, *, everything: bool, as_json: bool) -> None:
    from offloop.bus.cli.describe import describe_comparison
    from offloop.bus.index.index import read_entry
    from offloop.bus.runs.directory import find_run

    if file := next((run for run in runs if Path(run).is_file()), None):
        raise click.UsageError(f"{file} is a recording and has no results: add --events to compare its events")
    described = describe_comparison([read_entry(find_run(run, runs_dir)) for run in runs], everything=everything)
    if as_json:
        options.say_json(described)
        return
    names, differing, compared = described.values()
    rows: list[tuple[str, ...]] = [("", "", *(cut_in_the_middle(one_line(name), _LONGEST_NAME) for name in names))]
    rows.append(("hyperparameters" if differing else "the same hyperparameters", "", *("" for _ in names)))
    for name, values in differing.items():
        cells = ("" if value is None else short_text(value_text(value)) for value in values)
        rows.append((f"  {one_line(name)}", "", *cells))
    rows += [("metrics", "", *("" for _ in names))] if compared else []
    short = MetricNames(compared).short
    for name, one in compared.items():
        rows += _compared_rows(short(name), one)
    say_table(rows)


def _compared_rows(name: str, compared: dict[str, Any]) -> list[tuple[str, ...]]:
    last = ("" if value is None else number_text(value) for value in compared["last"])
    if compared["mode"] is None:
        return [(f"  {one_line(name)}", "last", *last)]
    best = (
        "" if value is None else f"{number_text(value)} at {step}{' *' * is_best}"
        for value, step, is_best in zip(compared["best"], compared["best_step"], compared["is_best"], strict=True)
    )
    return [(f"  {one_line(name)}", "last", *last), ("", compared["mode"], *best)]


def _compare_events(runs: Sequence[str], runs_dir: str | None, stream: str | None, tolerance: float) -> "Diff":
    from offloop.bus.cli.recordings import recording_of
    from offloop.bus.tools.diff import diff

    try:
        (first, _), (second, _) = (recording_of(run, runs_dir, stream) for run in runs)
        return diff(first, second, tolerance=tolerance)
    except OffloopError as error:
        raise _Undecided(str(error)) from None
    except OSError as error:
        raise _Undecided(describe_os_error(error)) from None


def _diff_lines(found: "Diff") -> Iterator[str]:
    yield f"A  {found.a}"
    yield f"B  {found.b}"
    if found.first is not None:
        yield from _first_lines(found.first)
        alone = "".join(f"; in {side} alone: {count}" for side, count in found.alone.items() if count)
        yield f"events in both: {found.events}, of which {found.differing} differ{alone}"
    yield from shorten(found.incomplete, "places like these")
    yield from shorten(found.notes, "ranges of events")
    if found.same:
        yield f"{'no difference' if found.incomplete else 'the same'} in {found.events} events that both have"


def _first_lines(first: "EventDifference") -> Iterator[str]:
    where = f"{first.event} at {first.epoch}ep {first.batch}ba of rank {first.rank}"
    if first.a is None or first.b is None:
        only, number = ("A", first.a) if first.b is None else ("B", first.b)
        yield f"first difference: {where} is in {only} alone (event {number})"
        return
    yield f"first difference: {where} (event {first.a} in A, {first.b} in B)"
    yield from map(_field_line, first.fields[:_LISTED])
    if len(first.fields) > _LISTED:
        yield f"  and {len(first.fields) - _LISTED} more fields"


def _field_line(one: "FieldDifference") -> str:
    a, b = ("not there" if one.only == other else _text(value) for value, other in ((one.a, "B"), (one.b, "A")))
    return f"  {one.name}: {a} in A, {b} in B"


def _text(value: Any) -> str:
    # Not as one line: two texts may differ only in their line breaks.
    return cut_at_end(value_text(plain(value)), _LONGEST)
