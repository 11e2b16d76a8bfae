"""What each role may do at NATS servers: the subjects to which it may publish, and those to which it may subscribe.

``offloop server nats-config`` writes them for the operator. What a role lacks is nowhere allowed: there is no general
permission for the API of JetStream, ``$JS.API.>``.
"""

from collections.abc import Iterable
from typing import NamedTuple

from offloop.bus.jetstream import names


class UserPermissions(NamedTuple):
    """Permissions of a user."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


_API = "$JS.API"
_READ_STREAMS = (f"{_API}.STREAM.INFO.*", f"{_API}.STREAM.MSG.GET.*")
_DATA = ("ol.r.>", "ol.w.>", "ol.d.>")
_RUNS = f"$KV.{names.RUNS_BUCKET}.>"

# Readers make nothing in the servers: no stream, no bucket, no consumer.
_VIEW = UserPermissions(
    publish=(*_READ_STREAMS, f"$KV.{names.POSITIONS_BUCKET}.>", "ol.v.>"), subscribe=(*_DATA, _RUNS)
)

ROLES = {
    "publish": UserPermissions(
        publish=(
            f"{_API}.STREAM.CREATE.*",
            f"{_API}.STREAM.UPDATE.*",
            *_READ_STREAMS,
            *_DATA,
            # The inboxes of readers, which cannot be guessed: what they ask for is answered, also much later.
            "_INBOX.>",
            _RUNS,
        ),
        subscribe=("ol.q.>", "ol.v.>", "ol.d.>"),
    ),
    "view": _VIEW,
    "command": UserPermissions(publish=(*_VIEW.publish, "ol.q.>"), subscribe=_VIEW.subscribe),
    "remove": UserPermissions(publish=(*_VIEW.publish, f"{_API}.STREAM.DELETE.*", _RUNS), subscribe=_VIEW.subscribe),
}
"""By name. ``command`` and ``remove`` have what ``view`` has, and more."""


def merged(roles: Iterable[str]) -> UserPermissions:
    """What a user with several roles may do."""
    given = [ROLES[name] for name in roles]
    return UserPermissions(
        tuple(dict.fromkeys(subject for role in given for subject in role.publish)),
        tuple(dict.fromkeys(subject for role in given for subject in role.subscribe)),
    )


def roles_for(action: str, subject: str) -> list[str]:
    """The roles that may do this: ``publish`` or ``subscribe`` to a subject, in which capitals do not count, because
    that is how the client of NATS reports it."""
    found = subject.lower()
    return [name for name, role in ROLES.items() if any(_covers(one.lower(), found) for one in getattr(role, action))]


def _covers(pattern: str, subject: str) -> bool:
    tokens, parts = pattern.split("."), subject.split(".")
    if tokens[-1] == ">":
        return len(parts) >= len(tokens) and _covers(".".join(tokens[:-1]), ".".join(parts[: len(tokens) - 1]))
    return len(parts) == len(tokens) and all(a in ("*", b) for a, b in zip(tokens, parts, strict=True))
