"""A run in a cluster of three NATS servers: whatever dies there, each event comes once and in order."""

import os
import shutil
import signal
import time

import pytest
from cluster_runs import ClusterRun, some_deaths
from helpers import wait_for

from bus.runs.bridged import read_bridge


@pytest.fixture
def cluster(tmp_path):
    with ClusterRun(tmp_path) as made:
        yield made


def test_deaths_of_servers_bridge_broker_and_consumer_lose_nothing(cluster):
    order, moments = some_deaths(1, seed=18)
    for kind in order:
        cluster.kill(kind, moments)
    cluster.finish()


def test_what_two_of_three_servers_have_forgotten_is_sent_again(cluster, tmp_path):
    wait_for(lambda: cluster.reader.last > 200, "the consumer")
    leader, (second, third) = wait_for(lambda: cluster.servers.leader_of("ol_r"), "a leader")
    nodes = cluster.servers.nodes
    for name in (leader, second):
        nodes[name].copy_store(tmp_path / f"older-{name}")
    published = cluster.training.published
    wait_for(lambda: cluster.reader.last > published + 600, "three seconds of events")
    # The third one comes back when the others have gone on without it.
    cluster.servers.kill()
    for name in (leader, second):
        shutil.rmtree(nodes[name].store)
        shutil.copytree(tmp_path / f"older-{name}", nodes[name].store)
        nodes[name].start(wait=False)
    wait_for(lambda: "have forgotten" in cluster.bridge_log, "the bridge", 60)
    wait_for(lambda: read_bridge(cluster.run_dir).refilled > 0, "the bridge", 60)
    nodes[third].start()
    cluster.finish()


def test_a_bridge_that_was_stopped_while_another_took_over_writes_nothing_more(cluster):
    first, said = cluster.bridge, len(cluster.bridge_log)
    os.kill(first.pid, signal.SIGSTOP)
    try:
        cluster.begin_bridge()
        copied = read_bridge(cluster.run_dir).copied
        begin = time.monotonic()
        wait_for(lambda: read_bridge(cluster.run_dir).copied > copied and time.monotonic() > begin + 4, "the next one")
    finally:
        os.kill(first.pid, signal.SIGCONT)
    assert first.wait(30) == 1
    assert "another bridge" in cluster.bridge_log[said:]
    assert read_bridge(cluster.run_dir).pid == cluster.bridge.pid
    assert cluster.bridge.poll() is None
    cluster.finish()
