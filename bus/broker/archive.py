"""What a broker gives to consumers that cannot see its disk: which runs there are, and ranges of their recordings."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offloop.bus.broker.content import integer, integer_or_none, text
from offloop.bus.errors import InvalidRunNameError, RecordingError
from offloop.bus.files import open_directory, open_file
from offloop.bus.protocol.frames import MAX_RANGE, check_run_name
from offloop.bus.runs.directory import RUN_FILE, RunInfo, list_runs, read_run
from offloop.bus.runs.listing import describe_run
from offloop.bus.types.timeouts import Timeouts

MAX_OFFSET = 1 << 62
MAX_LISTED = 1000


class Archive:
    """The runs in one runs directory, read-only."""

    def __init__(self, runs_dir: Path, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._root = runs_dir
        self._listed: list[RunInfo] = []
        self._list_again = 0.0
        self._live: frozenset[str] = frozenset()

    def listing(self, name: str | None, live: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The runs, the newest first and at most :data:`MAX_LISTED`; with ``name`` that one, if it is there. ``live``
        holds of each run that is served here its ``attempt`` and the address of its ``event_feed``."""
        if name is None:
            runs = self._all(frozenset(live))
        else:
            path = self._root / check_run_name(name)
            runs = [read_run(path)] if (path / RUN_FILE).is_file() else []
        return [describe_run(run, live.get(run.name, {})) for run in runs]

    def _all(self, live: frozenset[str]) -> list[RunInfo]:
        # Frequent requests must not keep the broker busy with reading; but a run that began since is listed at once.
        now = time.monotonic()
        if now >= self._list_again or not live <= self._live:
            self._live = live
            self._listed = list(filter(_can_be_requested, list_runs(self._root)))[:MAX_LISTED]
            self._list_again = time.monotonic() + max(self._timeouts.list_runs, 10 * (time.monotonic() - now))
        return self._listed

    def read(self, requested: Mapping[str, Any]) -> dict[str, Any]:
        """A range of a recording: ``run``, ``attempt``, ``offset``, and ``data``, at most :data:`MAX_RANGE` bytes from
        there and fewer, or none, where the file ends.

        Raises:
            RecordingError: there is no such recording.
            ProtocolError: the request is malformed.
        """
        name, attempt = check_run_name(text(requested, "run")), integer(requested, "attempt", 1)
        offset = integer(requested, "offset", 0, MAX_OFFSET)
        size = min(integer_or_none(requested, "size") or MAX_RANGE, MAX_RANGE)
        try:
            # A client is given nothing to which a link leads that was put there.
            directory = open_directory(self._root / name)
            try:
                descriptor = open_file(f"recording-{attempt}.mcap", dir_fd=directory)
            finally:
                os.close(directory)
            try:
                data = os.pread(descriptor, max(0, size), offset)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise RecordingError(
                f"the broker has no recording of attempt {attempt} of run {name!r} ({error.strerror})"
            ) from None
        return {"run": name, "attempt": attempt, "offset": offset, "data": data}


def _can_be_requested(run: RunInfo) -> bool:
    """Whether its directory has not been renamed to something that a run's name cannot be."""
    try:
        check_run_name(run.name)
    except InvalidRunNameError:
        return False
    return True
