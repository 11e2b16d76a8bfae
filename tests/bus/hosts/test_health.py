"""The health of a host: what psutil and NVML say, which ranks use which GPU, and what slows a rank down."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from paths import TESTS

from offloop.bus import Publisher
from offloop.bus.errors import ConfigurationError
from offloop.bus.hosts import health as measuring
from offloop.bus.types.health import HEALTH, Gpu, Health, find_cause

GPU = {"uuid": "GPU-a", "utilization": 40, "used": 10, "total": 100, "celsius": 50, "megahertz": 1900, "reasons": 0}


@pytest.fixture
def path(runs_dir: Path) -> Iterator[Path]:
    with Publisher("r", runs_dir=runs_dir):
        yield runs_dir / "r"


def gpus(path: Path, *gpus: dict[str, Any]) -> list[Gpu]:
    """What is measured where NVML shows these GPUs."""
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(TESTS / "support" / "nvml"))
        patched.setenv("FAKE_GPUS", json.dumps(gpus))
        patched.delitem(sys.modules, "pynvml", raising=False)
        found = Health.of({"host": "h", **measuring._Gpus(path).measure()})
        patched.delitem(sys.modules, "pynvml")
    assert found is not None
    return found.gpus


def test_the_machine_is_measured(tmp_path: Path) -> None:
    host = measuring._Host(tmp_path)
    assert set(host.measure()["values"]) == {"memory_percent", "memory_used_bytes", "disk_used_percent"}
    time.sleep(0.1)
    second = host.measure()
    values = second["values"]
    assert {"cpu_percent", "network_received_bytes_per_sec", "network_sent_bytes_per_sec"} <= values.keys()
    for name, value in values.items():
        assert 0 <= value <= (100 if name.endswith("percent") else sys.maxsize)
    total = psutil.virtual_memory().total
    assert total / 1000 < values["memory_used_bytes"] < total
    assert values["cpu_percent"] == pytest.approx(sum(second["cores"]) / psutil.cpu_count())


def test_rates_are_per_second_and_leave_out_loopback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, counts = [100.0, 104.0], [1000, 9000]

    def network(pernic: bool) -> dict[str, Any]:
        assert pernic
        count = counts.pop(0)
        return {
            "lo": SimpleNamespace(bytes_recv=count * 7, bytes_sent=count * 9),
            "eth0": SimpleNamespace(bytes_recv=count, bytes_sent=count // 2),
        }

    monkeypatch.setattr(time, "monotonic", lambda: clock.pop(0))
    monkeypatch.setattr(psutil, "net_io_counters", network)
    monkeypatch.setattr(psutil, "disk_io_counters", lambda: None)
    host = measuring._Host(tmp_path)
    host.measure()
    values = host.measure()["values"]
    assert values["network_received_bytes_per_sec"] == 2000.0
    assert values["network_sent_bytes_per_sec"] == 1000.0
    assert not [name for name in values if name.startswith("disk_read")]


def test_gpus_are_measured_as_far_as_they_can_be(path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    first, second = gpus(
        path,
        {**GPU, "milliwatts": 250_000, "reasons": 0x44, "xids": [79, 48], "pids": []},
        {**GPU, "uuid": "b", "pids": [os.getpid(), child.pid, 1]},
    )
    child.communicate()
    # A rank is known by its process; its children are its own, too.
    assert (first.ranks, first.others) == ([], [])
    assert (second.ranks, second.others) == ([0], [1])
    assert first.values == {
        "utilization_percent": 40,
        "memory_used_bytes": 10,
        "memory_bytes": 100,
        "power_watts": 250,
        "temperature_celsius": 50,
        "clock_hertz": 1.9e9,
        "throttled": 1,
        "xid_errors": 2,
    }
    assert (first.reasons, first.xids) == (["the power limit", "heat"], [79, 48])
    assert "power_watts" not in second.values
    assert (second.values["throttled"], second.xids) == (0, [])


def test_where_nvml_shows_no_processes_a_rank_is_found_as_torchrun_places_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases: list[tuple[dict[str, str], list[int]]] = [
        ({}, [0]),
        ({"LOCAL_RANK": "2"}, [2]),
        ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "2,1"}, [1]),
        ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "2"}, [2]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-c"}, [2]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "9"}, []),
    ]
    for environment, indices in cases:
        monkeypatch.setattr(psutil.Process, "environ", lambda process, environment=environment: environment)
        found = gpus(path, *({**GPU, "uuid": f"GPU-{name}"} for name in "abc"))
        assert [gpu.index for gpu in found if gpu.ranks == [0]] == indices, environment


def test_a_source_that_hangs_or_fails_is_named_and_delays_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()

    def hang(*_: object) -> Any:
        goes_on.wait()

    hangs = measuring._Source("gpus", hang)
    now = time.monotonic()
    assert list(hangs.fields(now)) == []
    [(name, silent)] = hangs.fields(now + 20)
    assert (name, round(silent["gpus"])) == ("silent", 20)

    def fail() -> Any:
        raise ConfigurationError("no GPU")

    fails = measuring._Source("gpus", fail)
    while not fails.is_known:
        time.sleep(0.01)
    assert list(fails.fields(now)) == [("missing", {"gpus": "no GPU"})]
    # At the end of the training the process leaves, although it is requested, and before a third look.
    monkeypatch.setattr(measuring, "_Gpus", hang)
    actor: Any = SimpleNamespace(training_ended=False, requested_events={HEALTH})
    actor.poll = lambda: setattr(actor, "training_ended", True)
    looks = iter((True, True))
    measuring._measure(actor, tmp_path, lambda: next(looks))
    goes_on.set()


def test_the_cause_is_what_concerns_the_rank() -> None:
    usual = Gpu(0, ranks=[8], reasons=["the power limit"])

    def cause(rank: int | None = 12, **of_host: Any) -> str | None:
        gpu = Gpu(3, ranks=[12], **of_host.pop("gpu", {}))
        return Health("node17", gpus=[usual, gpu], **of_host).cause(rank)

    throttled = {"reasons": ["the power limit", "heat"]}
    assert cause() is None
    assert cause(gpu=throttled) == "GPU 3 of node17 is throttled by heat"
    assert cause(8, gpu=throttled) is None
    assert cause(None, gpu=throttled) == "GPU 3 of node17 is throttled by heat"
    # Where all GPUs are at their limit, it makes none slower than the others.
    assert cause(gpu={"reasons": ["the power limit"]}) is None
    one = Health("node17", gpus=[Gpu(2), Gpu(3, ranks=[12], reasons=["the power limit"])])
    assert one.cause(12) == "GPU 3 of node17 is throttled by the power limit"
    assert cause(gpu={**throttled, "xids": [31, 79]}) == "GPU 3 of node17 has reported XID 79"
    assert cause(gpu={"others": [4711]}) == "GPU 3 of node17 is shared with process 4711"
    assert cause(silent={"gpus": 31.4}) == "the GPUs of node17 have not answered for 31 s"
    assert cause(values={"memory_percent": 97.2}) == "the memory of node17 is 97 % full"
    assert cause(values={"cpu_percent": 99.0}) == "the processors of node17 are 99 % busy"
    assert cause(values={"disk_used_percent": 99.6}) == "the disk of node17 is 100 % full"
    # It may have passed when the ranks have waited.
    assert find_cause([one, Health("node17")], 12) == one.cause(12)
