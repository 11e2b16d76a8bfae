"""Measures this host for a run: ``python -m offloop.bus.hosts.health DIRECTORY``, started by the run's broker.

It joins the run as an actor, publishes :data:`~offloop.bus.types.health.HEALTH`, and ends with the demand for it."""

import contextlib
import os
import re
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from offloop.bus.errors import ConfigurationError, OffloopError, require
from offloop.bus.lazy import LazyModule
from offloop.bus.publisher.actor import Actor, join
from offloop.bus.runs.directory import host_name, is_over, read_run
from offloop.bus.types.actor import is_actor
from offloop.bus.types.health import HEALTH, HOST, POWER_LIMIT, Gpu, Health

psutil: LazyModule = LazyModule("psutil")
nvml: LazyModule = LazyModule("pynvml")

EVERY_SECONDS = 5.0
_SILENT_SECONDS = 15.0  # age of the newest measurement from which a source counts as hanging
_FIRST_SECONDS = 2.0  # how long the first event waits for the first measurements
_LOOK_SECONDS = 0.1
_XID_SECONDS = 60.0  # how long an error of a GPU is reported
# Bits of NVML, whose names differ between its versions.
_REASONS = {
    0x04: POWER_LIMIT,
    0x08: "the hardware",
    0x20: "heat",
    0x40: "heat",
    0x80: "the power supply",
}


def main() -> None:
    path, parent = Path(sys.argv[1]), os.getppid()
    try:
        name = re.sub(r"[^A-Za-z0-9._-]|\A[^A-Za-z0-9_]", "_", host_name())[:100]
        with join(path, role=HOST, name=name, record=(), wait_seconds=0) as actor:
            # Of a dead broker the next one starts its own.
            _measure(actor, path, lambda: os.getppid() == parent)
    except OffloopError as error:
        if is_over(path):  # it has just ended
            return
        sys.exit(f"the health of this host cannot be measured: {error}")


def _measure(actor: Actor, path: Path, is_needed: Callable[[], bool]) -> None:
    sources = _Source("host", lambda: _Host(path).measure), _Source("gpus", lambda: _Gpus(path).measure)
    due = time.monotonic()
    while is_needed() and not actor.training_ended and HEALTH in actor.requested_events:
        now = time.monotonic()
        if now >= due and (all(one.is_known for one in sources) or now >= due + _FIRST_SECONDS):
            due = now + EVERY_SECONDS
            health = Health(host_name(), **{name: value for one in sources for name, value in one.fields(now)})
            actor.event(HEALTH.value[1:], **msgspec.to_builtins(health))
        time.sleep(_LOOK_SECONDS)
        actor.poll()


class _Source:
    """Measures in a thread of its own, because NVML and file systems may hang for minutes."""

    def __init__(self, name: str, make: Callable[[], Callable[[], dict[str, Any]]]) -> None:
        self._name = name
        self._make = make
        self._found: tuple[float, dict[str, Any]] = time.monotonic(), {}
        self._problem: str | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            measure = self._make()
            while True:
                self._found = time.monotonic(), measure()
                time.sleep(EVERY_SECONDS)
        except Exception as error:  # noqa: BLE001 - reported with the event
            self._problem = str(error) or type(error).__name__

    @property
    def is_known(self) -> bool:
        return bool(self._found[1]) or self._problem is not None

    def fields(self, now: float) -> Iterable[tuple[str, Any]]:
        """Return the fields of :class:`Health` that it has measured."""
        at, fields = self._found
        if self._problem is not None:
            return [("missing", {self._name: self._problem})]
        return fields.items() if now < at + _SILENT_SECONDS else [("silent", {self._name: now - at})]


class _Host:
    """Measurements by psutil. Rates are of the time since the measurement before, and missing from the first one."""

    def __init__(self, path: Path) -> None:
        require("the health of a host", "system", "psutil")
        self._path = path
        self._last: tuple[float, dict[str, float]] | None = None
        # The first values of psutil are meaningless, see its manual.
        psutil.cpu_percent(percpu=True)

    def measure(self) -> dict[str, Any]:
        values: dict[str, float] = {}
        cores = psutil.cpu_percent(percpu=True) if self._last is not None else []
        if cores:
            values["cpu_percent"] = sum(cores) / len(cores)
        memory = psutil.virtual_memory()
        values |= {"memory_percent": memory.percent, "memory_used_bytes": memory.used}
        with contextlib.suppress(OSError):
            values["disk_used_percent"] = psutil.disk_usage(str(self._path)).percent
        return {"values": values | self._rates(), "cores": cores}

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
            if (disks := psutil.disk_io_counters()) is not None:
                counts |= {"disk_read_bytes": disks.read_bytes, "disk_write_bytes": disks.write_bytes}
        with contextlib.suppress(OSError, RuntimeError, NotImplementedError):
            interfaces = psutil.net_io_counters(pernic=True)
            others = [one for name, one in interfaces.items() if name != "lo" and not name.startswith("lo0")]
            counts["network_received_bytes"] = sum(one.bytes_recv for one in others)
            counts["network_sent_bytes"] = sum(one.bytes_sent for one in others)
        return counts


class _Gpus:
    """Measurements by NVML."""

    def __init__(self, path: Path) -> None:
        require("the health of GPUs", "system", "pynvml", "psutil")
        self._path = path
        self._xids: deque[tuple[float, int, int]] = deque(maxlen=64)  # time, index of the GPU, error
        try:
            nvml.nvmlInit()
            self._devices = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
            self._uuids = [str(nvml.nvmlDeviceGetUUID(device)) for device in self._devices]
        except nvml.NVMLError as error:
            raise ConfigurationError(f"no GPU can be seen through NVML: {error}") from None
        if not self._devices:
            raise ConfigurationError("no GPU can be seen through NVML: it shows none")
        # One for each: a GPU that has fallen off the bus has no identity any more.
        self._events: dict[int, Any] = {}
        for index, device in enumerate(self._devices):
            # Not every GPU reports its errors.
            with contextlib.suppress(nvml.NVMLError):
                events = nvml.nvmlEventSetCreate()
                nvml.nvmlDeviceRegisterEvents(device, nvml.nvmlEventTypeXidCriticalError, events)
                self._events[index] = events

    def measure(self) -> dict[str, Any]:
        self._take_xids()
        gpus = [self._measure_one(device) for device in self._devices]
        on = [{process.pid for process in self._get("ComputeRunningProcesses", device, [])} for device in self._devices]
        ranks, others = self._users(on)
        found = []
        for index, (values, reasons) in enumerate(gpus):
            xids = [xid for _, of, xid in self._xids if of == index]
            values |= {"throttled": float(bool(reasons)), "xid_errors": float(len(xids))}
            found.append(Gpu(index, values, sorted(ranks[index]), reasons, xids, sorted(others[index])))
        return {"gpus": found}

    def _measure_one(self, device: Any) -> tuple[dict[str, float], list[str]]:
        # The available values depend on the kind of GPU, and on whether it is shared in parts.
        get = self._get
        values: dict[str, float] = {}
        if (rates := get("UtilizationRates", device)) is not None:
            values["utilization_percent"] = rates.gpu
        if (memory := get("MemoryInfo", device)) is not None:
            values |= {"memory_used_bytes": memory.used, "memory_bytes": memory.total}
        if (milliwatts := get("PowerUsage", device)) is not None:
            values["power_watts"] = milliwatts / 1000
        if (celsius := get("Temperature", device, None, nvml.NVML_TEMPERATURE_GPU)) is not None:
            values["temperature_celsius"] = celsius
        if (megahertz := get("ClockInfo", device, None, nvml.NVML_CLOCK_SM)) is not None:
            values["clock_hertz"] = megahertz * 1e6
        bits = get("CurrentClocksThrottleReasons", device, 0)
        return values, list(dict.fromkeys(reason for bit, reason in _REASONS.items() if bits & bit))

    def _get(self, what: str, device: Any, without: Any = None, *arguments: Any) -> Any:
        try:
            return getattr(nvml, f"nvmlDeviceGet{what}")(device, *arguments)
        except nvml.NVMLError:
            return without

    def _take_xids(self) -> None:
        now = time.monotonic()
        while self._xids and now > self._xids[0][0] + _XID_SECONDS:
            self._xids.popleft()
        for index, events in self._events.items():
            with contextlib.suppress(nvml.NVMLError):  # at last a timeout
                while True:
                    self._xids.append((now, index, int(nvml.nvmlEventSetWait_v2(events, 0).eventData)))

    def _users(self, on: list[set[int]]) -> tuple[list[set[int]], list[set[int]]]:
        """Return the ranks and the foreign processes on each GPU, of all processes ``on`` it."""
        here = [one for one in read_run(self._path).last.publishers if one.get("host") == socket.gethostname()]
        ours = {one["pid"] for one in here}
        by_pid = {one["pid"]: one["rank"] for one in here if not is_actor(one["rank"])}
        ranks = [{by_pid[pid] for pid in pids & by_pid.keys()} for pids in on]
        if any(ranks):
            return ranks, [{pid for pid in pids - ours if not self._descends(pid, ours)} for pids in on]
        # In a container NVML shows no processes, or their numbers outside.
        for pid, rank in by_pid.items():
            if (index := self._device_of(pid)) is not None:
                ranks[index].add(rank)
        return ranks, [set() for _ in on]

    def _descends(self, pid: int, ours: set[int]) -> bool:
        try:
            return any(parent.pid in ours for parent in psutil.Process(pid).parents())
        except psutil.Error:
            return False

    def _device_of(self, pid: int) -> int | None:
        """Return the GPU that a rank uses by the rules of torchrun and CUDA."""
        try:
            environment = psutil.Process(pid).environ()
            visible = environment.get("CUDA_VISIBLE_DEVICES")
            names = list(map(str, range(len(self._uuids)))) if visible is None else visible.split(",")
            name = names[int(environment.get("LOCAL_RANK", 0)) % len(names)].strip()
            if name.isdigit():
                return int(name) if int(name) < len(self._uuids) else None
            return next((index for index, uuid in enumerate(self._uuids) if name and uuid.startswith(name)), None)
        except (psutil.Error, ValueError):
            return None


if __name__ == "__main__":
    main()
