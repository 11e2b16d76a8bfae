"""The configuration of NATS servers, as ``offloop server nats-config`` writes it: an account for each team, and in it
users with what their roles may do."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from offloop.bus.jetstream.connection import is_loopback
from offloop.bus.jetstream.roles import merged


@dataclass(frozen=True)
class ServerConfig:
    """What is configured."""

    listen: str
    store: Path
    teams: Mapping[str, Mapping[str, Sequence[str]]]
    """The roles of each public nkey, by team."""
    certificate: Path | None = None
    certificate_key: Path | None = None
    ca: Path | None = None
    """Who signed the certificates of the other servers."""
    name: str | None = None
    cluster: Sequence[str] = ()
    """Hosts of all servers."""
    advertise: str | None = None
    """The name by which clients reach this server, or ``$VARIABLE``: that of the host in ``cluster`` whose name is or
    begins with :attr:`name`, unless given."""
    max_store: str | None = None
    """How much each team may store."""

    @property
    def is_here(self) -> bool:
        """Whether this machine alone reaches it."""
        return is_loopback(self.listen.rpartition(":")[0])

    def __str__(self) -> str:
        return "\n".join([*self._server(), *self._accounts(), *self._cluster(), ""])

    def _server(self) -> list[str]:
        lines = [
            "# Made by 'offloop server nats-config'. To check it: nats-server -t -c FILE",
            # Without quotes, because it may stand for a variable of the environment.
            *([f"server_name: {self.name}"] if self.name else []),
            f"listen: {_text(self.listen)}",
            # Certificates are for names: clients that know one server hear of the others by theirs.
            *([f"client_advertise: {advertised}"] if (advertised := self._advertised) else []),
            "jetstream {",
            f"  store_dir: {_text(self.store)}",
            "  # Where a power failure of all servers at once must lose nothing, from nats-server 2.10 on:",
            "  # sync_interval: always",
            "}",
        ]
        return lines + ([f"tls {{ {self._certificate()}, timeout: 5 }}"] if self.certificate else [])

    @property
    def _advertised(self) -> str | None:
        if self.advertise is not None:
            return self.advertise if self.advertise.startswith("$") else _text(self.advertise)
        return next((_text(host) for host in self.cluster if self.name in (host, host.partition(".")[0])), None)

    def _certificate(self) -> str:
        return f"cert_file: {_text(self.certificate)}, key_file: {_text(self.certificate_key)}"

    def _accounts(self) -> list[str]:
        lines = ["accounts {"]
        for team, users in self.teams.items():
            allowed = f"{{ max_file: {self.max_store} }}" if self.max_store else "enabled"
            lines += [f"  {team} {{", f"    jetstream: {allowed}", "    users: ["]
            for key, roles in users.items():
                role = merged(roles)
                lines += [
                    f"      # {', '.join(roles)}",
                    f"      {{ nkey: {key}, permissions: {{",
                    f"        publish: {_allow(role.publish)}",
                    f"        subscribe: {_allow((f'_INBOX.{key}.>', *role.subscribe))}",
                    "      } }",
                ]
            lines += ["    ]", "  }"]
        return [*lines, "}"]

    def _cluster(self) -> list[str]:
        if not self.cluster:
            return []
        routes = ", ".join(_text(f"nats://{host}:6222") for host in self.cluster)
        return [
            "cluster {",
            "  name: offloop",
            '  listen: "0.0.0.0:6222"',
            f"  routes: [{routes}]",
            f"  tls {{ {self._certificate()}, ca_file: {_text(self.ca)}, verify: true, timeout: 5 }}",
            "}",
        ]


def _text(value: object) -> str:
    return json.dumps(str(value), ensure_ascii=False)


def _allow(subjects: Sequence[str]) -> str:
    return f"{{ allow: [{', '.join(_text(subject) for subject in subjects)}] }}"
