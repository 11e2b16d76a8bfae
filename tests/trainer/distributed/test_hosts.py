"""A training on two hosts with a broker and a recording each, in four processes over gloo and with a NATS server."""

import json
from pathlib import Path
from typing import Any

import pytest
from brokers import free_address
from forked import Program, fill_once, run_forked
from nats_servers import NatsServer, wait_for_copy

from offloop.bus.recording.recording import Recording
from offloop.bus.runs.bridged import read_bridge
from offloop.bus.runs.directory import RunInfo, find_run
from offloop.bus.types.actor import is_actor
from offloop.bus.types.event import Event

HOSTS = {"a": [0, 1], "b": [2, 3]}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder, with one of runs for each host, and the results of each rank."""
    folder = fill_once(tmp_path_factory.getbasetemp(), "hosts", train_on_hosts)
    return folder, [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(4)]


def train_on_hosts(folder: Path) -> None:
    server = NatsServer(folder)
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_address().rpartition(":")[2],
        "WORLD_SIZE": "4",
        "OMP_NUM_THREADS": "1",
        "OFFLOOP_STREAM": server.address,
    }
    code = f"import hosts_jobs, pathlib; hosts_jobs.main(pathlib.Path({str(folder)!r}))"
    programs = [
        Program(code, {**shared, "RANK": str(rank), "OFFLOOP_HOST": host, "OFFLOOP_RUNS_DIR": str(folder / host)})
        for host, ranks in HOSTS.items()
        for rank in ranks
    ]
    try:
        ended = run_forked("hosts_jobs", folder, programs)
        assert [one.exit_code for one in ended] == [0] * 4, "\n".join(one.stderr for one in ended)
        for host in HOSTS:
            wait_for_copy(folder / host / "r", attempt=1)
    finally:
        server.kill()


def run_of(folder: Path, host: str, name: str = "r") -> RunInfo:
    return find_run(name, folder / host)


@pytest.mark.slow
def test_each_host_records_its_own_ranks_as_one_attempt_of_one_run(finished: Any) -> None:
    folder, _ = finished
    runs = [run_of(folder, host) for host in HOSTS]
    assert runs[0].id == runs[1].id
    for host, run in zip(HOSTS, runs, strict=True):
        bridge = read_bridge(run.path)
        assert bridge is not None
        assert bridge.host == host
        [attempt] = run.attempts
        assert (attempt.status, attempt.world_size, attempt.local_world_size) == ("finished", 4, 2)
        recording = Recording(attempt.recording)
        ranks = [one for one in recording if not is_actor(one.rank)]  # the host's health comes from an actor
        assert {one.rank for one in ranks} == set(HOSTS[host])
        assert (recording.ending.status, recording.gaps) == ("finished", ())
        assert {one.world_size for one in ranks} == {4}


def test_weights_are_those_of_a_training_with_one_broker_and_no_stream(finished: Any) -> None:
    folder, known = finished
    assert {one.rank for one in Recording(find_run("alone", folder / "alone").recording)} == {0, 1, 2, 3}
    for one in known:
        assert one["hosts"] == one["alone"]


def test_a_hosts_broker_that_was_killed_was_followed_by_another(finished: Any) -> None:
    folder, _ = finished
    assert "attempt 1 of run r continues with a new broker" in (folder / "b" / "r" / "broker.log").read_text()
    for host, ranks in HOSTS.items():
        ends = [one for one in Recording(run_of(folder, host).recording) if one.event is Event.BATCH_END]
        for rank in ranks:
            assert [int(one.timestamp.batch) for one in ends if one.rank == rank] == list(range(1, 13))


@pytest.mark.slow
def test_a_host_without_the_run_starts_with_the_attempt_of_the_others(finished: Any) -> None:
    folder, known = finished
    assert [one["new"] for one in known] == [3, 3, 3, 3]
    first, second = (run_of(folder, host, "new") for host in HOSTS)
    assert ([one.number for one in first.attempts], [one.number for one in second.attempts]) == ([1, 2, 3], [3])
    assert first.id == second.id


def test_a_run_that_begins_has_a_name_that_is_free_on_all_hosts(finished: Any) -> None:
    folder, known = finished
    assert [one["taken"] for one in known] == ["taken-3"] * 4
    runs = [run_of(folder, host, "taken-3") for host in HOSTS]
    assert [len(one.attempts) for one in runs] == [1, 1]
    assert runs[0].id == runs[1].id


def test_contradictory_hosts_are_refused_on_all_ranks(finished: Any) -> None:
    folder, known = finished
    for rank, one in enumerate(known):
        for what in ("other", "shared", "mixed"):
            assert one[what].startswith("ConfigurationError: "), what
        assert one["failing"] == ("BrokerError: no room" if rank == 2 else "BrokerError: host b: no room")
    assert not list((folder / "shared").iterdir())
    assert run_of(folder, "a", "failing").last.status in ("running", "failed", "lost")
