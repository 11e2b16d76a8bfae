"""The command ``offloop mcp``."""

from typing import Any

import click

from offloop.bus.cli.options import runs_dir_option, split_names
from offloop.bus.errors import check_choice, require
from offloop.bus.printing import say
from offloop.bus.terminal import CliCommand
from offloop.bus.types.commands import COMMANDS
from offloop.consumers.dashboard.web.access import Listening, Tokens, listen
from offloop.consumers.dashboard.web.command import listening_options


@click.command(
    cls=CliCommand,
    short_help="Serve runs to agents (MCP).",
    frequent=("--runs-dir", "--allow", "--commands-per-hour", "--http"),
)
@runs_dir_option
@click.option("--allow", callback=split_names, metavar="COMMAND,...", help="Commands that agents may send: stop,pause.")
@click.option("--commands-per-hour", type=click.IntRange(1), default=20, show_default=True, help="Maximum number.")
@click.option("--http", is_flag=True, help="Serve over HTTP, at /mcp. Default: standard input and output.")
@listening_options
def mcp(runs_dir: str | None, allow: list[str] | None, commands_per_hour: int, http: bool, **serving: Any) -> None:
    """Serve the runs of a folder to agents, by the Model Context Protocol. Without --allow it is read-only.

    An agent's client starts this command and speaks with it. With --http clients connect to it, with the tokens of a
    dashboard as bearer tokens. SIGUSR1 makes a running server read-only."""
    require("offloop mcp", "mcp", "mcp", "numpy")
    from offloop.consumers.mcp.commanding import Commander
    from offloop.consumers.mcp.tools import RunTools

    allowed = set(allow or ())
    for name in allowed:
        check_choice("command", name, COMMANDS)
    server = RunTools(runs_dir, Commander(allowed, commands_per_hour)).server()
    if not http:
        server.run("stdio")
        return
    from offloop.consumers.dashboard.web.gate import guarded_server

    listening = Listening(**serving, as_flags=True)
    listening.check()
    tokens = None if listening.tokens is None else Tokens.load(listening.tokens)
    with listen(listening) as listener:
        port = listener.getsockname()[1]
        say(f"mcp: {listening.url(port)}mcp", err=True)
        guarded_server(server.streamable_http_app(host=listening.host), listening, tokens, port).run([listener])
