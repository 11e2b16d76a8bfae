"""Programs that run side by side and share the time for an import.

One process imports a module, which takes seconds, and each program is a fork of it.

``python forked.py MODULE FOLDER`` reads a list ``[[code, environment], ...]`` in JSON from its standard input. What the
first program says on standard error goes to ``FOLDER/said-0.txt``; printed is a list of exit codes."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from brokers import free_address


class Program(NamedTuple):
    """A program to run."""

    code: str
    environment: dict[str, str] | None = None


class Ended(NamedTuple):
    """A program that has ended."""

    exit_code: int
    stderr: str


def run_forked(module: str, folder: Path, programs: Sequence[Program], timeout: float = 220) -> list[Ended]:
    """Run the programs, each in its own process, side by side; ``module`` is what takes long to import in them."""
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, __file__, module, str(folder)],
        input=json.dumps(programs),
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = [(folder / f"said-{number}.txt").read_text() for number in range(len(programs))]
    return [Ended(*ended) for ended in zip(json.loads(done.stdout.splitlines()[-1]), said, strict=True)]


def fill_once(base: Path, name: str, fill: Callable[[Path], object]) -> Path:
    """Return a folder that the first of all processes that run the tests has filled.

    Args:
        base: the folder of temporary files of this process.
    """
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.with_suffix(".filled").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            fill(folder)
            folder.with_suffix(".filled").touch()
    return folder


def run_ranks(module: str, folder: Path, code: str, ranks: int = 2) -> list[Ended]:
    """Run a program on each rank of one training."""
    port = free_address().rpartition(":")[2]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    return run_forked(module, folder, [Program(code, {**shared, "RANK": str(rank)}) for rank in range(ranks)])


def main() -> None:
    """Import the module and runs the programs, whose processes return from here."""
    import_module(sys.argv[1])
    if "torch" in sys.modules:
        import_module("torch._dynamo")  # of every optimizer's first step; takes as long as torch itself
    pids = []
    for number, (code, environment) in enumerate(json.load(sys.stdin)):
        pid = os.fork()
        if pid == 0:
            os.environ |= environment or {}
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(os.open(Path(sys.argv[2], f"said-{number}.txt"), os.O_CREAT | os.O_WRONLY), 2)
            exec(compile(code, "<program>", "exec"), {"__name__": "__main__"})
            return
        pids.append(pid)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]))


if __name__ == "__main__":
    main()
