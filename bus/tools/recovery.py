"""A clean recording from a damaged one, or from one that was cut off."""

import os
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from offloop.bus.errors import ConfigurationError, RunDirectoryError
from offloop.bus.files import atomic_output
from offloop.bus.recording.source import RecordSource, is_mark
from offloop.bus.recording.writer import RecordingWriter
from offloop.bus.runs.directory import is_locked, read_run
from offloop.bus.tools.cut import append
from offloop.bus.tools.written import Written


@dataclass(frozen=True, kw_only=True)
class Recovery(Written):
    """What :func:`recover` wrote."""

    records: int
    """Events and marks in it."""


def recover(path: Path, output: Path) -> Recovery:
    """Writes everything that is whole in the recording ``path`` to ``output``, in order, with index and footer. The
    original is never changed.

    Raises:
        ConfigurationError: ``output`` exists, or the recording is that of a live run.
        RecordingError: ``path`` is not a recording, or nothing in it says of which run it is.
        RunDirectoryError: ``output`` cannot be written.
    """
    if os.path.lexists(output):
        raise ConfigurationError(f"{output} exists: choose another file with '--output', or move it away")
    source = RecordSource(path)
    if _is_live(path):
        raise ConfigurationError(f"{path} is being written by a live run: wait until the run has ended")
    events = records = 0
    with (
        atomic_output(output, [path]) as draft,
        closing(RecordingWriter(draft, source.run, source.attempt, source.run_id)) as writer,
    ):
        for record in source:
            append(writer, [record])
            records += 1
            events += not is_mark(record)
    return Recovery(path=output, events=events, records=records, **source.found())


def _is_live(path: Path) -> bool:
    folder = path.absolute().parent
    if not is_locked(folder):
        return False
    try:
        return read_run(folder).recording.name == path.name
    except RunDirectoryError:
        return True
