"""Description of a run in ``run.json``: the user's info and the publishing program."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any, TypeAlias

from offloop.bus import processes
from offloop.bus.errors import ConfigurationError
from offloop.bus.protocol.frames import MAX_HELLO, encode_control, unsendable
from offloop.bus.redaction import redact
from offloop.bus.runs.directory import host_name
from offloop.bus.types.source import check_unavailable

Info: TypeAlias = Mapping[str, Any] | Callable[[str], Mapping[str, Any]]
"""A user's description of a run, or a function of the run's name that returns it."""

_GIT_SECONDS = 2.0
_MAX_INFO = MAX_HELLO - (1 << 16)
_PACKAGES = ("offloop", "torch", "torchmetrics", "numpy", "pyzmq", "msgpack", "mcap")


def describer(info: Info) -> Callable[[str], dict[str, Any]]:
    """Return a function from a run's name to its description, which raises ConfigurationError for unusable info."""
    process_info = describe_process()

    def describe(name: str) -> dict[str, Any]:
        more = redact(info(name) if callable(info) else info)
        check_unavailable(more.get("unavailable", {}))
        described = {**process_info, **more}
        try:
            size = len(encode_control("hello", {"info": described}))
        except (TypeError, ValueError, OverflowError) as error:
            named = unsendable(described) or "a name"
            raise ConfigurationError(
                f"{named} of the run's description cannot be stored ({error}): use numbers, text, lists, maps, None"
            ) from None
        if size > _MAX_INFO:
            raise ConfigurationError(
                f"the run's info has {size:,} bytes, and {_MAX_INFO:,} are allowed: leave "
                "the largest values out of info (of a training, config)"
            )
        return described

    return describe


def describe_process() -> dict[str, Any]:
    """Return command, folder, host, versions and git commit of this process without secrets; ``None`` if unknown."""
    commit = _git("rev-parse", "HEAD")
    changes = None if commit is None else _git("status", "--porcelain", "--untracked-files=no")
    return {
        "command": [_readable(argument) for argument in redact(sys.argv)],
        "cwd": _readable(redact(processes.current_folder())),
        "host": host_name(),
        "pid": os.getpid(),
        "launch": processes.launch(),
        "python": sys.version.split()[0],
        "versions": {name: version for name in _PACKAGES if (version := _version(name))},
        "git_commit": commit,
        "git_dirty": None if changes is None else bool(changes),
    }


def _readable(name: str) -> str:
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    # Without the lock git status does not write the index, and so does not wait for other processes.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, timeout=_GIT_SECONDS, check=True, env=environment
        )
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return done.stdout.strip()
