"""The commands ``offloop export``, ``import`` and ``convert``."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from offloop.bus.cli import options
from offloop.bus.errors import ConfigurationError
from offloop.bus.printing import shorten
from offloop.bus.terminal import EXIT_LOST, CliCommand
from offloop.bus.tools.logs import SOURCES, STORES
from offloop.bus.tools.rows import FORMATS, PICTURES
from offloop.bus.types.event import Event
from offloop.bus.types.time import Time
from offloop.bus.types.units import BYTES, number_text

if TYPE_CHECKING:
    from offloop.bus.tools.convert import Written
    from offloop.bus.tools.imports import Imported

_LONGEST_FILE = 100  # characters of a name from several runs


@click.command(
    cls=CliCommand,
    name="export",
    short_help="Write runs for people and other tools.",
    frequent=("--to", "--output", "--events", "--metrics", "--table", "--force"),
)
@click.argument("runs", metavar="RUN...", nargs=-1, required=True)
@click.option(
    "--to", required=True, type=click.Choice([*FORMATS, *PICTURES]), metavar="FORMAT", help="In which format."
)
@options.output_option
@click.option(
    "--events", callback=options.split_names, metavar="NAME,...", help="Only these events: batch_end,epoch_end."
)
@click.option(
    "--metrics", callback=options.split_names, metavar="NAME,...", help="With html and svg: only these metrics."
)
@click.option("--table", metavar="NAME", help="Instead of events, the rows of a table that the training logged.")
@options.ranks_option
@options.force_option
@options.reporting
@options.place_options
def export_recording(
    runs: tuple[str, ...],
    to: str,
    output: str | None,
    events: list[str] | None,
    metrics: list[str] | None,
    table: str | None,
    ranks: tuple[int, ...],
    force: bool,
    runs_dir: str | None,
    stream: str | None,
    report: options.Report,
) -> None:
    """Write a run in a format of other tools, or one or several as a file to share.

    RUN is a name or a run's folder; of events also a recording, with --stream the name of a run there.

    \b
    html     one file with charts, tables and hyperparameters, for any browser
    svg      the chart of a metric, for slides
    parquet  a table with a row for each event and a column for each field
    csv      the same as text; lists are JSON
    jsonl    a JSON object for each event
    trace    a timeline, for Perfetto (ui.perfetto.dev)

    Exit code: 0 if nothing was lost, 3 if a part was, 1 if nothing could be exported."""
    if to in PICTURES:
        from offloop.bus.runs.directory import find_run
        from offloop.bus.tools.report import ReportedRun, write_report

        if events is not None or ranks or options.is_typed("stream"):
            raise click.UsageError(f"--events, --ranks and --stream are not for {to}: leave them out")
        if to == "svg" and (metrics is None or len(metrics) != 1 or table is not None):
            raise click.UsageError("svg is the chart of one metric: name it with '--metrics', such as '--metrics loss'")
        infos = [find_run(run, runs_dir) for run in runs]
        target = Path(output or f"{'-'.join(info.name for info in infos)[:_LONGEST_FILE]}.{to}")
        reported = list(map(ReportedRun, infos))
        left_out = write_report(reported, target, to, metrics=metrics, table=table, force=force)
        more = f" without {left_out:,} metrics: choose some with '--metrics'" if left_out else ""
        size = number_text(target.stat().st_size, BYTES)
        report(f"wrote {target}, {size}{more}", {"path": target, "left_out": left_out})
        return
    from offloop.bus.tools.export import export, exported_path

    if metrics is not None or len(runs) > 1:
        raise click.UsageError("--metrics and several runs are for html and svg: name one run, and '--events'")
    path, place = recording_of(runs[0], runs_dir, stream)
    if table is not None and (events is not None or to == "trace"):
        raise click.UsageError("--table is for parquet, csv and jsonl, without --events")
    usual = exported_path(path, to, table)
    target = Path(output) if output else usual if stream is None else Path(usual.name)
    if events == []:
        raise ConfigurationError("--events takes names of events, such as batch_end,epoch_end")
    chosen = None if events is None else frozenset(map(Event, events))
    done = export(path, target, to, events=chosen, ranks=ranks or None, table=table, force=force)
    marks = f" and {done.marks} row{'s' * (done.marks > 1)} for commands and the end" if done.marks else ""
    what = f"{done.events} events{marks}" if table is None else f"the rows of table {table}"
    report(f"exported {what} of {place} to {done.path}", done)
    _report_findings(done, report)


@click.command(cls=CliCommand, name="import", short_help="Make a run of another tool's log.")
@click.argument("path", metavar="PATH", type=click.Path(path_type=Path))
@click.option(
    "--from",
    "source",
    required=True,
    type=click.Choice([*STORES, *SOURCES]),
    metavar="TOOL",
    help="What wrote it.",
)
@options.run_name_option
@click.option("--step-column", metavar="NAME", help="Of csv and jsonl: the column of steps. Default: step.")
@options.reporting
@options.runs_dir_option
def import_log(
    path: Path, source: str, run_name: str | None, step_column: str | None, runs_dir: str | None, report: options.Report
) -> None:
    """Make a finished run from another tool's log, to replay it, compare it, and show it beside other runs.

    \b
    tensorboard       a folder of event files, or several; each becomes a run
    wandb             a folder offline-run-*, or the folder 'wandb' of several
    mlflow            a database of MLflow, mlflow.db, with all of its runs
    trackio           a database of Trackio, or the folder of these
    csv               a table with a column of steps: Lightning's metrics.csv
    jsonl             a JSON object per line for each step
    hf-trainer-state  the trainer_state.json of a Hugging Face trainer

    PATH is the file or its folder. --run-name names the run; of several, it comes before their own names. Batch 100 of
    the run is step 100 of the log. Of several runs, those that exist are skipped.

    Exit code: 0 if the log was intact, 3 if a part was damaged, 1 if nothing could be imported."""
    from offloop.bus.tools.imports import import_logs

    if step_column is not None and source not in ("csv", "jsonl"):
        raise click.UsageError(f"--step-column is for csv and jsonl: the steps of {source} are known")
    done = import_logs(source, path, runs_dir, run_name, step_column, report=partial(_report_imported, report))
    if any(one.damage for one in done):
        click.get_current_context().exit(EXIT_LOST)


def _report_imported(report: options.Report, done: "Imported") -> None:
    if done.is_skipped:
        report(f"run {done.run} exists: {done.log} is skipped", done)
    elif done.run is None:
        report(f"{done.log} has no numbers: no run is made from it", done)
    else:
        report(f"imported {done.values:,} values of {done.steps:,} steps of {done.log} as run {done.run}", done)
    if done.replaced:
        report(f"{done.replaced:,} values were replaced by later ones of the same name and step")
    for line in (*done.notes, *done.damage):
        report(line)


@click.command(
    cls=CliCommand,
    name="convert",
    short_help="Repair, join or cut recordings.",
    frequent=("--output", "--start", "--until", "--force"),
)
@click.argument("files", metavar="RECORDING...", nargs=-1, required=True)
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path), metavar="FILE", help="The file to write."
)
@options.start_option
@options.until_option
@options.force_option
@options.reporting
@options.runs_dir_option
def convert_recordings(
    files: tuple[str, ...],
    output: Path,
    start: Time | None,
    until: Time | None,
    force: bool,
    runs_dir: str | None,
    report: options.Report,
) -> None:
    """Write the intact parts of recordings of one attempt as one recording.

    They may be a damaged one, or those of different ranks.

    RECORDING is a file, or the name or the folder of a run. A TIME is a training time: 2ep, 100ba, 0.5dur, or 90sec
    spent training. Events before the training, commands and the run's ending are always kept.

    Exit code: 0 if nothing was lost, 3 if a part was, 1 if nothing could be written."""
    from offloop.bus.tools.convert import convert

    paths = [_recording(file, runs_dir) for file in files]
    done = convert(paths, output, start, until, force=force)
    without = f", left out {done.dropped}" if done.dropped else ""
    report(f"wrote {done.events} events of {', '.join(map(str, paths))} to {done.path}{without}", done)
    _report_findings(done, report)


def _report_findings(done: "Written", report: options.Report) -> None:
    """Report missing parts, and exit with :data:`EXIT_LOST` if a part of the recording was lost."""
    for line in shorten(done.damage, "places like these"):
        report(line)
    lost = (f"missing: events {first} to {last} of rank {rank}, which are lost" for rank, first, last in done.gaps)
    for line in shorten(lost, "ranges of events that are lost"):
        report(line)
    # Where events were dropped, the user chose so.
    gaps = () if done.dropped else done.left_out
    left_out = (f"left out: events {first} to {last} of rank {rank}" for rank, first, last in gaps)
    for line in shorten(left_out, "ranges of events that are left out"):
        report(line)
    if done.ending is None:
        report("the run's ending is not recorded")
    if done.lost:
        report("a part of the recording was lost")
        click.get_current_context().exit(EXIT_LOST)


def _recording(name: str, runs_dir: str | None) -> Path:
    from offloop.bus.runs.directory import find_run

    return Path(name) if Path(name).is_file() else find_run(name, runs_dir).recording


def recording_of(name: str, runs_dir: str | None, stream: str | None) -> tuple[Path, str]:
    """Return the recording, in NATS a temporary file until the command ends, and its name for people."""
    if stream is None:
        path = _recording(name, runs_dir)
        return path, str(path)
    from offloop.bus.jetstream.download import downloaded

    return click.get_current_context().with_resource(downloaded(stream, name)), f"run {name} at {stream}"
