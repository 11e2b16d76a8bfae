"""The command ``offloop mcp``."""

import socket
from pathlib import Path

import click

from offloop.bus.cli.options import runs_dir_option, split_names
from offloop.bus.errors import ConfigurationError, check_choice, require
from offloop.bus.printing import say
from offloop.bus.processes import allow_many_connections
from offloop.bus.terminal import CliCommand
from offloop.bus.types.commands import COMMANDS
from offloop.consumers.dashboard.web.access import Listening, Tokens


@click.command(cls=CliCommand, short_help="Serve runs to agents (MCP).")
@runs_dir_option
@click.option("--allow", callback=split_names, metavar="COMMAND,...", help="Commands that agents may send: stop,pause.")
@click.option(
    "--commands-per-hour", type=click.IntRange(1), default=20, metavar="N", help="So many tries at most. Default: 20."
)
@click.option("--http", type=click.IntRange(0, 65535), metavar="PORT", help="Serve at http://127.0.0.1:PORT/mcp.")
@click.option("--tokens", type=click.Path(path_type=Path), metavar="FILE", help="Secrets of clients over HTTP.")
def mcp(
    runs_dir: str | None, allow: list[str] | None, commands_per_hour: int, http: int | None, tokens: Path | None
) -> None:
    """Serve the runs of a folder to agents, by the Model Context Protocol. Without --allow it is read-only.

    An agent's client starts this command, and speaks with it over standard input and output. With --http clients
    connect to it, with a secret of FILE as bearer token. SIGUSR1 makes a running server read-only."""
    require("offloop mcp", "mcp", "mcp", "numpy")
    from offloop.consumers.dashboard.web.gate import guarded_server
    from offloop.consumers.mcp.tools import RunTools

    for name in allow or ():
        check_choice("command", name, COMMANDS)
    if tokens is not None and http is None:
        raise ConfigurationError("--tokens are for clients over HTTP: add --http PORT")
    allow_many_connections()
    server = RunTools(runs_dir, set(allow or ()), commands_per_hour).server()
    if http is None:
        server.run("stdio")
        return
    listening, secrets = Listening(port=http), None if tokens is None else Tokens.load(tokens)
    with socket.create_server((listening.host, http)) as listener:
        port = listener.getsockname()[1]
        say(f"mcp: {listening.url(port)}mcp", err=True)
        guarded_server(server.streamable_http_app(), listening, secrets, port).run([listener])
