"""Restarted trainings: processes of this machine whose run has not begun yet."""

import os
from collections.abc import Iterable

from offloop.bus import processes
from offloop.bus.runs.directory import RunInfo, host_name


def find_restart(run: RunInfo, known: Iterable[RunInfo]) -> int | None:
    """Return the process that runs the script of a run's newest attempt again and has begun no run; else ``None``."""
    info = run.last.info
    command, folder = info.get("command"), info.get("cwd")
    if not (isinstance(command, list) and command and isinstance(folder, str)) or info.get("host") != host_name():
        return None
    # ``python -m`` names a package and executes its ``__main__.py``.
    script = _absolute(folder, str(command[0])).replace("/__main__.py", ".py")
    found = {one.pid: one for one in processes.programs() if one.folder == folder and _script(one) == script}
    published = {publisher.get("pid") for one in known for publisher in one.last.publishers}
    # Forked workers have the command of their parent.
    fresh = (pid for pid, one in found.items() if not {pid, one.parent} & published and one.parent not in found)
    return min(fresh, default=None)


def _script(program: processes.Program) -> str | None:
    """Return the file that a Python process executes, as in ``sys.argv[0]``."""
    arguments = iter(program.command[1:])
    for one in arguments:
        if one == "-m":
            module = next(arguments, "").replace(".", os.sep)
            return _absolute(program.folder, f"{module}.py")
        if one in ("-X", "-W"):
            next(arguments, None)
        elif not one.startswith("-"):
            return _absolute(program.folder, one)
        elif one == "-c":
            return None
    return None


def _absolute(folder: str, path: str) -> str:
    return os.path.normpath(os.path.join(folder, path))
