"""What things are called in NATS: streams, subjects, keys and headers. ``docs/cluster.md`` has the table."""

import re

from bus.protocol.frames import check_run_name

RUNS_BUCKET = "ol_runs"
"""The key-value bucket with what is known of each run."""

OFFSET = "Ol-Offset"
"""Header of a message with a range of a recording: where the range begins."""
BRIDGE = "Ol-Bridge"
"""Header with the identity of the bridge that sent it."""
RUN_ID = "Ol-Run-Id"
"""Header with the identity of the run, where it has one."""
FINAL = "Ol-Final"
"""Header of what follows the last check record: the end of a closed file, which another broker may cut off."""

_SPECIAL = re.compile(r"[^A-Za-z0-9_-]")


def token(text: str) -> str:
    """A text as one token of a subject, in which points, spaces and wildcards mean something else."""
    return _SPECIAL.sub(lambda found: "".join(f"={byte:02x}" for byte in found[0].encode()), text)


def stream_of(run: str) -> str:
    """The stream that holds a run."""
    return f"ol_{token(check_run_name(run))}"


def recording_subject(run: str, attempt: int | str, host: str) -> str:
    """The subject of a host's recording."""
    return f"ol.r.{token(run)}.{attempt}.{token(host) if host != '*' else host}"


def all_recordings(run: str) -> str:
    """The subjects of all recordings of a run."""
    return f"ol.r.{token(run)}.*.*"


def request_subject(run: str, kind: str) -> str:
    """Where the host of a run's first rank takes control messages: one subject for each kind, by which rights are
    given."""
    return f"ol.q.{token(run)}.{kind}"


def run_key(run: str, attempt: int, host: str) -> str:
    """The key of what a host says of an attempt."""
    return f"{token(run)}.{attempt}.{token(host)}"
