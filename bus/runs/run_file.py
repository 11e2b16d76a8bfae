"""``run.json`` and ``broker.json``: their form, which is checked here and nowhere else."""

import socket
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec

from offloop.bus import processes
from offloop.bus.errors import RunDirectoryError
from offloop.bus.files import plain_name, read_file
from offloop.bus.protocol.order import Gap
from offloop.bus.protocol.run_state import Pause, Reached, SecondsSince1970

RUN_FILE = "run.json"
BROKER_FILE = "broker.json"

MAX_BYTES = 64 << 20
"""Of a file that is read."""
MAX_BYTES_AT_BEGIN = 48 << 20
"""Of ``run.json`` when another attempt begins: the rest is for what is noted until it ends."""
MAX_TEXT = 10_000
"""Characters of an error or a reason that are written."""

_Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_INFO = {"command": list, "config": dict, "versions": dict, "host": str, "cwd": str, "python": str, "git_commit": str}
"""Of what type some values of a trainer's description are. It may have others."""


class Attempt(msgspec.Struct, frozen=True, rename={"number": "attempt"}):
    """One start of a run, from ``run.json``."""

    number: _Number
    recording: Path
    """The file that holds its stream."""
    started: SecondsSince1970
    status: Literal["running", "finished", "failed", "stopped", "lost"]
    ended: SecondsSince1970 | None = None
    """``None`` while it is live, or when its broker was killed."""
    error: str | None = None
    """The error that it failed with."""
    reason: str | None = None
    """Why it was stopped, and by whom."""
    reached: Reached | None = None
    """Its progress, once it has ended and the broker that ended it had seen an event."""
    paused: Pause | None = None
    """Since when it is paused by a command, unless it has resumed."""
    world_size: _Number = 1
    """Number of ranks."""
    local_world_size: _Number = 0
    """Number of ranks that publish here: fewer where other hosts have brokers of their own. In the file 0 is all."""
    gaps: tuple[Gap, ...] = ()
    """Events behind the end of the recording, which could not be written."""
    publishers: tuple[dict[str, Any], ...] = ()
    """The processes that publish: ``rank``, ``pid``, ``started`` (see :func:`offloop.bus.processes.start_time`),
    ``host``, ``publisher_id``."""
    info: dict[str, Any] = {}
    """The trainer's description of itself: command, versions, git commit, host, config."""

    def __post_init__(self) -> None:
        # A description that is wrong in one of its values hides no run.
        info = {name: value for name, value in self.info.items() if isinstance(value, _INFO.get(name, object))}
        msgspec.structs.force_setattr(self, "info", info)
        msgspec.structs.force_setattr(self, "local_world_size", self.local_world_size or self.world_size)

    @property
    def has_publisher(self) -> bool:
        """A process of this machine that publishes it is still there."""
        here = socket.gethostname()
        return any(
            publisher.get("host") == here and processes.is_running(publisher.get("pid"), publisher.get("started"))
            for publisher in self.publishers
        )

    @property
    def is_published_elsewhere(self) -> bool:
        """One of the processes that publish it is on another machine, or in another container."""
        here = socket.gethostname()
        return any(publisher.get("host") != here for publisher in self.publishers)


class RunRecord(msgspec.Struct):
    """``run.json``."""

    name: str
    attempts: tuple[Attempt, ...]
    id: str | None = None


class BrokerRecord(msgspec.Struct):
    """``broker.json``."""

    control_endpoint: str | None = None
    event_feed: str | None = None
    attempt: _Number | None = None


Record = TypeVar("Record")


def read_record(path: Path, directory: int, form: type[Record]) -> Record | None:
    """Reads one of these files in its open directory; ``None`` if it is missing.

    Raises RunDirectoryError: it cannot be read, or has another form."""
    return _read(path, directory, form)[0]


def read_values(path: Path, directory: int, form: type[Record]) -> dict[str, Any] | None:
    """As :func:`read_record`, with all that is in the file: to change it and to write it again."""
    record, content = _read(path, directory, form)
    return None if record is None else msgspec.json.decode(content, type=dict[str, Any])


def _read(path: Path, directory: int, form: type[Record]) -> tuple[Record | None, bytes]:
    def recording(_: type, name: object) -> Path:
        return path.with_name(plain_name(name))

    try:
        content = read_file(path.name, MAX_BYTES, dir_fd=directory)
        return msgspec.json.decode(content, type=form, dec_hook=recording), content
    except FileNotFoundError:
        return None, b""
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be read: {error.strerror}", path=path) from None
    except (ValueError, RecursionError) as error:
        why = "it has too many values within one another" if isinstance(error, RecursionError) else error
        raise RunDirectoryError(f"{path} is damaged: {why}{what_is_left(path.parent)}", path=path) from None


def what_is_left(run: Path) -> str:
    """The end of a message about a run whose ``run.json`` cannot be read."""
    return f"; the recordings beside it can still be read: consumer --replay {run}/recording-1.mcap"
