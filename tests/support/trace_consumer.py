"""A consumer that writes a trace."""

from pathlib import Path
from typing import Any

from bus.recording.recording import Recording
from consumers import Callback
from consumers.callbacks.trace import Trace
from consumers.runner.runner import RunnerStatistics
from consumers.runner.session import run_session
from consumers.runner.state_file import StateFile


def consume(path: Path, *others: Callback, name: str | None = None, **options: Any) -> RunnerStatistics:
    """A consumer that draws a recording."""
    recording = Recording(path)
    state = None if name is None else StateFile(path, name, recording.run_name, recording.attempt)
    callbacks = [Trace(**options), *others]
    return run_session(lambda _, __: Recording(path), callbacks, [], open_progress=state, commit_every=3)[1]
