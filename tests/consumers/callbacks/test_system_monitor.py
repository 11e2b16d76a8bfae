"""SystemMonitor: the metrics of the hosts' health."""

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from callback_calls import CallLog, calls_of, goes_on_alike
from many_hosts import many_hosts

from offloop.bus.protocol.host_windows import decode_window, encode_window
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.actor import FIRST_ACTOR
from offloop.bus.types.health import HEALTH, Gpu, Health
from offloop.bus.types.timestamp import Timestamp
from offloop.consumers.api.callback import CannotWorkError
from offloop.consumers.callbacks.system_monitor import SystemMonitor

GPUS = [
    Gpu(
        0, {"utilization_percent": 40, "memory_used_bytes": 10, "memory_bytes": 100, "power_watts": 250, "throttled": 1}
    ),
    Gpu(1, {"utilization_percent": 80, "memory_used_bytes": 20, "memory_bytes": 100, "temperature_celsius": 60}),
]
HOST = Health("h", {"cpu_percent": 30, "memory_percent": 50}, [20, 40])
NO_GPU = msgspec.structs.replace(HOST, missing={"gpus": "no GPU can be seen"})


def events(health: Health, count: int = 1) -> list[Snapshot]:
    """So many measurements, five seconds and ten batches apart."""
    fields: dict[str, Any] = msgspec.to_builtins(health)
    return [
        Snapshot.build(
            HEALTH, rank=FIRST_ACTOR, time_ns=5 * number * 10**9, timestamp=Timestamp(batch=10 * number), **fields
        )
        for number in range(1, count + 1)
    ]


def metrics(monitor: SystemMonitor, stream: Iterable[Snapshot]) -> dict[str, Any]:
    [[step, _, logged]] = calls_of(monitor, stream).calls
    assert step == 10
    return dict(logged)


def test_what_the_hosts_broker_has_measured_is_logged() -> None:
    assert metrics(SystemMonitor(), events(HOST)) == {"system/cpu_percent": 30, "system/memory_percent": 50}


def test_it_logs_no_more_often_than_told_by_the_times_of_the_events() -> None:
    stream = events(HOST, 8)
    assert [step for step, _, _ in calls_of(SystemMonitor(), stream).calls] == [10, 30, 50, 70]
    goes_on_alike(SystemMonitor, stream)


def test_gpus_are_summed_up_and_shown_one_by_one_if_told_to() -> None:
    health = msgspec.structs.replace(HOST, gpus=GPUS)
    logged = metrics(SystemMonitor(), events(health))
    assert {name: value for name, value in logged.items() if "gpu" in name} == {
        "system/gpu_utilization_percent": 60,
        "system/gpu_memory_used_bytes": 30,
        "system/gpu_memory_percent": 15,
        "system/gpu_power_watts": 250,
        "system/gpu_temperature_celsius": 60,
        "system/gpu_throttled": 1,
    }
    logged = metrics(SystemMonitor(log_all_data=True), events(health))
    assert (logged["system/gpu1/utilization_percent"], logged["system/cpu1_percent"]) == (80, 40)
    assert "system/gpu1/power_watts" not in logged
    without = metrics(SystemMonitor(gpu_available=False, log_all_data=True), events(health))
    assert not [name for name in without if "gpu" in name]


def test_without_a_gpu_it_says_so_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(calls_of(SystemMonitor(every_seconds=1), events(NO_GPU, 3)).calls) == 3
    assert capsys.readouterr().err == "no GPU can be seen (on h); system/gpu_... is not logged\n"
    calls_of(SystemMonitor(gpu_available=False), events(NO_GPU))
    assert capsys.readouterr().err == ""
    with pytest.raises(CannotWorkError, match="no GPU can be seen"):
        calls_of(SystemMonitor(gpu_available=True), events(NO_GPU))


def test_further_hosts_have_metrics_of_their_own() -> None:
    monitor, logger = SystemMonitor(), CallLog()
    logger.begin(events(HOST)[0])
    for number in range(1, 13):
        windows = [
            decode_window(encode_window(msgspec.structs.replace(window, health=HOST if number % 5 == 1 else None)))
            for window in many_hosts(3, 2, number)
        ]
        monitor.host_windows(windows, logger)
    logged = [(step, name) for step, _, found in logger.calls for name in found if name.endswith("cpu_percent")]
    assert logged == [(step, f"system/node00{host}/cpu_percent") for step in (4, 44) for host in (1, 2)]
