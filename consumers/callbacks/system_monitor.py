"""Load of the machine, as metrics."""

import contextlib
import socket
import time
from collections.abc import Callable
from functools import partial
from statistics import fmean
from typing import Any

from offloop.bus.errors import ConfigurationError, require
from offloop.bus.printing import say
from offloop.bus.protocol.snapshot import Snapshot
from offloop.consumers.api.callback import Callback
from offloop.consumers.api.logger import Logger

_say = partial(say, err=True)
_FRESH_SECONDS = 60.0  # age of an event up to which the measurement at its arrival is logged for it

_COMBINED: dict[str, Callable[[list[float]], float]] = {
    "utilization_percent": fmean,
    "memory_used_bytes": sum,
    "memory_bytes": sum,
    "power_watts": sum,
    "temperature_celsius": max,
}


class SystemMonitor(Callback):
    """CPU, memory, disk, network and GPUs of the consumer's machine.

    Logs at ``BATCH_END``, at most once in ``every_seconds`` of event time:

    - ``system/cpu_percent``: busy share of all cores since the last time;
    - ``system/memory_percent``, ``system/memory_used_bytes``;
    - ``system/disk_used_percent``: of the file system of ``disk_path``; ``system/disk_read_bytes_per_sec``,
    ``system/disk_write_bytes_per_sec``: all disks together;
    - ``system/network_received_bytes_per_sec``, ``system/network_sent_bytes_per_sec``: all interfaces but loopback;
    - of the GPUs that NVML shows: ``system/gpu_utilization_percent`` (mean), ``system/gpu_memory_used_bytes`` (sum),
    ``system/gpu_memory_percent`` (of all their memory), ``system/gpu_power_watts`` (sum),
    ``system/gpu_temperature_celsius`` (the hottest).

    With ``log_all_data`` also ``system/cpuN_percent`` of each core and ``system/gpuN/...`` of each GPU. Unavailable
    values are left out.

    ``gpu_available``: ``True`` raises when NVML shows no GPU, ``False`` does not look, ``None`` reports a missing GPU
    once on standard error. Events older than a minute, as in a replay, are skipped. A training on another machine than
    the consumer is reported once. Needs ``pip install 'offloop[system]'``. Reference:
    ``composer/callbacks/system_metrics_monitor.py``."""

    keeps = ("_logged_ns", "_said_host")

    def __init__(
        self,
        gpu_available: bool | None = None,
        log_all_data: bool = False,
        every_seconds: float = 10.0,
        disk_path: str = ".",
    ) -> None:
        if not every_seconds > 0:
            raise ConfigurationError(f"every_seconds is {every_seconds}: use a number of seconds above 0")
        require("SystemMonitor", "system", "psutil")
        self._gpu_available = gpu_available
        self._log_all_data = log_all_data
        self._every_ns = round(every_seconds * 1e9)
        self._disk_path = disk_path
        self._logged_ns: int | None = None
        self._said_host = False
        self._host: _Host | None = None
        self._gpus: _Gpus | None = None

    def init(self, state: Snapshot, logger: Logger) -> None:
        system = state.fields.get("system")
        there = system.get("host") if isinstance(system, dict) else None
        here = socket.gethostname()
        if there is not None and there != here and not self._said_host:
            self._said_host = True
            _say(f"the metrics system/... are of {here}, where this consumer runs; the training runs on {there}")

    def batch_end(self, state: Snapshot, logger: Logger) -> None:
        if self._logged_ns is not None and 0 <= state.time_ns - self._logged_ns < self._every_ns:
            return
        if abs(time.time() - state.time) > _FRESH_SECONDS:
            return
        self._logged_ns = state.time_ns
        if self._host is None:
            self._host = _Host(self._disk_path)
            self._gpus = self._find_gpus()
        metrics = self._host.measure(self._log_all_data)
        if self._gpus is not None:
            metrics |= self._gpus.measure(self._log_all_data)
        logger.log_metrics({f"system/{name}": value for name, value in metrics.items()})

    def post_close(self) -> None:
        if self._gpus is not None:
            self._gpus.close()
            self._gpus = None

    def _find_gpus(self) -> "_Gpus | None":
        if self._gpu_available is False:
            return None
        try:
            return _Gpus()
        except ConfigurationError as error:
            if self._gpu_available:
                self._host = None  # the next batch looks again, and raises again
                raise
            _say(f"{error}; system/gpu_... is not logged")
            return None


class _Host:
    """Measurements by psutil. Rates are of the time since the measurement before, and missing from the first one."""

    def __init__(self, disk_path: str) -> None:
        import psutil  # type: ignore[import-untyped]

        self._psutil = psutil
        self._disk_path = disk_path
        self._last: tuple[float, dict[str, float]] | None = None
        # The first values of psutil are meaningless, see its manual.
        self._psutil.cpu_percent(percpu=True)
        self._cpu_is_known = False

    def measure(self, each_core: bool) -> dict[str, float]:
        psutil = self._psutil
        metrics: dict[str, float] = {}
        cores = psutil.cpu_percent(percpu=True)
        if self._cpu_is_known and cores:
            metrics["cpu_percent"] = sum(cores) / len(cores)
            if each_core:
                metrics |= {f"cpu{number}_percent": busy for number, busy in enumerate(cores)}
        self._cpu_is_known = True
        memory = psutil.virtual_memory()
        metrics |= {"memory_percent": memory.percent, "memory_used_bytes": memory.used}
        with contextlib.suppress(OSError):
            metrics["disk_used_percent"] = psutil.disk_usage(self._disk_path).percent
        return metrics | self._rates()

    def _rates(self) -> dict[str, float]:
        now, counts = time.monotonic(), self._counts()
        before, self._last = self._last, (now, counts)
        if before is None or now <= before[0]:
            return {}
        return {
            f"{name}_per_sec": max(count - before[1][name], 0) / (now - before[0])
            for name, count in counts.items()
            if name in before[1]
        }

    def _counts(self) -> dict[str, float]:
        counts: dict[str, float] = {}
        # Containers may have no disks, and psutil raises for some kernels.
        with contextlib.suppress(OSError, RuntimeError, NotImplementedError):
            if (disks := self._psutil.disk_io_counters()) is not None:
                counts |= {"disk_read_bytes": disks.read_bytes, "disk_write_bytes": disks.write_bytes}
        with contextlib.suppress(OSError, RuntimeError, NotImplementedError):
            interfaces = self._psutil.net_io_counters(pernic=True)
            others = [one for name, one in interfaces.items() if name != "lo" and not name.startswith("lo0")]
            counts["network_received_bytes"] = sum(one.bytes_recv for one in others)
            counts["network_sent_bytes"] = sum(one.bytes_sent for one in others)
        return counts


class _Gpus:
    def __init__(self) -> None:
        require("a GPU", "system", "pynvml")
        import pynvml as nvml

        self._nvml = nvml
        try:
            nvml.nvmlInit()
            self._devices = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
        except nvml.NVMLError as error:
            raise ConfigurationError(f"no GPU can be seen through NVML: {error}") from None
        if not self._devices:
            self.close()
            raise ConfigurationError("no GPU can be seen through NVML: it shows none")

    def measure(self, each_gpu: bool) -> dict[str, float]:
        gpus = [self._measure_one(device) for device in self._devices]
        metrics: dict[str, float] = {}
        for name, combine in _COMBINED.items():
            if values := [gpu[name] for gpu in gpus if name in gpu]:
                metrics[f"gpu_{name}"] = combine(values)
        if all_bytes := metrics.pop("gpu_memory_bytes", 0):
            metrics["gpu_memory_percent"] = 100 * metrics["gpu_memory_used_bytes"] / all_bytes
        if each_gpu:
            metrics |= {
                f"gpu{number}/{name}": value
                for number, gpu in enumerate(gpus)
                for name, value in gpu.items()
                if name != "memory_bytes"
            }
        return metrics

    def close(self) -> None:
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def _measure_one(self, device: Any) -> dict[str, float]:
        nvml = self._nvml
        values: dict[str, float] = {}
        # The available values depend on the kind of GPU, and on whether it is shared in parts.
        with contextlib.suppress(nvml.NVMLError):
            values["utilization_percent"] = nvml.nvmlDeviceGetUtilizationRates(device).gpu
        with contextlib.suppress(nvml.NVMLError):
            memory = nvml.nvmlDeviceGetMemoryInfo(device)
            values |= {"memory_used_bytes": memory.used, "memory_bytes": memory.total}
        with contextlib.suppress(nvml.NVMLError):
            values["power_watts"] = nvml.nvmlDeviceGetPowerUsage(device) / 1000
        with contextlib.suppress(nvml.NVMLError):
            values["temperature_celsius"] = nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU)
        return values
