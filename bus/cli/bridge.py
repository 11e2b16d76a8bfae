"""The command ``offloop server bridge``."""

import re
from functools import partial
from pathlib import Path

import click

from offloop.bus.cli.options import ca_option, nkey_option, runs_dir_option, stream_option
from offloop.bus.printing import say
from offloop.bus.terminal import CliCommand

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT]?)B)?\s*", re.IGNORECASE)


def _size(_context: click.Context, _parameter: click.Parameter, value: str | None) -> int | None:
    if value is None:
        return None
    found = _SIZE.fullmatch(value)
    size = int(float(found[1]) * _UNITS[(found[2] or "").upper()]) if found else 0
    if size < 1:
        raise click.BadParameter(f"{value!r} is not a size: write a number of bytes, or 500MB, 10GB, 1.5TB")
    return size


@click.command(cls=CliCommand, short_help="Copy a run into NATS JetStream.")
@click.argument("run")
@runs_dir_option
@stream_option(required=True)
@nkey_option
@ca_option
@click.option(
    "--replicas",
    envvar="OFFLOOP_REPLICAS",
    type=click.IntRange(1, 5),
    help="How many servers keep it. Default: $OFFLOOP_REPLICAS, else 3 in a cluster.",
)
@click.option(
    "--max-bytes",
    envvar="OFFLOOP_MAX_BYTES",
    callback=_size,
    metavar="SIZE",
    help="How large it may grow: 10GB. Default: $OFFLOOP_MAX_BYTES, else as the servers allow.",
)
def bridge(
    run: str,
    runs_dir: str | None,
    stream: str,
    nkey: Path | None,
    ca: Path | None,
    replicas: int | None,
    max_bytes: int | None,
) -> None:
    """Copy a run into NATS JetStream as it continues, until it has ended and all of it is there.

    RUN is a name or a run's folder. The run's folder is the record: what the servers have forgotten is sent again as
    long as this runs. Servers that are away are waited for: when the run has ended, until they have taken nothing for
    ten minutes.
    """
    import asyncio

    from offloop.bus.hosts.watch import watch_host
    from offloop.bus.jetstream.bridge import Bridge
    from offloop.bus.jetstream.connection import NatsServers
    from offloop.bus.runs.directory import find_run

    servers = NatsServers.parse(stream, nkey, ca)
    found = find_run(run, runs_dir)
    warn = partial(say, err=True)
    copying = Bridge(
        found.path, servers, replicas, max_bytes, say=warn, watch=partial(watch_host, found.path, say=warn)
    )
    say(f"copying run {found.name} to {servers} (Ctrl-C ends)", err=True)
    asyncio.run(copying.copy())
    status = copying.status
    say(f"run {found.name} is copied: {status.copied:,} bytes of attempt {status.attempt}", err=True)
