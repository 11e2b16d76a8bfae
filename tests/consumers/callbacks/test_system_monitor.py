"""SystemMonitor: what it measures of a real machine, and of GPUs that are made up."""

import sys
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from callback_calls import calls_of

from offloop.bus.errors import ConfigurationError
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.event import Event
from offloop.bus.types.timestamp import Timestamp
from offloop.consumers.callbacks.system_monitor import SystemMonitor

ALWAYS = {"system/memory_percent", "system/memory_used_bytes", "system/disk_used_percent"}
RATES = {"system/network_received_bytes_per_sec", "system/network_sent_bytes_per_sec"}


def batches(count: int, seconds: float = 1.0, age: float = 0.0) -> list[Snapshot]:
    now = time.time_ns() - round(age * 1e9)
    return [
        Snapshot.build(Event.BATCH_END, time_ns=now + round(batch * seconds * 1e9), timestamp=Timestamp(batch=batch))
        for batch in range(1, count + 1)
    ]


class NvmlError(Exception):
    """What NVML raises."""


class Nvml(SimpleNamespace):
    """Two GPUs, one of which does not tell its power."""

    def __init__(self, count: int = 2) -> None:
        def power(gpu: int) -> int:
            if gpu:
                raise NvmlError("Not Supported")
            return 250_000

        self.open = 0
        super().__init__(
            __spec__="found",
            NVMLError=NvmlError,
            NVML_TEMPERATURE_GPU=0,
            nvmlInit=lambda: setattr(self, "open", self.open + 1),
            nvmlShutdown=lambda: setattr(self, "open", self.open - 1),
            nvmlDeviceGetCount=lambda: count,
            nvmlDeviceGetHandleByIndex=lambda number: number,
            nvmlDeviceGetUtilizationRates=lambda gpu: SimpleNamespace(gpu=[40, 80][gpu]),
            nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(used=[10, 20][gpu], total=100),
            nvmlDeviceGetPowerUsage=power,
            nvmlDeviceGetTemperature=lambda gpu, sensor: [50, 60][gpu],
        )


def test_it_measures_the_machine() -> None:
    calls = calls_of(SystemMonitor(gpu_available=False, every_seconds=0.5), batches(2)).calls
    assert [(step, event) for step, event, _ in calls] == [(1, "BATCH_END"), (2, "BATCH_END")]
    first, second = calls[0][2], calls[1][2]
    assert set(first) == ALWAYS
    assert set(second) >= ALWAYS | RATES | {"system/cpu_percent"}
    for name, value in second.items():
        assert 0 <= value <= (100 if name.endswith("percent") else sys.maxsize)
    total = psutil.virtual_memory().total
    assert total / 1000 < second["system/memory_used_bytes"] < total


def test_it_measures_no_more_often_than_told_by_the_times_of_the_events() -> None:
    monitor = SystemMonitor(gpu_available=False, every_seconds=2)
    stream = batches(20, seconds=0.5)
    assert [step for step, _, _ in calls_of(monitor, stream[:10]).calls] == [1, 5, 9]
    goes_on = SystemMonitor(gpu_available=False, every_seconds=2)
    goes_on.load_state_dict(monitor.state_dict())
    assert [step for step, _, _ in calls_of(goes_on, stream[10:]).calls] == [13, 17]


def test_events_of_the_past_get_no_measurements_of_the_present() -> None:
    monitor = SystemMonitor(gpu_available=False, every_seconds=1)
    assert calls_of(monitor, batches(5, age=3600)).calls == []
    assert len(calls_of(monitor, batches(1)).calls) == 1


def test_rates_are_per_second_and_leave_out_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
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
    calls = calls_of(SystemMonitor(gpu_available=False, every_seconds=0.5), batches(2)).calls
    assert calls[1][2]["system/network_received_bytes_per_sec"] == 2000.0
    assert calls[1][2]["system/network_sent_bytes_per_sec"] == 1000.0
    assert not [name for name in calls[1][2] if name.startswith("system/disk_read")]


def test_gpus_are_summed_up_and_shown_one_by_one_if_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monitor = SystemMonitor()
    [[_, _, metrics]] = calls_of(monitor, batches(1)).calls
    assert {name: value for name, value in metrics.items() if "gpu" in name} == {
        "system/gpu_utilization_percent": 60.0,
        "system/gpu_memory_used_bytes": 30,
        "system/gpu_memory_percent": 15.0,
        "system/gpu_power_watts": 250.0,
        "system/gpu_temperature_celsius": 60,
    }
    monitor.post_close()
    assert nvml.open == 0
    everything = SystemMonitor(log_all_data=True, every_seconds=0.5)
    [_, [_, _, metrics]] = calls_of(everything, batches(2)).calls
    assert metrics["system/gpu1/utilization_percent"] == 80
    assert "system/gpu1/power_watts" not in metrics
    cores = [metrics[f"system/cpu{number}_percent"] for number in range(psutil.cpu_count())]
    assert metrics["system/cpu_percent"] == pytest.approx(sum(cores) / len(cores))


@pytest.mark.parametrize("missing", ["package", "driver", "gpu"])
def test_without_a_gpu_it_says_so_once(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_driver() -> None:
        raise NvmlError("NVML Shared Library Not Found")

    nvml = Nvml(count=0)
    if missing == "driver":
        monkeypatch.setattr(nvml, "nvmlInit", no_driver)
    monkeypatch.setitem(sys.modules, "pynvml", None if missing == "package" else nvml)
    calls = calls_of(SystemMonitor(every_seconds=0.5), batches(3)).calls
    assert len(calls) == 3
    [line] = capsys.readouterr().err.splitlines()
    assert ("pip install 'offloop[system]'" if missing == "package" else "no GPU can be seen through NVML") in line
    with pytest.raises(ConfigurationError):
        calls_of(SystemMonitor(gpu_available=True), batches(1))


def test_it_says_once_that_the_training_runs_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere = Snapshot.build(Event.INIT, system={"host": "gpu-node-7"})
    monitor = SystemMonitor(gpu_available=False)
    calls_of(monitor, [elsewhere, elsewhere])
    assert "the training runs on gpu-node-7" in capsys.readouterr().err
    goes_on = SystemMonitor(gpu_available=False)
    goes_on.load_state_dict(monitor.state_dict())
    calls_of(goes_on, [elsewhere])
    assert capsys.readouterr().err == ""
