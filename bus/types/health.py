"""Health of a host: measured by its broker while a consumer requests it, as an event of an actor."""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

import msgspec

from offloop.bus.types.event import Event

HEALTH = Event("@offloop.health")
"""The event with a host's health; its fields are those of :class:`Health`."""
HOST = "host"
"""The role of the actor that publishes it."""
POWER_LIMIT = "the power limit"
"""Reason of a GPU's low clock. A busy GPU may run at this limit all the time."""

_COMBINED: dict[str, Callable[[list[float]], float]] = {
    "utilization_percent": fmean,
    "memory_used_bytes": sum,
    "memory_bytes": sum,
    "power_watts": sum,
    "temperature_celsius": max,
    "clock_hertz": min,
    "throttled": sum,
    "xid_errors": sum,
}
_EXHAUSTED = (
    ("memory_percent", 95.0, "the memory of {} is {:.0f} % full"),
    ("cpu_percent", 95.0, "the processors of {} are {:.0f} % busy"),
    ("disk_used_percent", 99.0, "the disk of {} is {:.0f} % full"),
)


class Gpu(msgspec.Struct, frozen=True):
    index: int
    values: dict[str, float] = {}  # by the name of the metric
    ranks: list[int] = []  # ranks that use it, as far as known
    reasons: list[str] = []  # why its clock is reduced
    xids: list[int] = []  # numbers of its errors in the last minute
    others: list[int] = []  # processes on it that do not belong to the run


class Health(msgspec.Struct, frozen=True):
    """One measurement of a host. Unavailable values are missing."""

    host: str
    values: dict[str, float] = {}  # of the whole host, by the name of the metric
    cores: list[float] = []  # busy percent of each core
    gpus: list[Gpu] = []
    missing: dict[str, str] = {}  # ``host`` or ``gpus`` to the reason why they cannot be measured
    silent: dict[str, float] = {}  # ``host`` or ``gpus`` to the seconds since the measurement hangs

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "Health | None":
        """Return the health in an event's fields; ``None`` for malformed ones."""
        try:
            return msgspec.convert(dict(fields), cls)
        except msgspec.ValidationError:
            return None

    def metrics(self, each: bool) -> dict[str, float]:
        """Return all values by name; of several GPUs together, and with ``each`` of every core and GPU."""
        metrics = dict(self.values)
        for name, combine in _COMBINED.items():
            if values := [gpu.values[name] for gpu in self.gpus if name in gpu.values]:
                metrics[f"gpu_{name}"] = combine(values)
        if all_bytes := metrics.pop("gpu_memory_bytes", 0):
            metrics["gpu_memory_percent"] = 100 * metrics["gpu_memory_used_bytes"] / all_bytes
        if each:
            metrics |= {f"cpu{number}_percent": busy for number, busy in enumerate(self.cores)}
            metrics |= {
                f"gpu{gpu.index}/{name}": value
                for gpu in self.gpus
                for name, value in gpu.values.items()
                if name != "memory_bytes"
            }
        return metrics

    def cause(self, rank: int | None) -> str | None:
        """Return what slows the rank down, or without one the host; ``None`` if nothing shows."""
        for gpu in self.gpus:
            if (rank is None or rank in gpu.ranks) and (found := self._cause_on(gpu)) is not None:
                return f"GPU {gpu.index} of {self.host} {found}"
        if "gpus" in self.silent:
            return f"the GPUs of {self.host} have not answered for {self.silent['gpus']:.0f} s"
        for name, limit, text in _EXHAUSTED:
            if (value := self.values.get(name, 0.0)) >= limit:
                return text.format(self.host, value)
        return None

    def _cause_on(self, gpu: Gpu) -> str | None:
        if gpu.xids:
            return f"has reported XID {gpu.xids[-1]}"
        # If all GPUs are at their power limit, it does not make one slower than the others.
        is_usual = len(self.gpus) > 1 and all(POWER_LIMIT in one.reasons for one in self.gpus)
        if reasons := [reason for reason in gpu.reasons if not (is_usual and reason == POWER_LIMIT)]:
            return f"is throttled by {' and '.join(reasons)}"
        return f"is shared with process {gpu.others[0]}" if gpu.others else None


def recent_health() -> defaultdict[str, deque[Health]]:
    """Return an empty map of hosts to their last measurements, of half a minute."""
    return defaultdict(lambda: deque(maxlen=6))


def find_cause(measured: Sequence[Health], rank: int | None) -> str | None:
    """Return the cause by the newest of these measurements that shows one, see :meth:`Health.cause`."""
    return next((cause for one in reversed(measured) if (cause := one.cause(rank)) is not None), None)
