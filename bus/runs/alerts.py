"""What consumers alert about, in a file in the run's directory, so that whatever shows the run can show it."""

import contextlib
import fcntl
import json
import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

import msgspec

from offloop.bus.files import check_owner, open_directory, open_file
from offloop.bus.protocol.listed_runs import SecondsSince1970
from offloop.bus.strict_json import plain

_log = logging.getLogger("offloop")

ALERTS_FILE = "alerts.jsonl"
MOST = 1000
"""So many alerts of a run are shown, the newest."""
_LONGEST = 1000
_MAX_BYTES = 1 << 20

FIRING: Final = "firing"
RESOLVED: Final = "resolved"


AlertStatus: TypeAlias = Literal["firing", "resolved"]


@dataclass(frozen=True)
class RunAlert:
    """A fault, or its end."""

    id: str
    """The same whenever the same events are handled."""
    status: AlertStatus
    about: str
    """Its subject, such as a rule and a metric: the same when it is resolved."""
    text: str
    """For people."""
    time: SecondsSince1970
    attempt: int
    batch: int


def note_alert(run: Path, alert: RunAlert) -> None:
    """Adds an alert to those of a run; what cannot be written is named in the log, and so is what is too much."""
    line = json.dumps(plain(asdict(alert) | {"text": alert.text[:_LONGEST], "about": alert.about[:_LONGEST]}))
    try:
        directory = open_directory(run)
        try:
            check_owner(directory)
            fcntl.flock(directory, fcntl.LOCK_EX)
            descriptor = open_file(ALERTS_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, dir_fd=directory)
            with open(descriptor, "ab") as file:
                if file.tell() + len(line) < _MAX_BYTES:
                    file.write(f"{line}\n".encode())
                else:
                    _log.info("%s is full: an alert is left out", run / ALERTS_FILE)
        finally:
            os.close(directory)
    except OSError as error:
        _log.info("%s cannot be written: %s", run / ALERTS_FILE, error.strerror or error)


def read_alerts(run: Path) -> list[RunAlert]:
    """The alerts of a run, the oldest first, each once; lines that are something else are left out."""
    try:
        with open(open_file(run / ALERTS_FILE), "rb") as file:
            lines = file.read(_MAX_BYTES).splitlines()
    except OSError:
        return []
    found: dict[str, RunAlert] = {}
    for line in lines:
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            alert = msgspec.json.decode(line, type=RunAlert)
            found.setdefault(alert.id, alert)
    return sorted(found.values(), key=lambda one: one.time)[-MOST:]


def firing(alerts: list[RunAlert]) -> list[RunAlert]:
    """The unresolved alerts, in the given order."""
    open_ones: dict[tuple[int, str], RunAlert] = {}
    for alert in alerts:
        open_ones.pop((alert.attempt, alert.about), None)
        if alert.status == FIRING:
            open_ones[alert.attempt, alert.about] = alert
    return list(open_ones.values())
