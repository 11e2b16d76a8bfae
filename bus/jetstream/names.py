"""Names in NATS: streams, subjects, keys and headers. ``docs/cluster.md`` has the table."""

import re

from offloop.bus.protocol.frames import check_run_name

RUNS_BUCKET = "ol_runs"
"""The key-value bucket with what is known of each run."""

POSITIONS_BUCKET = "ol_pos"
"""The key-value bucket in which named consumers keep how far they are."""

OFFSET = "Ol-Offset"
"""Header of a message with a range of a recording: where the range begins."""
BRIDGE = "Ol-Bridge"
"""Header with the identity of the bridge that sent it."""
RUN_ID = "Ol-Run-Id"
"""Header with the identity of the run, where it has one."""
RUN_ID_METADATA = "offloop-run-id"
"""Key of a stream's metadata with the identity of the run."""
FINAL = "Ol-Final"
"""Header of what follows the last check record: the end of a closed file, which another broker may cut off."""

ROLE_SUBJECT = "ol.q.role"
"""To publish here takes the permission to command: a reader tries once, and so learns its own role."""

_PLAIN = re.compile(r"[A-Za-z0-9_]{1,64}")
_SPECIAL = re.compile(r"[^A-Za-z0-9_-]")


def token(text: str) -> str:
    """A text as one token of a subject, in which points, spaces and wildcards mean something else."""
    return _SPECIAL.sub(lambda found: "".join(f"={byte:02x}" for byte in found[0].encode()), text)


def stream_of(run: str) -> str:
    """The stream that holds a run."""
    return f"ol_{token(check_run_name(run))}"


def windows_stream_of(run: str) -> str:
    """The stream that holds the windows of a run's hosts."""
    return f"olw_{token(check_run_name(run))}"


def recording_subject(run: str, attempt: int | str = "*", host: str = "*") -> str:
    """The subject of a host's recording; by default of all recordings of a run."""
    return _subject("r", run, attempt, host)


def windows_subject(run: str, attempt: int | str = "*", host: str = "*") -> str:
    """The subject of a host's windows; by default of all windows of a run."""
    return _subject("w", run, attempt, host)


def _subject(kind: str, run: str, attempt: int | str, host: str) -> str:
    return f"ol.{kind}.{token(run)}.{attempt}.{host if host == '*' else token(host)}"


def request_subject(run: str, kind: str, host: str | None = None, *, may_command: bool = True) -> str:
    """Where a host takes control messages, by default that of the run's first rank: those of readers who may command,
    and beside them those of readers who may only view. By that subject the servers' permissions prove the role."""
    subject = f"ol.{'q' if may_command else 'v'}.{token(run)}.{kind}"
    return subject if host is None else f"{subject}.{token(host)}"


def dump_subject(run: str) -> str:
    """Where a host says that it writes its flight recorder: all others do, too."""
    return f"ol.d.{token(run)}"


def key(*parts: str | int) -> str:
    """A key: of what a host says of an attempt (run, attempt, host), of who works under a consumer's name (run, name),
    and of how far it is in an attempt (run, name, attempt)."""
    return ".".join(token(str(part)) for part in parts)


def reply_subject(inbox: str, kind: str, asked: str | None) -> str:
    """Where the answer to a request goes: it says which request that is where servers answer in a bridge's place."""
    return f"{inbox}.{kind}.{asked if asked is not None and _PLAIN.fullmatch(asked) else '-'}"


def split_reply(reply: str) -> tuple[str, str | None]:
    """The inbox of a :func:`reply_subject`, and the identity of the request."""
    inbox, _, asked = reply.rsplit(".", 2)
    return inbox, None if asked == "-" else asked


def is_request(subject: str, sent_to: str, reply: str) -> bool:
    """Whether a message was sent to a subject, and by a reader who takes the answer in its own inbox.

    Servers deliver what a reader requests of a stream to any subject that it names, whatever its permissions: such a
    message keeps the subject that it has in the stream. And a reader may name any subject for an answer, also one to
    which only hosts may write."""
    return sent_to == subject and reply.startswith("_INBOX.")
