"""A consumer that writes a trace."""

from pathlib import Path
from typing import Any

from offloop.bus.recording.recording import Recording
from offloop.consumers import Callback
from offloop.consumers.callbacks.trace import Trace
from offloop.consumers.runner.runner import RunnerStatistics
from offloop.consumers.runner.session import run_session
from offloop.consumers.runner.state_file import StateFile


def consume(path: Path, *others: Callback, name: str | None = None, **options: Any) -> RunnerStatistics:
    """A consumer that draws a recording."""
    recording = Recording(path)
    state = None if name is None else StateFile(path, name, recording.run_name, recording.attempt)
    callbacks = [Trace(**options), *others]
    return run_session(lambda _, __: Recording(path), callbacks, [], open_progress=state, commit_every=3)[1]
