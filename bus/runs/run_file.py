"""The form of ``run.json`` and ``broker.json``, and its checks."""

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

MAX_BYTES = 64 << 20  # maximum size of a file
MAX_BYTES_AT_BEGIN = 48 << 20  # maximum size of run.json when an attempt begins; the rest is for its ending
MAX_TEXT = 10_000  # maximum characters of an error or a reason

_Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_INFO = {"command": list, "config": dict, "versions": dict, "host": str, "cwd": str, "python": str, "git_commit": str}
"""Types of some values of a trainer's description, which may have others."""


class Attempt(msgspec.Struct, frozen=True, rename={"number": "attempt"}):
    """One start of a run, from ``run.json``."""

    number: _Number
    recording: Path
    """The file with its stream."""
    started: SecondsSince1970
    status: Literal["running", "finished", "failed", "stopped", "lost"]
    ended: SecondsSince1970 | None = None
    """``None`` while it is live, or if its broker was killed."""
    error: str | None = None
    """Error of a failed attempt."""
    reason: str | None = None
    """Reason for stopping it, and by whom."""
    reached: Reached | None = None
    """Progress at its end, if an event was seen."""
    paused: Pause | None = None
    """Start of the current pause by a command."""
    world_size: _Number = 1
    """Number of ranks."""
    local_world_size: _Number = 0
    """Number of ranks that publish here, fewer if other hosts have their own brokers. 0 in the file means all."""
    gaps: tuple[Gap, ...] = ()
    """Events after the end of the recording, which could not be written."""
    publishers: tuple[dict[str, Any], ...] = ()
    """Publishing processes: ``rank``, ``pid``, ``started`` (see :func:`offloop.bus.processes.start_time`), ``host``,
    ``publisher_id``; of actors also ``name`` and ``role``."""
    info: dict[str, Any] = {}
    """The trainer's description of itself: command, versions, git commit, host, config."""

    def __post_init__(self) -> None:
        # One malformed value must not hide the run.
        info = {name: value for name, value in self.info.items() if isinstance(value, _INFO.get(name, object))}
        msgspec.structs.force_setattr(self, "info", info)
        msgspec.structs.force_setattr(self, "local_world_size", self.local_world_size or self.world_size)

    @property
    def has_publisher(self) -> bool:
        """True if a rank's process runs on this machine."""
        here = socket.gethostname()
        return any(
            publisher.get("host") == here
            and "role" not in publisher
            and processes.is_running(publisher.get("pid"), publisher.get("started"))
            for publisher in self.publishers
        )

    @property
    def is_published_elsewhere(self) -> bool:
        """True if a rank's process is on another machine or in another container."""
        here = socket.gethostname()
        return any(publisher.get("host") != here and "role" not in publisher for publisher in self.publishers)


class RunRecord(msgspec.Struct):
    name: str
    attempts: tuple[Attempt, ...]
    id: str | None = None


class BrokerRecord(msgspec.Struct):
    control_endpoint: str | None = None
    event_feed: str | None = None
    attempt: _Number | None = None


Record = TypeVar("Record")


def read_record(path: Path, directory: int, form: type[Record]) -> Record | None:
    """Read a file in an open directory; ``None`` if missing. Raises RunDirectoryError if unreadable or malformed."""
    return _read(path, directory, form)[0]


def read_values(path: Path, directory: int, form: type[Record]) -> dict[str, Any] | None:
    """As :func:`read_record`, but return all values of the file, to change and write them."""
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
        why = "its values are nested too deep" if isinstance(error, RecursionError) else error
        raise RunDirectoryError(f"{path} is damaged: {why}{what_is_left(path.parent)}", path=path) from None


def what_is_left(run: Path) -> str:
    return f"; the recordings beside it can still be read: consumer --replay {run}/recording-1.mcap"
