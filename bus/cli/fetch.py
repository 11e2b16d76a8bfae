"""The command ``offloop server fetch``."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from offloop.bus.cli.options import force_option, output_option, start_option, stream_options, until_option
from offloop.bus.printing import say
from offloop.bus.terminal import CliCommand

if TYPE_CHECKING:
    from offloop.bus.recording.window import Bound


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
    """Get what a host has recorded of a run on several hosts, of which the stream has windows alone.

    HOST is $OFFLOOP_HOST there, or its host name. Its bridge, which has to be there, sends the recording through the
    servers. What is written, by default RUN-HOST.mcap in the current folder, is the part from --start to --until of it:
    consumer --replay FILE.
    """
    from offloop.bus.jetstream.download import downloaded
    from offloop.bus.tools.convert import convert

    if stream is None:
        raise click.UsageError("name the NATS servers with --stream")
    target = Path(output) if output else Path(re.sub(r"[^\w.-]", "_", f"{run}-{host}.mcap"))
    with downloaded(stream, run, host) as whole:
        found = convert([whole], target, start, until, force=force)
    say(f"{found.events:,} events of run {run} from host {host} are in {target}: consumer --replay {target}")
