"""Brokers that stand alone, for tests."""

import random
import socket
import subprocess
import sys

_given: set[int] = set()
"""Of which some may not be in use yet."""


def free_address() -> str:
    """An address at which nobody listens, and at the next port neither."""
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


def start_broker(address: str, *arguments: str) -> "subprocess.Popen[str]":
    """The command ``offloop server broker`` at an address, once it serves."""
    process = subprocess.Popen(
        [sys.executable, "-m", "offloop.bus", "server", "broker", "--listen", address, *arguments],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None  # it is a pipe
    assert "serving at" in process.stdout.readline()
    return process
