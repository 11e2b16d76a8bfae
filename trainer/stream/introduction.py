"""How a training introduces itself: which run it is, where it is recorded, how to watch it."""

import shlex
from pathlib import Path


def introduction(
    run: str,
    attempt: int | None,
    resumed_from: Path | None,
    recording: Path | None,
    runs_dir: object,
    broker: str | None,
) -> str:
    """The line for people, with what was given as ``runs_dir`` and ``broker``."""
    where = _where_to_watch(None if recording is None else short_path(recording), runs_dir, broker, run)
    return f"run {run}{_which_attempt(attempt, resumed_from)}: {where}"


def short_path(path: Path) -> str:
    """The path as people would write it in the current folder."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _which_attempt(attempt: int | None, resumed_from: Path | None) -> str:
    """What tells a run that was begun before from a new one."""
    if resumed_from is not None:
        begin = f"going on from {resumed_from.name}"
    elif attempt is not None and attempt > 1:
        begin = "from the beginning"
    else:
        return ""
    return f", attempt {attempt}, {begin}" if attempt is not None else f", {begin}"


def _where_to_watch(recording: str | None, runs_dir: object, broker: str | None, run: str) -> str:
    if recording is None:
        return "no stream, so there is nothing to watch or record"
    if broker:
        watch = f"consumer --broker {broker} --run {run} --callbacks speed,lr"
        return f"recorded by the broker at {broker}, there in {recording}; watch it with: {watch}"
    where = f" --runs-dir {shlex.quote(str(runs_dir))}" if runs_dir else ""
    return f"recording to {recording}; watch it with: consumer --callbacks speed,lr{where}"
