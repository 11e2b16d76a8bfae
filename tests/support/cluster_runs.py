"""A run that is copied into a cluster of three NATS servers and read from there, of which any part can be killed."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from faults import Training, assert_counted, read_recording
from helpers import wait_for
from nats_servers import NatsCluster

from offloop.bus.runs.bridged import read_bridge

KINDS = ("leader", "follower", "all servers", "bridge", "broker", "consumer")
FOLLOW = """
import sys
from offloop.bus import Event, Subscriber
from faults import numbers_in
with Subscriber(sys.argv[1], stream=sys.argv[2], events=[Event.BATCH_END]) as subscriber:
    for number in numbers_in(iter(subscriber)):
        print(number, flush=True)
    print(subscriber.ending, subscriber.gaps, flush=True)
"""


class Reader:
    """A process that reads a run from the cluster and reports each number as it comes."""

    def __init__(self, run, address):
        path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", FOLLOW, run, address],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        self.numbers = []
        self.ending = ""
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self):
        for line in self.process.stdout:
            if line.strip().isdigit():
                self.numbers.append(int(line))
            else:
                self.ending = line.strip()

    @property
    def last(self):
        """The number that came last."""
        return self.numbers[-1] if self.numbers else 0

    def check(self):
        """Fails if it has ended."""
        assert self.process.poll() is None, self.process.stderr.read()

    def end(self, patience):
        """Wait until it has read everything, and check what it was given."""
        errors = self.process.communicate(timeout=patience)[1] if not self._thread.is_alive() else self._wait(patience)
        assert self.process.returncode == 0, errors
        assert self.ending == "finished ()", self.ending

    def _wait(self, patience):
        self._thread.join(patience)
        assert not self._thread.is_alive(), f"the reader stands at event {self.last}"
        self.process.wait(patience)
        return self.process.stderr.read()

    def kill(self):
        """Kills it; what it was given before is in order."""
        self.process.kill()
        self.process.wait()
        self._thread.join()
        self.process.stdout.close()
        self.process.stderr.close()


class ClusterRun:
    """Publishes ``rate`` events a second on this host, copies them with three replicas, and reads them."""

    def __init__(self, folder, rate=200):
        self.runs_dir = folder / "runs"
        self.runs_dir.mkdir()
        self._rate = rate
        self._folder = folder

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            self.servers = NatsCluster(self._folder / "nats")
            stack.callback(self.servers.kill)
            self.training = stack.enter_context(Training(self.runs_dir, rate=self._rate, restart_pauses=(0.0, 0.0)))
            self._bridge = None
            stack.callback(lambda: self._bridge and (self._bridge.kill(), self._bridge.wait()))
            self.begin_bridge()
            wait_for(lambda: read_bridge(self.run_dir).copied > 0, "the bridge", 60)
            self.reader = Reader("r", self.servers.address)
            stack.callback(lambda: self.reader.kill())
            wait_for(lambda: self.reader.last or self.reader.check(), "the consumer", 60)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_):
        self._stack.close()

    @property
    def run_dir(self):
        """The run's folder."""
        return self.runs_dir / "r"

    def begin_bridge(self):
        """Start the command ``offloop server bridge``."""
        command = (
            "offloop.bus",
            "server",
            "bridge",
            str(self.run_dir),
            "--stream",
            self.servers.address,
            "--replicas",
            "3",
        )
        with open(self._folder / "bridge.log", "ab") as log:
            self._bridge = subprocess.Popen([sys.executable, "-m", *command], stderr=log, stdout=log)
        wait_for(lambda: self._bridge.pid == getattr(self._copying(), "pid", None), "the bridge", 60)

    def _copying(self):
        found = read_bridge(self.run_dir)
        return found if found is not None and found.attempt else None

    @property
    def bridge(self):
        """The process of the bridge."""
        return self._bridge

    @property
    def bridge_log(self):
        """What bridges have said."""
        return (self._folder / "bridge.log").read_text()

    def kill(self, kind, moments, patience=100.0):
        """Kills a part, and starts it again where nothing else does; returns the silence in seconds."""
        begin = time.monotonic()
        if kind in ("leader", "follower"):
            leader, others = wait_for(lambda: self.servers.leader_of("ol_r"), "a leader", patience)
            begin = time.monotonic()
            self.servers.kill(leader if kind == "leader" else moments.choice(others))
        elif kind == "all servers":
            self.servers.kill()
            self.servers.start()
        elif kind == "bridge":
            self._bridge.kill()
            self._bridge.wait()
            self.begin_bridge()
        elif kind == "broker":
            os.kill(self.training.broker_pid, signal.SIGKILL)
        elif kind == "consumer":
            numbers = self.reader.numbers
            self.reader.kill()
            assert_counted(numbers, len(numbers))
            self.reader = Reader("r", self.servers.address)
        published = self.training.published
        wait_for(lambda: self.reader.last > published, f"event {published + 1} after the death of: {kind}", patience)
        silence = time.monotonic() - begin
        self.servers.start()
        return silence

    def finish(self, patience=100.0):
        """End the training; return how many events there are, each of which came once and in order."""
        told = self.training.finish(patience)
        events = told["events"]
        self.reader.end(patience)
        assert_counted(self.reader.numbers, events)
        assert self._bridge.wait(patience) == 0, self.bridge_log
        afterwards = Reader("r", self.servers.address)
        try:
            afterwards.end(patience)
        finally:
            afterwards.kill()
        assert_counted(afterwards.numbers, events)
        read_recording(self.run_dir, events)
        return events


def some_deaths(count, seed):
    """So many deaths of each kind in a random order, and what else is random."""
    moments = random.Random(seed)
    order = [kind for kind in KINDS for _ in range(count)]
    moments.shuffle(order)
    return order, moments
