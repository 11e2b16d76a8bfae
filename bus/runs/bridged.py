"""The status of the bridge that copies a run into NATS JetStream."""

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
    servers: str = ""
    host: str = ""
    pid: int = 0
    started: int | None = None  # start of its process, see start_time()
    state: str = "waiting"
    """``connecting`` until servers answer; ``copying``; ``waiting`` for servers; ``paused`` because they are full;
    ``done``; ``failed``."""
    reason: str = ""  # reason for not copying
    attempt: int = 0
    size: int = 0  # bytes of the recording that can be copied
    copied: int = 0  # bytes in the stream
    resent: int = 0  # bytes sent again because the servers lost them
    time: float = 0.0

    @classmethod
    def of_this_process(cls, servers: str, host: str) -> "BridgeStatus":
        return cls(servers, host, os.getpid(), start_time(os.getpid()), "connecting")

    @property
    def lag(self) -> int:
        """Bytes of the recording that are not in the stream."""
        return self.size - self.copied

    def has_all(self, attempt: int) -> bool:
        """Return whether all of a run that ended with that attempt is in the stream."""
        return self.state == "done" and self.attempt == attempt

    @property
    def has_tried(self) -> bool:
        """True if it has contacted the servers, answered or not."""
        return self.state != "connecting" or self.reason != ""

    @property
    def is_running(self) -> bool:
        return self.state not in ("done", "failed") and processes.is_running(self.pid, self.started)

    def __str__(self) -> str:
        lag = f", {self.lag:,} bytes behind" if self.lag > 0 else ""
        resent = f", {self.resent:,} bytes sent again" if self.resent else ""
        return f"{self.state}{f' ({self.reason})' if self.reason else ''}, to {self.servers}{lag}{resent}"

    def write(self, path: Path) -> None:
        with contextlib.suppress(RunDirectoryError):
            _BRIDGE.write(path, self)


_BRIDGE = JsonFile("bridge.json", BridgeStatus)


def how_to_send(path: Path, stream: str) -> str:
    return f"'offloop server bridge {shlex.quote(str(path))} --stream {shlex.quote(stream)}' sends the rest"


def read_bridge(path: Path) -> BridgeStatus | None:
    return _BRIDGE.find(path)


def bridge_of(said: object) -> BridgeStatus | None:
    try:
        return msgspec.convert(said, BridgeStatus)
    except msgspec.ValidationError:
        return None
