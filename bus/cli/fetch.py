"""The command ``offloop server fetch``."""

import re
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from offloop.bus.cli.options import force_option, output_option, start_option, stream_options, until_option
from offloop.bus.errors import BrokerError, ConfigurationError
from offloop.bus.printing import say
from offloop.bus.terminal import CliCommand

if TYPE_CHECKING:
    from offloop.bus.recording.window import Bound

_POLL_SECONDS = 0.2


@click.command(cls=CliCommand, name="fetch", short_help="Get a part of a recording from a host.")
@click.argument("run")
@click.argument("host")
@start_option
@until_option
@output_option
@force_option
@stream_options
def fetch_part(
    run: str,
    host: str,
    start: "Bound | None",
    until: "Bound | None",
    output: str | None,
    force: bool,
    stream: str | None,
) -> None:
    """Get a part of a recording from a host of a run on several hosts, of which the stream has windows alone.

    HOST is $OFFLOOP_HOST there, or its host name. It cuts the part out, as 'offloop convert cut' does, and sends it
    through the servers: its bridge has to be there. What is written, by default RUN-HOST.mcap in the current folder, is
    a recording: consumer --replay FILE.
    """
    from offloop.bus.files import atomic_output
    from offloop.bus.jetstream.nats_connection import NatsConnection
    from offloop.bus.net.requests import RequestClient

    if stream is None:
        raise click.UsageError("name the NATS servers with --stream")
    connection = NatsConnection.at(stream)
    hosts = [str(one.get("host")) for one in connection.hosts(run)]
    if host not in hosts:
        known = f"its hosts are {', '.join(hosts[:20])}" if hosts else "'offloop runs' with --stream lists runs"
        raise ConfigurationError(f"run {run!r} at {stream} has no host {host!r}: {known}", value=host)
    target = Path(output) if output else Path(re.sub(r"[^\w.-]", "_", f"{run}-{host}.mcap"))
    part = {"run": run, "host": host, "start": start and str(start), "until": until and str(until)}
    # What is cut out is this command's own: the recording may have grown since another one asked.
    part["reader"] = secrets.token_hex(8)
    with (
        RequestClient(connection.open_channel()) as ask,
        atomic_output(target, [], force) as draft,
        open(draft, "wb") as file,
    ):
        while True:
            data = ask("cut", {**part, "offset": file.tell()}).get("data")
            if data is None:
                time.sleep(_POLL_SECONDS)
            elif not isinstance(data, bytes):
                raise BrokerError(f"host {host} has answered something else than a part of a recording")
            elif data:
                file.write(data)
            else:
                break
        size = file.tell()
    say(f"{size:,} bytes of run {run} from host {host} are in {target}: consumer --replay {target}")
