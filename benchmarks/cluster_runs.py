"""A run that is copied into a cluster of three NATS servers and read from there, of which any part can be killed."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

from faults import Training, assert_counted, numbers_in, read_recording
from helpers import wait_for
from nats_servers import NatsCluster, attach

from offloop.bus import Event
from offloop.bus.runs.bridged import read_bridge

KINDS = ("leader", "follower", "all servers", "bridge", "broker")


class Reader(threading.Thread):
    """Reads the run from the cluster and keeps the numbers of what comes."""

    def __init__(self, servers):
        super().__init__(daemon=True)
        self.subscriber = attach(servers, "r", events=[Event.BATCH_END])
        self.numbers = []
        self.start()

    def run(self):
        with self.subscriber:
            for number in numbers_in(iter(self.subscriber)):
                self.numbers.append(number)

    @property
    def last(self):
        """The number that came last."""
        return self.numbers[-1] if self.numbers else 0

    def end(self, events, patience):
        """Wait until it has read everything: each event once and in order."""
        self.join(patience)
        assert_counted(self.numbers, events)
        assert (str(self.subscriber.ending), self.subscriber.gaps) == ("finished", ())


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
            wait_for(lambda: read_bridge(self.run_dir).copied > 0, "the bridge")
            self.reader = Reader(self.servers)
            wait_for(lambda: self.reader.last, "the consumer")
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
        words = ("server", "bridge", str(self.run_dir), "--stream", self.servers.address, "--replicas", "3")
        with open(self._folder / "bridge.log", "ab") as log:
            self._bridge = subprocess.Popen([sys.executable, "-m", "offloop.bus", *words], stderr=log, stdout=log)
        wait_for(lambda: self._bridge.pid == getattr(self._copying(), "pid", None), "the bridge")

    def _copying(self):
        found = read_bridge(self.run_dir)
        return found if found is not None and found.attempt else None

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
        published = self.training.published
        wait_for(lambda: self.reader.last > published, f"event {published + 1} after the death of: {kind}", patience)
        silence = time.monotonic() - begin
        self.servers.start()
        return silence

    def finish(self, patience=100.0):
        """End the training; return how many events there are, each of which came once and in order."""
        told = self.training.finish(patience)
        events = told["events"]
        self.reader.end(events, patience)
        assert self._bridge.wait(patience) == 0, (self._folder / "bridge.log").read_text()
        Reader(self.servers).end(events, patience)
        read_recording(self.run_dir, events)
        return events
