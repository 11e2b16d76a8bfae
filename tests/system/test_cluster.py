"""A run in a cluster of three NATS servers: whatever dies there, each event comes once and in order."""

import contextlib
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner
from helpers import wait_for
from nats_certificates import Authority
from nats_servers import NatsCluster

from offloop.bus import Event, Publisher
from offloop.bus.cli.server import nats_config
from offloop.bus.jetstream.connection import NatsServers
from offloop.bus.jetstream.nats_connection import NatsConnection
from offloop.bus.net.nkeys import make_nkey


class SecureCluster:
    """Three servers, configured by ``offloop server nats-config --cluster``, with TLS between all."""

    def __init__(self, folder):
        self._authority = Authority.make(folder, "authority")
        self._seeds, self._keys = {}, []
        for role in ("publish", "view"):
            public, self._seeds[role], _ = make_nkey(role, folder)
            self._keys += [f"--{role}er", str(public)]
        (folder / "nats").mkdir(mode=0o700)
        self.servers = NatsCluster(folder / "nats", config=self._config)
        self.address = self.servers.address.replace("nats://", "tls://")

    def _config(self, server, name):
        certificate, key = self._authority.sign(name, valid_for="IP:127.0.0.1,DNS:localhost")
        options = {
            "--cluster": ",".join(["127.0.0.1"] * 3),
            "--listen": f"127.0.0.1:{server.port}",
            "--server-name": name,
            "--advertise": "127.0.0.1",
            "--store-dir": server.store,
            "--certificate": certificate,
            "--certificate-key": key,
            "--cluster-ca": self._authority.certificate,
        }
        words = [str(word) for option in options.items() for word in option]
        made = CliRunner().invoke(nats_config, [*self._keys, *words])
        assert made.exit_code == 0, made.output
        return made.output

    def environment(self, role):
        return {"OFFLOOP_NKEY": str(self._seeds[role]), "OFFLOOP_CA": str(self._authority.certificate)}

    def begin(self, role, *words):
        return subprocess.Popen(
            [sys.executable, "-m", *map(str, words), "--stream", self.address],
            env={**os.environ, **self.environment(role)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def replicas_of(self, stream):
        """How many servers keep a stream."""
        asked = NatsServers.parse(self.address, self._seeds["view"], self._authority.certificate)
        with NatsConnection(asked) as there:
            return there.call(there.client.js.stream_info(stream), 10).config.num_replicas


@pytest.mark.needs("openssl")
@pytest.mark.timeout(600)
def test_deaths_of_consumer_bridge_and_servers_lose_nothing_and_repeat_nothing(tmp_path, runs_dir):
    with contextlib.ExitStack() as stack:
        cluster = SecureCluster(tmp_path)
        stack.callback(cluster.servers.kill)

        def begin(*words):
            process = cluster.begin(*words)
            stack.callback(lambda: (process.kill(), print(process.communicate()[0])))
            return process

        def publish(count):
            for _ in range(count):
                publisher.publish(Event.BATCH_END, loss=1 / (publisher.statistics().published + 1), lr={"SGD": [0.1]})
            publisher.poll()

        def lines():
            publisher.poll()
            return path.read_bytes().count(b"\n") if path.exists() else 0

        def logging_to(path):
            return ("--callbacks", "metrics,lr", "-l", "jsonl", "-o", f"jsonl.path={path}")

        path, undisturbed = tmp_path / "mine.jsonl", tmp_path / "undisturbed.jsonl"
        copying = ("publish", "offloop.bus", "server", "bridge", "r", "--runs-dir", runs_dir)
        following = ("view", "offloop.consumers", "--wait", "--run", "r", *logging_to(path))
        named = (*following, "--name", "mine", "--state-dir", tmp_path)
        publisher = stack.enter_context(Publisher("r", runs_dir=runs_dir))
        publish(300)
        bridge, consumer = begin(*copying), begin(*named)
        wait_for(lambda: lines() >= 300, "the first 300 lines")
        consumer.kill()
        consumer.wait()
        assert {cluster.replicas_of(stream) for stream in ("ol_r", "KV_ol_runs")} == {3}
        cluster.servers.kill("n1")
        consumer = begin(*named)
        publish(300)
        wait_for(lambda: lines() >= 600, "300 lines of two servers")
        bridge.kill()
        bridge.wait()
        publish(300)
        bridge = begin(*copying)
        wait_for(lambda: lines() >= 900, "300 lines of another bridge")
        cluster.servers.kill()
        publish(300)
        for server in cluster.servers.nodes.values():
            server.start(wait=False)
        wait_for(lambda: lines() >= 1200, "300 lines of servers that were all away")
        publisher.close()
        assert consumer.wait(100) == 0, consumer.stdout.read()
        assert bridge.wait(100) == 0
        command = [sys.executable, "-m", "offloop.consumers", "--run", "r", "--runs-dir", runs_dir]
        subprocess.run([*command, *logging_to(undisturbed)], check=True, capture_output=True)
        assert path.read_bytes() == undisturbed.read_bytes()
