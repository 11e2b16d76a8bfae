"""Memory of the GPU, as metrics."""

import logging
import math
from collections.abc import Mapping, Sequence

from offloop.bus.errors import ConfigurationError, check_at_least
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.demand import Demand, EventDemand
from offloop.bus.types.event import Event
from offloop.consumers.api.callback import Callback
from offloop.consumers.api.logger import Logger

_log = logging.getLogger("offloop")

_DEFAULT_KEYS = {
    "allocated_bytes.all.current": "current_allocated_mem",
    "active_bytes.all.current": "current_active_mem",
    "inactive_split_bytes.all.current": "current_inactive_mem",
    "reserved_bytes.all.current": "current_reserved_mem",
    "allocated_bytes.all.peak": "peak_allocated_mem",
    "active_bytes.all.peak": "peak_active_mem",
    "inactive_split_bytes.all.peak": "peak_inactive_mem",
    "reserved_bytes.all.peak": "peak_reserved_mem",
    "num_alloc_retries": "alloc_retries",
}
_DIGITS = 5


class MemoryMonitor(Callback):
    """Memory of the GPU, in gigabytes, in each batch.

    Logs ``memory/...`` at ``AFTER_TRAIN_BATCH``, when most of it is in use, for the step at which the batch began:
    allocated, active, inactive and reserved memory, now (``current_..._mem``) and at most so far (``peak_..._mem``), to
    five significant digits, and ``alloc_retries``, how often memory had to be released for an allocation. On a CPU it
    logs nothing, with one warning.

    Args:
        memory_keys: entries of ``torch.cuda.memory_stats()`` to log, and their names, instead of the above: a map, or
            texts such as ``allocated_bytes.all.current=my_bytes``. ``bytes`` in a name becomes ``gigabytes``. Entries
            that the GPU lacks are left out.
        dist_aggregate_batch_interval: how often, in batches from the first one on, to log ``..._avg``, ``..._min`` and
            ``..._max`` over all ranks as well.

    Reference: ``composer/callbacks/memory_monitor.py``."""

    resumes = False
    keeps: tuple[str, ...] = ("_reports",)

    def __init__(
        self,
        memory_keys: Mapping[str, str] | Sequence[str] | None = None,
        dist_aggregate_batch_interval: int | None = None,
    ) -> None:
        if dist_aggregate_batch_interval is not None:
            check_at_least("dist_aggregate_batch_interval", dist_aggregate_batch_interval, 1)
        self._keys = _DEFAULT_KEYS if memory_keys is None else _names(memory_keys)
        self._interval = dist_aggregate_batch_interval
        self._reports: dict[int, dict[int, dict[str, float]]] = {}  # the ranks' reports of incomplete batches
        self.all_ranks: bool = self._interval is not None

    def demand(self) -> Demand:
        # Without the statistics, as on a CPU, the event is of no use.
        return Demand({Event.INIT: EventDemand(), Event.AFTER_TRAIN_BATCH: EventDemand(None, {"memory_stats": 1})})

    def init(self, state: Snapshot, logger: Logger) -> None:
        if state.fields.get("device_name") == "cpu" and state.rank == 0:
            _log.warning("the memory monitor logs nothing: it works with CUDA devices, and the model is on cpu")

    def after_train_batch(self, state: Snapshot, logger: Logger) -> None:
        statistics = state.fields.get("memory_stats")
        if statistics is None:
            return
        report = _report(statistics, self._keys)
        if state.rank == 0:
            _log_memory(logger, report, state.timestamp.values.batch)
        batch = state.timestamp.values.batch
        if self._interval is not None and batch % self._interval == 0:
            reports = self._reports.setdefault(batch, {})
            reports[state.rank] = report
            if len(reports) == state.world_size:
                del self._reports[batch]
                _log_memory(logger, _over_ranks(list(reports.values())), batch)
            # A rank that ended before it reported leaves its batch incomplete for good.
            for old in sorted(self._reports)[:-2]:
                del self._reports[old]


def _names(memory_keys: Mapping[str, str] | Sequence[str]) -> dict[str, str]:
    if isinstance(memory_keys, Mapping):
        return dict(memory_keys)
    parts = [text.partition("=") for text in memory_keys]
    for (key, _, name), text in zip(parts, memory_keys, strict=True):
        if not key or not name:
            raise ConfigurationError(
                f"memory_keys has {text!r}: write KEY=NAME with a key of torch.cuda.memory_stats(), such as "
                "reserved_bytes.all.peak=peak_reserved"
            )
    return {key.strip(): name.strip() for key, _, name in parts}


def _report(statistics: Mapping[str, float], keys: Mapping[str, str]) -> dict[str, float]:
    report: dict[str, float] = {}
    for key, name in keys.items():
        value = statistics.get(key)
        if value is not None:
            report[name.replace("bytes", "gigabytes")] = (
                float(f"{value / 1e9:.{_DIGITS}g}") if "bytes" in key else value
            )
    return report


def _over_ranks(reports: list[dict[str, float]]) -> dict[str, float]:
    everywhere = [name for name in reports[0] if all(name in report for report in reports)]
    metrics: dict[str, float] = {}
    for name in everywhere:
        values = [report[name] for report in reports]
        metrics |= {
            f"{name}_avg": math.fsum(values) / len(values),
            f"{name}_min": min(values),
            f"{name}_max": max(values),
        }
    return metrics


def _log_memory(logger: Logger, report: Mapping[str, float], step: int) -> None:
    logger.log_metrics({f"memory/{name}": value for name, value in report.items()}, step)
