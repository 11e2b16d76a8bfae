"""The command ``bus``: runs, what is known of them, and a broker that stands alone."""

import json
import logging
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from bus.allow_list import ROLES, AllowList, allow, default_allow_list
from bus.broker import Broker
from bus.commands import send_command, send_command_through
from bus.describe import describe_recording, describe_remote_run, describe_run, lasted, lines, when
from bus.errors import ConfigurationError
from bus.keys import PUBLIC_SUFFIX, load_public_key, make_keys
from bus.recovery import recover, recovered_path
from bus.run_source import list_remote_runs
from bus.runs import RunInfo, find_run, list_runs, runs_dir
from bus.security import check_listen_address, client_security, server_security
from bus.terminal import run_command

__all__ = ["main"]

_runs_dir_option = click.option(
    "--runs-dir", metavar="DIR", help="Where runs live. Default: $OFFLOOP_RUNS_DIR, else 'runs' in the current folder."
)


def _remote_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in (
        click.option("--broker-key", metavar="FILE", help="The broker's public key. Default: $OFFLOOP_BROKER_KEY."),
        click.option("--key", metavar="FILE", help="Your secret key for it. Default: $OFFLOOP_KEY."),
        click.option("--broker", metavar="ADDRESS", help="Ask the broker there, such as tcp://10.0.0.1:5570."),
    ):
        command = option(command)
    return command


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="offloop", prog_name="bus")
def bus() -> None:
    """See the runs that there are, and serve streams."""


@bus.command()
@_runs_dir_option
@_remote_options
@click.option("--live", is_flag=True, help="Only the runs that are live.")
@click.option("--json", "as_json", is_flag=True, help="As JSON, for programs.")
def runs(
    runs_dir: str | None, broker: str | None, key: str | None, broker_key: str | None, live: bool, as_json: bool
) -> None:
    """List the runs, the newest first."""
    _check_remote(runs_dir, broker, key, broker_key)
    if broker is not None:
        listed = list_remote_runs(broker, client_security(key, broker_key))
    else:
        listed = [_summary(run) for run in list_runs(runs_dir)]
    listed = [run for run in listed if run["status"] == "live" or not live]
    if as_json:
        click.echo(json.dumps(listed, indent=2))
        return
    if not listed:
        where = f"at {broker}" if broker else f"in {_where(runs_dir)}; 'trainer digits' makes one"
        click.echo(f"no {'live ' if live else ''}runs {where}")
        return
    rows = [("RUN", "STATUS", "STARTED", "LASTED", "" if broker else "RECORDING")]
    for run in listed:
        took = lasted(run["started"], run["ended"], live=run["status"] == "live")
        rows.append((run["run"], run["status"], when(run["started"]), took, run.get("recording", "")))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        cells = [*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]
        click.echo("  ".join(cells).rstrip())


@bus.command()
@click.argument("run")
@_runs_dir_option
@_remote_options
@click.option("--json", "as_json", is_flag=True, help="As JSON, for programs.")
def info(
    run: str, runs_dir: str | None, broker: str | None, key: str | None, broker_key: str | None, as_json: bool
) -> None:
    """Describe one RUN: a name, a run's folder, or a recording.

    Of a live run it also says how its broker, its trainer and its consumers are doing.
    """
    _check_remote(runs_dir, broker, key, broker_key)
    if broker is not None:
        described = describe_remote_run(broker, run, client_security(key, broker_key))
    elif Path(run).is_file():
        described = describe_recording(Path(run))
    else:
        described = describe_run(find_run(run, runs_dir))
    if as_json:
        click.echo(json.dumps(described, indent=2, default=str))
        return
    told = list(lines(described))
    width = max(len(label) for label, _ in told)
    for label, text in told:
        click.echo(f"{label:<{width}}  {text}")


@bus.command(name="recover")
@click.argument("run")
@click.option(
    "-o", "--output", metavar="FILE", help="What to write. Default: beside it, such as recording-1.recovered.mcap."
)
@_runs_dir_option
@click.pass_context
def recover_recording(context: click.Context, run: str, output: str | None, runs_dir: str | None) -> None:
    """Write a clean recording from a damaged one, or from one that was cut off.

    RUN is a recording, or the name or the folder of a run that has ended. The original stays as it is.

    Exit code: 0 when nothing of the recording was lost, 3 when something was, 1 when nothing could be recovered.
    """
    path = Path(run) if Path(run).is_file() else find_run(run, runs_dir).recording
    recovery = recover(path, Path(output) if output else recovered_path(path))
    click.echo(f"kept {recovery.records} records of {path} in {recovery.path}")
    for line in recovery.damage:
        click.echo(line)
    for rank, first, last in recovery.gaps:
        click.echo(f"missing: events {first} to {last} of rank {rank}, which nobody has")
    if not recovery.ended:
        click.echo("it does not tell how the run ended: what may have come after it was never recorded")
    if recovery.lost:
        click.echo("something of the recording was lost")
        context.exit(3)
    click.echo("nothing of the recording was lost")


@bus.command()
@click.argument("run")
@_runs_dir_option
@_remote_options
def stop(run: str, runs_dir: str | None, broker: str | None, key: str | None, broker_key: str | None) -> None:
    """Ask a live RUN to end after the batch at hand."""
    security = client_security(key, broker_key) if key or broker_key else None
    if broker is not None:
        ranks = send_command_through(broker, run, "stop", security)
    else:
        ranks = send_command(find_run(run, runs_dir), "stop", security)
    click.echo(f"told {ranks} rank{'s' if ranks != 1 else ''} of {run} to stop after the batch at hand")


@bus.command()
@click.option(
    "--listen", default="tcp://127.0.0.1:5570", show_default=True, help="Address; the stream takes the next port."
)
@click.option("--key", metavar="FILE", help="The broker's secret key, for other addresses than this machine's own.")
@click.option(
    "--allow", "allow_list", metavar="FILE", help="The keys that it admits. Default: 'allowed' beside the broker's key."
)
@_runs_dir_option
def broker(listen: str, key: str | None, allow_list: str | None, runs_dir: str | None) -> None:
    """Serve any number of runs until Ctrl-C, for trainers started with --broker."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    security = server_security(key, allow_list)
    stream = _stream_address(listen)
    check_listen_address(listen, security)
    serving = Broker(listen, stream, _where(runs_dir), security=security)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: serving.stop())
    click.echo(f"serving at {serving.door}, runs in {_where(runs_dir)}; start trainers with --broker {serving.door}")
    serving.serve()
    click.echo(f"stopped after {serving.statistics().collected} events")


@bus.command()
@click.argument("name")
@click.option("--dir", "where", metavar="DIR", help="Default: $OFFLOOP_KEYS_DIR, else ~/.config/offloop/keys.")
def keygen(name: str, where: str | None) -> None:
    """Make a key pair: NAME.key to give away, NAME.key_secret to keep."""
    public, secret = make_keys(name, where)
    click.echo(f"secret key: {secret}; give it to nobody, and to programs with '--key' or OFFLOOP_KEY")
    click.echo(f"public key: {public}; give it to whom this key is to meet:")
    click.echo(f"  a trainer's or consumer's to the broker's machine: bus allow {public.name} --role {'|'.join(ROLES)}")
    click.echo("  a broker's to trainers and consumers, as '--broker-key' or OFFLOOP_BROKER_KEY")


@bus.command(name="allow")
@click.argument("keyfile", required=False)
@click.option("--role", "roles", multiple=True, type=click.Choice(ROLES), help="What the key may do; more than once.")
@click.option("--list", "allow_list", metavar="FILE", help="The allow-list. Default: 'allowed' where keys are.")
@click.option("--show", is_flag=True, help="Print the list.")
def allow_key(keyfile: str | None, roles: tuple[str, ...], allow_list: str | None, show: bool) -> None:
    """Let the owner of the public key in KEYFILE publish, view or command, from their next connection on."""
    path = Path(allow_list) if allow_list else default_allow_list()
    if bool(keyfile) != bool(roles) or not (keyfile or show):
        raise click.UsageError("give a public key file and a role, as in 'bus allow anna.key --role view', or --show")
    if keyfile:
        name = Path(keyfile).name.removesuffix(PUBLIC_SUFFIX)
        new = allow(path, load_public_key(keyfile), name, roles)
        click.echo(f"{path}: {name} may {', '.join(new)}" if new else f"{path}: {name} was allowed that already")
    if show:
        for grant in AllowList.read(path).grants:
            click.echo(f"{grant.role:<8} {grant.key} {grant.name}")


def main() -> None:
    """The program ``bus``."""
    run_command(bus)


def _check_remote(runs_dir: str | None, broker: str | None, key: str | None, broker_key: str | None) -> None:
    if broker and runs_dir:
        raise click.UsageError("--broker asks the broker there: it does not go with --runs-dir")
    if (key or broker_key) and not broker:
        raise click.UsageError("--key and --broker-key are for a broker elsewhere: name it with --broker")


def _where(value: str | None) -> Path:
    return runs_dir(value)


def _stream_address(listen: str) -> str:
    if not re.fullmatch(r"tcp://.+:(\d{1,5}|\*)", listen):
        raise ConfigurationError(f"{listen!r} is not an address to listen at: use one like tcp://127.0.0.1:5570")
    host, _, port = listen.rpartition(":")
    if port == "65535":
        raise ConfigurationError(f"cannot listen at {listen!r}: the stream takes the next port, and there is none")
    return f"{host}:{int(port) + 1 if port not in ('0', '*') else 0}"


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


if __name__ == "__main__":
    main()
