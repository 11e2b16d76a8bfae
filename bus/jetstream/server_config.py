"""Configuration of NATS servers for ``offloop server nats-config``: one account for each team, users with roles.

Only permissions listed here exist: no role has all of JetStream's API, ``$JS.API.>``."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from offloop.bus.jetstream import names


class UserPermissions(NamedTuple):
    """Subjects that a user may publish and subscribe to."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


_API = "$JS.API"
_READ_STREAMS = (f"{_API}.STREAM.INFO.*", f"{_API}.STREAM.MSG.GET.*")
_DATA = ("ol.r.>", "ol.w.>")
_RUNS = f"$KV.{names.RUNS_BUCKET}.>"

# Readers create nothing in the servers: no stream, no bucket, no consumer.
_VIEW = UserPermissions(publish=(*_READ_STREAMS, "ol.v.>"), subscribe=(*_DATA, _RUNS))

# Permissions by role. ``command`` and ``remove`` include those of ``view``.
ROLES = {
    "publish": UserPermissions(
        publish=(
            f"{_API}.STREAM.CREATE.*",
            f"{_API}.STREAM.UPDATE.*",
            *_READ_STREAMS,
            *_DATA,
            # Inboxes of readers, which cannot be guessed, for answers at any later time.
            "_INBOX.>",
            _RUNS,
        ),
        subscribe=("ol.q.>", "ol.v.>"),
    ),
    "view": _VIEW,
    "command": UserPermissions(publish=(*_VIEW.publish, "ol.q.>"), subscribe=_VIEW.subscribe),
    "remove": UserPermissions(publish=(*_VIEW.publish, f"{_API}.STREAM.DELETE.*", _RUNS), subscribe=_VIEW.subscribe),
}


def roles_for(action: str, subject: str) -> list[str]:
    """Return the roles that may ``publish`` or ``subscribe`` to a subject, ignoring case: the client lowers it."""
    found = subject.lower()
    return [name for name, role in ROLES.items() if any(_covers(one.lower(), found) for one in getattr(role, action))]


def _covers(pattern: str, subject: str) -> bool:
    tokens, parts = pattern.split("."), subject.split(".")
    if tokens[-1] == ">":
        return len(parts) >= len(tokens) and _covers(".".join(tokens[:-1]), ".".join(parts[: len(tokens) - 1]))
    return len(parts) == len(tokens) and all(a in ("*", b) for a, b in zip(tokens, parts, strict=True))


@dataclass(frozen=True)
class ServerConfig:
    teams: Mapping[str, Mapping[str, Sequence[str]]]  # roles of each public nkey, by team
    listen: str  # host and port
    store_dir: Path  # folder of the streams
    certificate: Path | None = None
    certificate_key: Path | None = None
    cluster: Sequence[str] = ()  # hosts of all servers
    cluster_ca: Path | None = None  # authority of the other servers' certificates
    server_name: str | None = None  # a name or ``$VARIABLE``, as is ``advertise``
    advertise: str | None = None  # address for clients, by default the host in the cluster with the server's name
    max_store: str | None = None  # storage limit of each team

    def __str__(self) -> str:
        files = f"cert_file: {_text(self.certificate)}, key_file: {_text(self.certificate_key)}"
        # Certificates are for names: clients that know one server learn the names of the others.
        own = (host for host in self.cluster if self.server_name in (host, host.partition(".")[0]))
        advertise = self.advertise or next(own, None)
        lines = [
            "# Made by 'offloop server nats-config'. To check it: nats-server -t -c FILE",
            # Without quotes, because it may be an environment variable.
            *([f"server_name: {self.server_name}"] if self.server_name else []),
            f"listen: {_text(self.listen)}",
            *([f"client_advertise: {advertise if advertise[0] == '$' else _text(advertise)}"] if advertise else []),
            "jetstream {",
            f"  store_dir: {_text(self.store_dir)}",
            "  # Where a power failure of all servers at once must lose nothing, from nats-server 2.10 on:",
            "  # sync_interval: always",
            "}",
            *([f"tls {{ {files}, timeout: 5 }}"] if self.certificate else []),
            "accounts {",
        ]
        storage = f"{{ max_file: {self.max_store} }}" if self.max_store else "enabled"
        for team, users in self.teams.items():
            lines += [f"  {team} {{", f"    jetstream: {storage}", "    users: ["]
            lines += [*(line for key, roles in users.items() for line in _user(key, roles)), "    ]", "  }"]
        lines.append("}")
        if self.cluster:
            routes = ", ".join(_text(f"nats://{host}:6222") for host in self.cluster)
            lines += [
                "cluster {",
                "  name: offloop",
                '  listen: "0.0.0.0:6222"',
                f"  routes: [{routes}]",
                f"  tls {{ {files}, ca_file: {_text(self.cluster_ca)}, verify: true, timeout: 5 }}",
                "}",
            ]
        return "\n".join([*lines, ""])


def _user(key: str, roles: Sequence[str]) -> list[str]:
    publish = dict.fromkeys(subject for role in roles for subject in ROLES[role].publish)
    subscribe = dict.fromkeys(subject for role in roles for subject in ROLES[role].subscribe)
    return [
        f"      # {', '.join(roles)}",
        f"      {{ nkey: {key}, permissions: {{",
        f"        publish: {_allow(publish)}",
        f"        subscribe: {_allow((f'_INBOX.{key}.>', *subscribe))}",
        "      } }",
    ]


def _text(value: object) -> str:
    return json.dumps(str(value), ensure_ascii=False)


def _allow(subjects: Iterable[str]) -> str:
    return f"{{ allow: [{', '.join(map(_text, subjects))}] }}"
