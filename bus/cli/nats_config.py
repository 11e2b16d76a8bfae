"""The command ``offloop server nats-config``."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from offloop.bus.cli.options import certificate_key_option, certificate_option, listen_option
from offloop.bus.net.nkeys import public_nkey
from offloop.bus.terminal import CliCommand

if TYPE_CHECKING:
    from collections.abc import Callable

_TEAM = re.compile(r"[A-Za-z0-9_-]{1,100}")
_NAME = re.compile(r"\$?[A-Za-z0-9_-]{1,100}")
_HOST = re.compile(r"[A-Za-z0-9.-]{1,253}")
_DEFAULT_TEAM = "offloop"
_FILE = click.Path(path_type=Path)


def _users(role: str, help_text: str) -> "Callable[[Callable[..., None]], Callable[..., None]]":
    return click.option(f"--{role}", role, multiple=True, metavar="[TEAM:]KEY", help=help_text)


@click.command(
    "nats-config",
    cls=CliCommand,
    short_help="Write the configuration of a NATS server.",
    frequent=("--publisher", "--viewer", "--commander", "--certificate", "--certificate-key", "--cluster"),
)
@_users("publisher", "Who copies runs to the servers: the training's hosts. More than once.")
@_users("viewer", "Who reads runs, and asks for fields within the viewers' budget.")
@_users("commander", "Who also commands trainings.")
@_users("remover", "Who also removes runs.")
@certificate_option
@certificate_key_option
@listen_option("HOST:PORT", shown="127.0.0.1:4222, with TLS 0.0.0.0:4222")
@click.option("--store-dir", type=_FILE, default=Path("/var/lib/nats"), show_default=True, help="Where streams are.")
@click.option("--cluster", metavar="HOST,HOST,...", help="The hosts of all servers, if these are several.")
@click.option("--cluster-ca", type=_FILE, metavar="FILE", help="With --cluster: the servers' CA certificate.")
@click.option("--server-name", metavar="NAME", help="With --cluster: this server's name, or $VARIABLE.")
@click.option(
    "--advertise", metavar="HOST", help="Clients reach this server as HOST, or $VARIABLE. Default: by --server-name."
)
@click.option("--max-store", metavar="SIZE", help="How much each team may store: 100GB. Default: all there is.")
def nats_config(
    publisher: tuple[str, ...],
    viewer: tuple[str, ...],
    commander: tuple[str, ...],
    remover: tuple[str, ...],
    certificate: Path | None,
    certificate_key: Path | None,
    listen: str | None,
    store_dir: Path,
    cluster: str | None,
    cluster_ca: Path | None,
    server_name: str | None,
    advertise: str | None,
    max_store: str | None,
) -> None:
    """Write the configuration of a NATS server to standard output: TLS, JetStream, an account for each team, and what
    its users may do.

    KEY is a public nkey, U..., or the file NAME.nkey that 'offloop server keygen NAME' wrote. A team sees
    nothing of another's runs. Paths are those on the server's machine.
    """
    from offloop.bus.jetstream.server_config import ServerConfig

    teams = _teams({"publish": publisher, "view": viewer, "command": commander, "remove": remover})
    hosts = [host.strip() for host in (cluster or "").split(",") if host.strip()]
    if bool(certificate) != bool(certificate_key):
        raise click.UsageError("--certificate and --certificate-key go together")
    for host in hosts:
        if not _HOST.fullmatch(host):
            raise click.UsageError(f"{host!r} is not a host: write --cluster one.example,two.example,three.example")
    if hosts and not (certificate and cluster_ca and server_name):
        raise click.UsageError(
            "servers of a cluster prove who they are to each other: add --certificate, --certificate-key, "
            "--cluster-ca and --server-name"
        )
    if server_name and not _NAME.fullmatch(server_name):
        raise click.UsageError(f"{server_name!r} is not a name: use letters, digits, '_' and '-', or $VARIABLE")
    if listen and not re.fullmatch(r"\S+:\d{1,5}", listen):
        raise click.UsageError(f"{listen!r} is not an address to listen at: write HOST:PORT")
    if advertise and not re.fullmatch(r"\$?[A-Za-z0-9._:-]{1,253}", advertise):
        raise click.UsageError(f"{advertise!r} is not a host: write --advertise one.example, or $VARIABLE")
    if max_store and not re.fullmatch(r"\d+(KB|MB|GB|TB)?", max_store):
        raise click.UsageError(f"{max_store!r} is not a size: write a number of bytes, or 500MB, 100GB, 2TB")
    config = ServerConfig(
        listen or ("0.0.0.0:4222" if certificate else "127.0.0.1:4222"),
        store_dir,
        teams,
        certificate,
        certificate_key,
        cluster_ca,
        server_name,
        hosts,
        advertise,
        max_store,
    )
    if certificate is None and not config.is_here:
        raise click.UsageError(
            f"beyond this machine a server needs TLS: add --certificate and --certificate-key to --listen {listen}"
        )
    # As it is, for a file.
    click.echo(str(config), nl=False)


def _teams(given: dict[str, tuple[str, ...]]) -> dict[str, dict[str, list[str]]]:
    """The roles of each key, by team."""
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
                    f"the nkey {public} is in the teams {others[0]} and {team}: a user is in one, make another nkey"
                )
            teams.setdefault(team, {}).setdefault(public, []).append(role)
    if not teams:
        raise click.UsageError("no user is named: give --publisher, --viewer or --commander with a public nkey")
    return teams
