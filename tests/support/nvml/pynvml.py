"""NVML in place of a real one: a folder for ``PYTHONPATH``. It has the GPUs of ``FAKE_GPUS``, JSON, a map for each.

Keys are ``uuid``, ``utilization``, ``used``, ``total``, ``milliwatts``, ``celsius``, ``megahertz``, ``reasons``,
``pids`` and ``xids``; what is missing is not supported. Without the variable there is no driver; ``"hang"`` hangs."""

import json
import os
import time
from types import SimpleNamespace
from typing import Any, NoReturn

NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, nvmlEventTypeXidCriticalError = 0, 1, 8
_gpus: list[dict[str, Any]] = []


class NVMLError(Exception):
    pass


def _refuse(text: str) -> NoReturn:
    raise NVMLError(text)


def nvmlInit() -> None:
    found = json.loads(os.environ.get("FAKE_GPUS", "null"))
    if found is None:
        _refuse("NVML Shared Library Not Found")
    if found == "hang":
        time.sleep(3600)
    _gpus[:] = found


def nvmlDeviceGetCount() -> int:
    return len(_gpus)


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    return index


def nvmlDeviceGetUUID(gpu: int) -> str:
    return str(_of(gpu, "uuid"))


def _of(gpu: int, name: str) -> Any:
    return _gpus[gpu][name] if name in _gpus[gpu] else _refuse("Not Supported")


def nvmlDeviceGetUtilizationRates(gpu: int) -> SimpleNamespace:
    return SimpleNamespace(gpu=_of(gpu, "utilization"))


def nvmlDeviceGetMemoryInfo(gpu: int) -> SimpleNamespace:
    return SimpleNamespace(used=_of(gpu, "used"), total=_of(gpu, "total"))


def nvmlDeviceGetPowerUsage(gpu: int) -> int:
    return int(_of(gpu, "milliwatts"))


def nvmlDeviceGetTemperature(gpu: int, _sensor: int) -> int:
    return int(_of(gpu, "celsius"))


def nvmlDeviceGetClockInfo(gpu: int, _kind: int) -> int:
    return int(_of(gpu, "megahertz"))


def nvmlDeviceGetCurrentClocksThrottleReasons(gpu: int) -> int:
    return int(_of(gpu, "reasons"))


def nvmlDeviceGetComputeRunningProcesses(gpu: int) -> list[SimpleNamespace]:
    return [SimpleNamespace(pid=pid) for pid in _of(gpu, "pids")]


def nvmlEventSetCreate() -> list[int]:
    return []


def nvmlDeviceRegisterEvents(gpu: int, _kinds: int, events: list[int]) -> None:
    events += _of(gpu, "xids")


def nvmlEventSetWait_v2(events: list[int], _milliseconds: int) -> SimpleNamespace:
    return SimpleNamespace(eventData=events.pop(0) if events else _refuse("Timeout"))
