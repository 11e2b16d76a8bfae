"""A real NATS server with JetStream, which tests kill, stop and start again."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

from helpers import wait_for

from bus.jetstream.connection import NatsServers

BESIDE_PYTHON = Path(sys.executable).with_name("nats-server")
DEBIANS = Path("/usr/sbin/nats-server")


class NatsServer:
    """A server with a store of its own, at a port of its own."""

    def __init__(self, folder, program=BESIDE_PYTHON, options=""):
        self.store = folder / "store"
        self._folder = folder
        self._program = program
        self._options = options
        self._process = None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.address = f"nats://127.0.0.1:{self.port}"
        self.servers = NatsServers.parse(self.address)
        self.start()

    def start(self):
        """Starts it, again at the same port and with the same store."""
        config = self._folder / "server.conf"
        config.write_text(
            f'listen: "127.0.0.1:{self.port}"\njetstream {{ store_dir: "{self.store}" }}\n{self._options}\n'
        )
        with open(self._folder / "server.log", "a") as log:
            self._process = subprocess.Popen([self._program, "-c", config], stdout=log, stderr=log)
        wait_for(self._answers, "the NATS server")

    def _answers(self):
        assert self._process.poll() is None, (self._folder / "server.log").read_text()
        with socket.socket() as there:
            return there.connect_ex(("127.0.0.1", self.port)) == 0

    def kill(self):
        """As a power failure would, but for what the system has."""
        self._process.kill()
        self._process.wait()

    def signal(self, number):
        """Stops it with ``SIGSTOP``, or lets it go on."""
        os.kill(self._process.pid, number)

    def set_back(self, to):
        """Kills it and gives it an older copy of its store."""
        self.kill()
        shutil.rmtree(self.store)
        shutil.copytree(to, self.store)
        self.start()

    def copy_store(self, to):
        """A copy of its store, made while it stands still."""
        self.signal(signal.SIGSTOP)
        shutil.copytree(self.store, to)
        self.signal(signal.SIGCONT)
        return to
