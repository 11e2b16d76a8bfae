"""The command ``offloop server remove``."""

import click

from offloop.bus.cli.options import stream_options
from offloop.bus.errors import ConfigurationError, RunNotFoundError
from offloop.bus.printing import say
from offloop.bus.terminal import CliCommand


@click.command(cls=CliCommand, name="remove", short_help="Remove a run from NATS servers.")
@click.argument("run")
@stream_options
def remove_stream(run: str, stream: str | None) -> None:
    """Remove a run from NATS servers: its streams, and what is said of it there. Its hosts keep their recordings.

    The nkey needs the role 'remove', see 'offloop server nats-config'. A run whose bridge is at work is refused.
    """
    from offloop.bus.jetstream.nats_connection import NatsConnection
    from offloop.bus.jetstream.run_stream import remove_run

    if stream is None:
        raise click.UsageError("name the NATS servers with --stream, or OFFLOOP_STREAM")
    connection = NatsConnection.at(stream)
    if any(one["live"] for one in connection.runs(run, "*")):
        raise ConfigurationError(
            f"run {run!r} is live, and its bridge would copy it again: stop the training first", value=run
        )
    found = connection.call(remove_run(connection.client, run), 30.0)
    if not found:
        raise RunNotFoundError(f"NATS at {stream} has no run {run!r}: 'offloop runs --stream' lists them", run=run)
    say(f"removed run {run}: {', '.join(found)}")
