"""The command ``bus``: runs, what is known of them, and a broker that stands alone."""

import json
import logging
import os
import re
import signal
import time
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from bus.broker import Broker
from bus.commands import send_command
from bus.errors import ConfigurationError, ProtocolError
from bus.journal import JournalReader
from bus.runs import RunInfo, find_run, list_runs, runs_dir
from bus.terminal import run_command
from bus.wire import END, EventBody, decode_event, parse_topic

__all__ = ["main"]

_runs_dir_option = click.option(
    "--runs-dir", metavar="DIR", help="Where runs live. Default: $OFFLOOP_RUNS_DIR, else 'runs' in the current folder."
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="offloop", prog_name="bus")
def bus() -> None:
    """See the runs that there are, and serve streams."""


@bus.command()
@_runs_dir_option
@click.option("--live", is_flag=True, help="Only the runs that are live.")
@click.option("--json", "as_json", is_flag=True, help="As JSON, for programs.")
def runs(runs_dir: str | None, live: bool, as_json: bool) -> None:
    """List the runs, the newest first."""
    found = [run for run in list_runs(runs_dir) if run.live or not live]
    if as_json:
        click.echo(json.dumps([_summary(run) for run in found], indent=2))
        return
    if not found:
        click.echo(f"no {'live ' if live else ''}runs in {_where(runs_dir)}; 'trainer digits' makes one")
        return
    rows = [("RUN", "STATUS", "STARTED", "LASTED", "RECORDING")]
    rows += [(run.name, run.status, _when(run.started), _lasted(run), str(run.recording)) for run in found]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        click.echo("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]))


@bus.command()
@click.argument("run")
@_runs_dir_option
@click.option("--json", "as_json", is_flag=True, help="As JSON, for programs.")
def info(run: str, runs_dir: str | None, as_json: bool) -> None:
    """Describe one RUN: a name, a run's folder, or a recording."""
    described = _describe_file(Path(run)) if Path(run).is_file() else _describe_run(find_run(run, runs_dir))
    if as_json:
        click.echo(json.dumps(described, indent=2, default=str))
        return
    width = max(len(key) for key in described)
    for key, value in described.items():
        if isinstance(value, dict):
            value = ", ".join(f"{name} {entry}" for name, entry in value.items())
        if value not in (None, ""):
            click.echo(f"{key.replace('_', ' '):<{width}}  {value}")


@bus.command()
@click.argument("run")
@_runs_dir_option
def stop(run: str, runs_dir: str | None) -> None:
    """Ask a live RUN to end after the batch at hand."""
    ranks = send_command(find_run(run, runs_dir), "stop")
    click.echo(f"told {ranks} rank{'s' if ranks != 1 else ''} of {run} to stop after the batch at hand")


@bus.command()
@click.option(
    "--listen", default="tcp://127.0.0.1:5570", show_default=True, help="Address; the stream takes the next port."
)
@_runs_dir_option
def broker(listen: str, runs_dir: str | None) -> None:
    """Serve any number of runs until Ctrl-C, for trainers started with --broker."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    serving = Broker(listen, _stream_address(listen), _where(runs_dir))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: serving.stop())
    click.echo(f"serving at {serving.door}, runs in {_where(runs_dir)}; start trainers with --broker {serving.door}")
    serving.serve()
    click.echo(f"stopped after {serving.statistics().collected} events")


def main() -> None:
    """The program ``bus``."""
    run_command(bus)


def _where(value: str | None) -> Path:
    return runs_dir(value)


def _stream_address(listen: str) -> str:
    match = re.fullmatch(r"tcp://(127(?:\.\d{1,3}){3}|localhost|\[::1\]):(\d{1,5})", listen)
    if match is None or not 0 <= int(match[2]) < 65535:
        raise ConfigurationError(
            f"cannot listen at {listen!r}: use tcp://127.0.0.1:PORT; "
            "other machines reach it through a tunnel, such as ssh -L 5570:127.0.0.1:5570 -L 5571:127.0.0.1:5571 HOST"
        )
    port = int(match[2])
    return f"tcp://{match[1]}:{port + 1 if port else 0}"


def _summary(run: RunInfo) -> dict[str, Any]:
    return {
        "run": run.name,
        "status": run.status,
        "started": run.started,
        "ended": run.last.ended,
        "attempt": run.last.number,
        "recording": str(run.recording),
        "path": str(run.path),
    }


def _when(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"


def _lasted(run: RunInfo) -> str:
    end = time.time() if run.live else run.last.ended
    return _duration(end - run.started) if end is not None else "?"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02.0f}s" if minutes else f"{rest:.1f}s"


def _describe_run(run: RunInfo) -> dict[str, Any]:
    last = run.last
    told = last.info
    described = {
        "run": run.name,
        "status": run.status,
        "error": last.error,
        "attempt": f"{last.number} of {len(run.attempts)}",
        "started": _when(run.started),
        "lasted": _lasted(run),
        "command": " ".join(map(str, told.get("command", []))),
        "host": told.get("host"),
        "versions": {"python": told.get("python"), **told.get("versions", {})},
        "git_commit": f"{told['git_commit']}{' with changes' if told.get('git_dirty') else ''}"
        if told.get("git_commit")
        else "",
        "config": told.get("config", {}),
    }
    return {**described, **_describe_recording(run.recording)}


def _describe_file(path: Path) -> dict[str, Any]:
    described = _describe_recording(path)
    return {"run": described.pop("run", None), **described}


def _describe_recording(path: Path) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    last: EventBody | None = None
    with JournalReader(path) as reader:
        for records in reader.read():
            topics = [record.topic for record in records]
            counts.update(topics)
            bodies = [record.body for record in records if f"/{END}/" not in record.topic]
            last = _decoded(bodies[-1]) if bodies else last
        metadata, cut = reader.metadata, reader.cut
        problems = [*reader.damage, *([cut] if cut else [])]
    names: Counter[str] = Counter()
    for topic, count in counts.items():
        names[parse_topic(topic.encode()).name] += count
    names.pop(END, None)
    reached = f"{last.timestamp[1]}ep {last.timestamp[2]}ba {last.timestamp[3]}sp" if last else "nothing yet"
    return {
        "run": metadata.get("run"),
        "reached": reached,
        "events": dict(names.most_common()),
        "recording": str(path),
        "size": f"{os.path.getsize(path):,} bytes",
        "damage": "; ".join(problems) or None,
    }


def _decoded(body: bytes) -> EventBody | None:
    try:
        return decode_event(body)
    except ProtocolError:
        return None


if __name__ == "__main__":
    main()
