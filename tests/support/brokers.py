"""Brokers without a publisher, for tests."""

import json
import random
import socket
import subprocess
import sys
from pathlib import Path

from offloop.bus.runs.directory import SOCKET_FILES
from offloop.bus.runs.writing import socket_address

_given: set[int] = set()
"""Of which some may not be in use yet."""


def free_address() -> str:
    """Return an address that is free, with a free port after it."""
    while True:
        # Below the ports that the system gives to connections, which would take one between this look and its use.
        # Tests that run beside this one begin with the same random numbers.
        port = random.SystemRandom().randrange(15_000, 32_000, 2)
        if port in _given:
            continue
        with socket.socket() as control, socket.socket() as stream:
            try:
                control.bind(("127.0.0.1", port))
                stream.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            _given.add(port)
            return f"tcp://127.0.0.1:{port}"


def start_broker(runs_dir: Path, run: str = "r", how: str = "begin") -> "subprocess.Popen[str]":
    """Start the broker of a run without a publisher; publishers join it as further ranks do."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "offloop.bus.broker", how, str(runs_dir), run], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None  # it is a pipe
    answer = json.loads(process.stdout.readline())
    assert "ready" in answer, answer
    return process


def address_of(runs_dir: Path, run: str = "r") -> str:
    """Return the address of the broker of a run."""
    return socket_address(runs_dir.absolute() / run / SOCKET_FILES[0])


def broker_pid(run_dir: Path) -> int:
    """Return the process that serves a run."""
    return int(json.loads((run_dir / "broker.json").read_text())["pid"])
