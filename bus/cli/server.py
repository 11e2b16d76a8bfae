"""The commands ``offloop server``: bridges into NATS JetStream, and the setup of its servers."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from offloop.bus.cli import options
from offloop.bus.errors import ConfigurationError
from offloop.bus.net.nats_addresses import no_such_run
from offloop.bus.net.nkeys import make_nkey, public_nkey
from offloop.bus.printing import say
from offloop.bus.terminal import CliCommand

_TEAM = re.compile(r"[A-Za-z0-9_-]{1,100}")
_DEFAULT_TEAM = "offloop"
_FILE = click.Path(path_type=Path)
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT]?)B)?\s*", re.IGNORECASE)


def _size(value: str) -> int:
    found = _SIZE.fullmatch(value)
    size = int(float(found[1]) * _UNITS[(found[2] or "").upper()]) if found else 0
    if size < 1:
        raise ConfigurationError(f"{value!r} is not a size: write a number of bytes, or 500MB, 10GB, 1.5TB")
    return size


@click.group(short_help="Copy runs into NATS JetStream, and set it up.")
def server() -> None:
    """Serve several users and hosts: bridges into NATS JetStream, and their keys."""


@server.command(short_help="Make an nkey for NATS servers.")
@click.argument("name")
@click.option("--dir", "folder", type=_FILE, default=".", metavar="DIR", help="Default: the current folder.")
@options.reporting
def keygen(name: str, folder: Path, report: options.Report) -> None:
    """Make an nkey: NAME.nkey to hand out, NAME.nkey_secret to keep."""
    public, secret, made = make_nkey(name, folder)
    report(f"seed: {secret}; keep it secret, and give it to programs with '--nkey' or OFFLOOP_NKEY")
    report(
        f"public nkey: {made.public}, in {public}; give it to the servers' operator, for 'offloop server nats-config'",
        {"public": made.public, "file": public, "seed": secret},
    )


@server.command(cls=CliCommand, short_help="Copy a run into NATS JetStream.")
@click.argument("run")
@options.runs_dir_option
@options.stream_option
@options.nkey_option
@options.ca_option
@click.option(
    "--replicas",
    envvar="OFFLOOP_REPLICAS",
    type=click.IntRange(1, 5),
    help="Number of servers that keep it. Default: $OFFLOOP_REPLICAS, else 3 in a cluster.",
)
@click.option(
    "--max-bytes",
    envvar="OFFLOOP_MAX_BYTES",
    callback=options.read_by(_size),
    metavar="SIZE",
    help="Maximum size: 10GB. Default: $OFFLOOP_MAX_BYTES, else the servers' limit.",
)
def bridge(
    run: str,
    runs_dir: str | None,
    stream: str | None,
    nkey: Path | None,
    ca: Path | None,
    replicas: int | None,
    max_bytes: int | None,
) -> None:
    """Copy a run into NATS JetStream as it grows, until it has ended and is complete there.

    RUN is a name or a run's folder. Data that the servers lose meanwhile is sent again from the folder. Unreachable
    servers are waited for; after the end of the run, until they have accepted nothing for ten minutes."""
    import asyncio

    from offloop.bus.hosts.watch import watch_host
    from offloop.bus.jetstream.bridge import Bridge
    from offloop.bus.jetstream.connection import NatsServers
    from offloop.bus.runs.directory import find_run

    servers = NatsServers.parse(_given(stream), nkey, ca)
    found = find_run(run, runs_dir)
    warn = partial(say, err=True)
    copying = Bridge(
        found.path, servers, replicas, max_bytes, say=warn, watch=partial(watch_host, found.path, say=warn)
    )
    say(f"copying run {found.name} to {servers} (Ctrl-C ends)", err=True)
    asyncio.run(copying.copy())
    status = copying.status
    say(f"run {found.name} is copied: {status.copied:,} bytes of attempt {status.attempt}", err=True)


@server.command(cls=CliCommand, name="remove", short_help="Remove a run from NATS servers.")
@click.argument("run")
@options.stream_options
@options.reporting
def remove_stream(run: str, stream: str | None, report: options.Report) -> None:
    """Remove a run from NATS servers, with its streams. Its hosts keep their recordings.

    The nkey needs the role 'remove', see 'offloop server nats-config'. A run with a running bridge is refused."""
    from offloop.bus.jetstream.nats_connection import NatsConnection
    from offloop.bus.jetstream.run_stream import remove_run

    stream = _given(stream)
    connection = NatsConnection.at(stream)
    if any(one.live for one in connection.runs(run, every_host=True)):
        raise ConfigurationError(
            f"run {run!r} is live, and its bridge would copy it again: stop the training first", value=run
        )
    found = connection.call(remove_run(connection.client, run), 30.0)
    if not found:
        raise no_such_run(stream, run)
    report(f"removed run {run}: {', '.join(found)}", {"run": run, "streams": list(found)})


def _given(stream: str | None) -> str:
    if not stream:
        raise click.UsageError("name the NATS servers with --stream or OFFLOOP_STREAM")
    return stream


def _users(role: str, help_text: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option(f"--{role}", role, multiple=True, metavar="[TEAM:]KEY", help=help_text)


def _text_option(name: str, pattern: str, allowed: str, **settings: Any) -> Callable[..., Any]:

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ConfigurationError(f"{text!r} is not allowed: {allowed}")
        return text

    return click.option(name, callback=options.read_by(check), **settings)


@server.command(
    "nats-config",
    cls=CliCommand,
    short_help="Write the configuration of a NATS server.",
    frequent=("--publisher", "--viewer", "--commander", "--certificate", "--certificate-key", "--cluster"),
)
@_users("publisher", "Copies runs to the servers: the training's hosts. More than once.")
@_users("viewer", "Reads runs, and requests fields within the viewers' budget.")
@_users("commander", "Also commands trainings.")
@_users("remover", "Also removes runs.")
@options.certificate_option
@options.certificate_key_option
@_text_option(
    *("--listen", r"\S+:\d{1,5}", "write HOST:PORT"),
    metavar="HOST:PORT",
    show_default="127.0.0.1:4222, with TLS 0.0.0.0:4222",
    help="Address to listen at.",
)
@click.option("--store-dir", type=_FILE, default=Path("/var/lib/nats"), show_default=True, help="Folder of streams.")
@_text_option(
    *("--cluster", r"[A-Za-z0-9.,\s-]*", "write one.example,two.example,three.example"),
    metavar="HOST,HOST,...",
    help="Hosts of all servers of a cluster.",
)
@click.option("--cluster-ca", type=_FILE, metavar="FILE", help="With --cluster: the servers' CA certificate.")
@_text_option(
    *("--server-name", r"\$?[A-Za-z0-9_-]{1,100}", "use letters, digits, '_' and '-', or $VARIABLE"),
    metavar="NAME",
    help="With --cluster: this server's name, or $VARIABLE.",
)
@_text_option(
    *("--advertise", r"\$?[A-Za-z0-9._:-]{1,253}", "write one.example, or $VARIABLE"),
    metavar="HOST",
    help="Clients reach this server as HOST, or $VARIABLE. Default: by --server-name.",
)
@_text_option(
    *("--max-store", r"\d+(KB|MB|GB|TB)?", "write a number of bytes, or 500MB, 100GB, 2TB"),
    metavar="SIZE",
    help="Maximum storage of each team: 100GB. Default: the whole disk.",
)
def nats_config(listen: str | None, cluster: str | None, **given: Any) -> None:
    """Write the configuration of a NATS server to standard output.

    It sets up TLS, JetStream, an account for each team, and its users' permissions.

    KEY is a public nkey, U..., or the file NAME.nkey that 'offloop server keygen NAME' wrote. A team cannot see
    another team's runs. Paths are on the server's machine."""
    from offloop.bus.jetstream.connection import is_loopback
    from offloop.bus.jetstream.server_config import ServerConfig

    roles = {"publish": "publisher", "view": "viewer", "command": "commander", "remove": "remover"}
    teams = _teams({role: given.pop(option) for role, option in roles.items()})
    has_tls = given["certificate"] is not None
    if has_tls != (given["certificate_key"] is not None):
        raise click.UsageError("--certificate and --certificate-key go together")
    if cluster and not (has_tls and given["cluster_ca"] and given["server_name"]):
        raise click.UsageError(
            "servers of a cluster authenticate each other: add --certificate, --certificate-key, --cluster-ca and "
            "--server-name"
        )
    listen = listen or ("0.0.0.0:4222" if has_tls else "127.0.0.1:4222")
    if not has_tls and not is_loopback(listen.rpartition(":")[0]):
        raise click.UsageError(
            f"beyond this machine a server needs TLS: add --certificate and --certificate-key to --listen {listen}"
        )
    hosts = [host.strip() for host in (cluster or "").split(",") if host.strip()]
    # Unescaped, for a file.
    click.echo(ServerConfig(teams, listen, cluster=hosts, **given), nl=False)


def _teams(given: dict[str, tuple[str, ...]]) -> dict[str, dict[str, list[str]]]:
    teams: dict[str, dict[str, list[str]]] = {}
    for role, users in given.items():
        for user in users:
            team, colon, key = user.partition(":")
            if not colon:
                team, key = _DEFAULT_TEAM, user
            if not _TEAM.fullmatch(team):
                raise click.UsageError(f"{team!r} is not a team's name: use letters, digits, '_' and '-'")
            public = public_nkey(key)
            others = [other for other, known in teams.items() if other != team and public in known]
            if others:
                raise click.UsageError(
                    f"the nkey {public} is in the teams {others[0]} and {team}: make another nkey for one of them"
                )
            teams.setdefault(team, {}).setdefault(public, []).append(role)
    if not teams:
        raise click.UsageError("no user is given: add --publisher, --viewer or --commander with a public nkey")
    return teams
