"""What the bridge of a run, which copies it into NATS JetStream, last said of itself."""

import contextlib
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

import msgspec

from offloop.bus import processes
from offloop.bus.errors import RunDirectoryError
from offloop.bus.processes import start_time
from offloop.bus.run_files import JsonFile


@dataclass
class BridgeStatus:
    """Status of a bridge."""

    servers: str = ""
    """Addresses of the servers."""
    host: str = ""
    pid: int = 0
    started: int | None = None
    """When its process began, see :func:`offloop.bus.processes.start_time`."""
    state: str = "waiting"
    """``connecting``, until servers have answered for the first time; ``copying``; ``waiting`` for servers; ``paused``
    because they have no room; ``done``; ``failed``."""
    reason: str = ""
    """Why it is not connected yet, waits, is paused or has failed."""
    attempt: int = 0
    size: int = 0
    """Bytes of the attempt's recording that can be copied."""
    copied: int = 0
    """Of them, how many are in the stream."""
    lag_events: int = 0
    """Events in the recording and not in the stream."""
    lag_seconds: float = 0.0
    """For how long the oldest of them has been in the recording."""
    resent: int = 0
    """Bytes that the servers had forgotten and were sent again."""
    time: float = 0.0
    """When this was written, in seconds since 1970."""

    @classmethod
    def of_this_process(cls, servers: str, host: str) -> "BridgeStatus":
        """The status of a bridge that begins."""
        return cls(servers, host, os.getpid(), start_time(os.getpid()), "connecting")

    def has_all(self, attempt: int) -> bool:
        """All of a run that has ended with an attempt is in the stream."""
        return self.state == "done" and self.attempt == attempt

    @property
    def has_tried(self) -> bool:
        """It has asked the servers, whether or not they have answered."""
        return self.state != "connecting" or self.reason != ""

    @property
    def is_running(self) -> bool:
        """Its process is there, on this machine."""
        return self.state not in ("done", "failed") and processes.is_running(self.pid, self.started)

    def __str__(self) -> str:
        behind = f"{self.size - self.copied:,} bytes and {self.lag_events:,} events behind"
        lag = f", {behind} ({self.lag_seconds:.1f} s)" if self.size > self.copied else ""
        resent = f", {self.resent:,} bytes sent again" if self.resent else ""
        return f"{self.state}{f' ({self.reason})' if self.reason else ''}, to {self.servers}{lag}{resent}"

    def write(self, path: Path) -> None:
        """Puts it into a run's directory, if that can be written."""
        with contextlib.suppress(RunDirectoryError):
            _BRIDGE.write(path, self)


_BRIDGE = JsonFile("bridge.json", BridgeStatus)


def how_to_send(path: Path, stream: str) -> str:
    """The command that copies the rest of the run in a directory."""
    return f"'offloop server bridge {shlex.quote(str(path))} --stream {shlex.quote(stream)}' sends the rest"


def read_bridge(path: Path) -> BridgeStatus | None:
    """The last status of the bridge of the run in a directory; ``None`` without one, or where it cannot be read."""
    return _BRIDGE.find(path)


def bridge_of(said: object) -> BridgeStatus | None:
    """A bridge's status from the values of its fields by name; ``None`` if these are something else."""
    try:
        return msgspec.convert(said, BridgeStatus)
    except msgspec.ValidationError:
        return None
