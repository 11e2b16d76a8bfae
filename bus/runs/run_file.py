"""``run.json`` and ``broker.json``: their form, which is checked here and nowhere else."""

from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec

from offloop.bus.files import plain_name, read_file
from offloop.bus.protocol.listed_runs import SecondsSince1970

RUN_FILE = "run.json"
BROKER_FILE = "broker.json"

MAX_BYTES = 64 << 20
"""Of a file that is read."""
MAX_BYTES_AT_BEGIN = 48 << 20
"""Of ``run.json`` when another attempt begins: the rest is for what is noted until it ends."""
MAX_TEXT = 10_000
"""Characters of an error or a reason that are written."""

_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_INFO = {"command": list, "config": dict, "versions": dict, "host": str, "cwd": str, "python": str, "git_commit": str}
"""Of what type some values of a trainer's description are. It may have others."""


class ReachedRecord(msgspec.Struct):
    """Progress of an attempt."""

    epoch: _Count
    batch: _Count
    sample: _Count
    planned: str | None = None


class PausedRecord(msgspec.Struct):
    """Since when an attempt is paused."""

    since: SecondsSince1970
    batch: _Count


class GapRecord(msgspec.Struct):
    """Events of a rank that the recording lacks."""

    rank: _Count
    first: _Count
    last: _Count


class AttemptRecord(msgspec.Struct):
    """One start of a run."""

    attempt: _Number
    recording: str
    started: SecondsSince1970
    status: Literal["running", "finished", "failed", "stopped", "lost"]
    ended: SecondsSince1970 | None = None
    error: str | None = None
    reason: str | None = None
    reached: ReachedRecord | None = None
    paused: PausedRecord | None = None
    world_size: _Number = 1
    local_world_size: _Number | None = None
    gaps: list[GapRecord] = []
    publishers: list[dict[str, Any]] = []
    info: dict[str, Any] = {}

    def __post_init__(self) -> None:
        plain_name(self.recording)
        # A description that is wrong in one of its values hides no run.
        self.info = {name: value for name, value in self.info.items() if isinstance(value, _INFO.get(name, object))}


class RunRecord(msgspec.Struct):
    """``run.json``."""

    name: str
    attempts: list[AttemptRecord]
    id: str | None = None


class BrokerRecord(msgspec.Struct):
    """``broker.json``."""

    control_endpoint: str | None = None
    event_feed: str | None = None
    attempt: _Number | None = None


Record = TypeVar("Record")


def read_record(name: str, directory: int, form: type[Record]) -> Record | None:
    """Reads one of these files in an open directory; ``None`` if it is missing.

    Raises:
        OSError: it cannot be read.
        ValueError: it has another form.
    """
    content = _read(name, directory)
    return None if content is None else _decode(content, form)


def read_values(name: str, directory: int, form: type[Record]) -> dict[str, Any] | None:
    """As :func:`read_record`, with all that is in the file: to change it and to write it again."""
    content = _read(name, directory)
    if content is None:
        return None
    _decode(content, form)
    values: dict[str, Any] = msgspec.json.decode(content)
    return values


def _read(name: str, directory: int) -> bytes | None:
    try:
        return read_file(name, MAX_BYTES, dir_fd=directory)
    except FileNotFoundError:
        return None


def _decode(content: bytes, form: type[Record]) -> Record:
    try:
        return msgspec.json.decode(content, type=form)
    except RecursionError:
        raise ValueError("it has too many values within one another") from None
