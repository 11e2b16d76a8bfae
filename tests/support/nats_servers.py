"""Real NATS servers with JetStream, one or a cluster, which tests kill, stop and start again."""

import asyncio
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import nats
from brokers import free_address
from helpers import wait_for
from paths import FOLDERS

from offloop.bus import RunNotFoundError, Subscriber
from offloop.bus.jetstream.connection import NatsServers
from offloop.bus.processes import is_running
from offloop.bus.runs.bridged import read_bridge

BESIDE_PYTHON = Path(sys.executable).with_name("nats-server")
DEBIANS = FOLDERS["nats-server"]


def wait_for_copy(run_dir, attempt=1):
    """Wait until the bridge of a run says that all up to an attempt is there, and has ended."""

    def is_copied():
        bridge = read_bridge(run_dir)
        is_whole = bridge is not None and (bridge.state, bridge.attempt) == ("done", attempt)
        return is_whole and not is_running(bridge.pid, bridge.started)

    wait_for(is_copied, f"the copy of {run_dir.name}")


def attach(server, run, **options):
    """Return a subscriber, as soon as the run's host has reported it to the server."""

    def there():
        try:
            return Subscriber(run, stream=server.address, **options)
        except RunNotFoundError:
            return None

    return wait_for(there, "the run in the stream")


class NatsServer:
    """A server with a store of its own, at a port of its own."""

    def __init__(self, folder, program=BESIDE_PYTHON, options="", start=True, config=None, host="127.0.0.1"):
        """``config`` makes all of its configuration from itself, instead of what is by default."""
        assert program.exists(), (
            f"{program} is not there: {'apt-get install nats-server' if program == DEBIANS else 'make setup'}"
        )
        self.store = folder / "store"
        self._folder = folder
        self._program = program
        self._options = options
        self._config = config
        self._host = host
        self._process = None
        self.port = port_of(free_address())
        self.address = f"nats://{host}:{self.port}"
        self.servers = NatsServers.parse(self.address)
        if start:
            self.start()

    def start(self, wait=True):
        """Start it, again at the same port and with the same store."""
        with open(self._folder / "server.log", "a") as log:
            self._process = subprocess.Popen([self._program, "-c", self._write_config()], stdout=log, stderr=log)
        if wait:
            wait_for(self._answers, "the NATS server")

    def _write_config(self):
        file = self._folder / "server.conf"
        text = f'listen: "{self._host}:{self.port}"\njetstream {{ store_dir: "{self.store}" }}\n{self._options}\n'
        file.write_text(text if self._config is None else self._config(self))
        return file

    def reload(self):
        """Has it read its configuration again, as it is now."""
        self._write_config()
        self.signal(signal.SIGHUP)

    @property
    def is_running(self):
        """Whether its process is there."""
        return self._process is not None and self._process.poll() is None

    def _answers(self):
        assert self.is_running, (self._folder / "server.log").read_text()
        with socket.socket() as there:
            return there.connect_ex((self._host, self.port)) == 0

    def kill(self):
        """As a power failure would, but for what the system has."""
        self._process.kill()
        self._process.wait()

    def signal(self, number):
        """Stop it with ``SIGSTOP``, or let it go on."""
        os.kill(self._process.pid, number)
        if number == signal.SIGSTOP:
            # Its threads end what they do: one of them may answer yet.
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def operate(self, work):
        """Do what an operator does to its streams; ``work`` is given JetStream and returns what is awaited."""

        async def connect():
            client = await nats.connect(self.address)
            try:
                return await work(client.jetstream())
            finally:
                await client.close()

        return asyncio.run(connect())

    def give_room(self, stream):
        """Lets a full stream grow."""

        async def change(jetstream):
            config = (await jetstream.stream_info(stream)).config
            await jetstream.update_stream(config.evolve(max_bytes=-1))

        self.operate(change)

    def set_back(self, to):
        """Kills it, gives it an older copy of its store, and starts it."""
        self.kill()
        shutil.rmtree(self.store)
        shutil.copytree(to, self.store)
        self.start()

    def copy_store(self, to):
        """Return a copy of its store, made while it stands still."""
        self.signal(signal.SIGSTOP)
        shutil.copytree(self.store, to)
        self.signal(signal.SIGCONT)
        return to


def _on_one_host(config, name, routes, server):
    """Return a configuration for a host of its own with another port for each of several servers on this one."""
    text, ports = config(server, name).replace("0.0.0.0:6222", f"127.0.0.1:{routes[name]}"), iter(routes.values())
    return re.sub(r"(nats://(?:127\.0\.0\.1|localhost):)6222", lambda found: f"{found[1]}{next(ports)}", text)


def port_of(address):
    return int(address.rpartition(":")[2])


class NatsCluster:
    """Three servers that keep streams together; their streams have three replicas where a bridge is made so."""

    def __init__(self, folder, size=3, config=None):
        """``config`` makes the configuration of a server and its name, on a host of its own; these start unwaited."""
        names = [f"n{number}" for number in range(1, size + 1)]
        routes = {name: port_of(free_address()) for name in names}
        listed = ", ".join(f'"nats://127.0.0.1:{port}"' for port in routes.values())
        self.nodes = {}
        for name in names:
            (folder / name).mkdir(parents=True)
            cluster = f'name: tests, listen: "127.0.0.1:{routes[name]}", routes: [{listed}], no_advertise: true'
            options = f'server_name: "{name}"\ncluster {{ {cluster} }}\n'
            of_this = None if config is None else partial(_on_one_host, config, name, routes)
            self.nodes[name] = NatsServer(folder / name, options=options, start=False, config=of_this)
        self.address = ",".join(node.address for node in self.nodes.values())
        self.servers = NatsServers.parse(self.address)
        if config is None:
            self.start()
            return
        for node in self.nodes.values():
            node.start(wait=False)

    def start(self):
        """Start those that do not run, and wait until they have a leader."""
        for node in self.nodes.values():
            if not node.is_running:
                node.start(wait=False)
        wait_for(self._answers, "a leader of the cluster")

    def _answers(self):
        async def ask(jetstream):
            return await jetstream.account_info()

        return self._asked(ask) is not None

    def leader_of(self, stream):
        """Return the server that leads a stream's replicas, and the names of the others; ``None`` without one."""

        async def ask(jetstream):
            cluster = (await jetstream.stream_info(stream)).cluster
            return None if cluster is None else cluster.leader

        leader = self._asked(ask)
        return None if not leader else (leader, [name for name in self.nodes if name != leader])

    def _asked(self, ask):
        async def ignore(error):
            pass

        async def connect():
            options = {"allow_reconnect": False, "connect_timeout": 1, "error_cb": ignore}
            client = await nats.connect(list(self.servers.addresses), **options)
            try:
                return await ask(client.jetstream(timeout=1))
            finally:
                await client.close()

        with contextlib.suppress(Exception):
            return asyncio.run(connect())
        return None

    def kill(self, *names):
        """Kills some, or all; those that do not run are left as they are."""
        for name in names or self.nodes:
            if self.nodes[name].is_running:
                self.nodes[name].kill()
