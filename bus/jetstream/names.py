"""Names in NATS: streams, subjects, keys and headers, listed in ``docs/cluster.md``."""

import re

from offloop.bus.protocol.frames import check_run_name

RUNS_BUCKET = "ol_runs"  # key-value bucket with the entries of runs

OFFSET = "Ol-Offset"  # header: offset of the range of a recording in the message
BRIDGE = "Ol-Bridge"  # header: identity of the bridge that sent the message
RUN_ID = "Ol-Run-Id"  # header: identity of the run, if it has one
RUN_ID_METADATA = "offloop-run-id"  # metadata of a stream: identity of the run
FINAL = "Ol-Final"
"""Header of bytes after the last check record: the end of a closed file, which another broker may cut off."""

ROLE_SUBJECT = "ol.q.role"
"""Publishing here requires the permission to command: a reader tries it once to learn its role."""

_PLAIN = re.compile(r"[A-Za-z0-9_]{1,64}")
_SPECIAL = re.compile(r"[^A-Za-z0-9_-]")


def token(text: str) -> str:
    """Escape points, spaces and wildcards, so that a text is one token of a subject."""
    return _SPECIAL.sub(lambda found: "".join(f"={byte:02x}" for byte in found[0].encode()), text)


def stream_of(run: str) -> str:
    return f"ol_{token(check_run_name(run))}"


def windows_stream_of(run: str) -> str:
    return f"olw_{token(check_run_name(run))}"


def recording_subject(run: str, attempt: int | str = "*", host: str = "*") -> str:
    """Return the subject of a host's recording, by default of all recordings of a run."""
    return _subject("r", run, attempt, host)


def windows_subject(run: str, attempt: int | str = "*", host: str = "*") -> str:
    """Return the subject of a host's windows, by default of all windows of a run."""
    return _subject("w", run, attempt, host)


def _subject(kind: str, run: str, attempt: int | str, host: str) -> str:
    return f"ol.{kind}.{token(run)}.{attempt}.{host if host == '*' else token(host)}"


def request_subject(run: str, kind: str, *, may_command: bool = True) -> str:
    """Return the subject of control messages to a run. It depends on the permissions that servers give the sender."""
    return f"ol.{'q' if may_command else 'v'}.{token(run)}.{kind}"


def key(*parts: str | int) -> str:
    """Return a key: (run, attempt, host) of an entry."""
    return ".".join(token(str(part)) for part in parts)


def reply_subject(inbox: str, kind: str, asked: str | None) -> str:
    """Return the subject of a request's answer. It names the request, for refusals by servers without a bridge."""
    return f"{inbox}.{kind}.{asked if asked is not None and _PLAIN.fullmatch(asked) else '-'}"


def split_reply(reply: str) -> tuple[str, str | None]:
    inbox, _, asked = reply.rsplit(".", 2)
    return inbox, None if asked == "-" else asked


def is_request(subject: str, sent_to: str, reply: str) -> bool:
    """Return whether a message was published to a subject, by a reader with its own inbox for the answer.

    Servers deliver stored messages to any subject that a reader names, whatever its permissions; such a message keeps
    its subject in the stream. A reader may also name any subject for an answer, even one that only hosts may write."""
    return sent_to == subject and reply.startswith("_INBOX.")
