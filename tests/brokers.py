"""Brokers that stand alone, for tests."""

import socket
import subprocess
import sys

__all__ = ["free_address", "start_broker"]


def free_address() -> str:
    """An address at which nobody listens, and the next port most likely neither."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def start_broker(address: str, *arguments: str) -> "subprocess.Popen[str]":
    """The command ``bus broker`` at an address, once it serves."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bus", "broker", "--listen", address, *arguments], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None  # it is a pipe
    process.stdout.readline()
    return process
