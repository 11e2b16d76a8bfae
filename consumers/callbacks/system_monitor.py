"""Load of the hosts, as metrics."""

from collections.abc import Sequence
from functools import partial

from offloop.bus.errors import ConfigurationError
from offloop.bus.printing import one_line, say
from offloop.bus.protocol.host_windows import HostWindow
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.health import HEALTH, Health
from offloop.consumers.api.callback import Callback, CannotWorkError
from offloop.consumers.api.logger import Logger

_say = partial(say, err=True)


class SystemMonitor(Callback):
    """CPU, memory, disk, network and GPUs of the training's hosts.

    The broker of each host measures every five seconds while this callback, or another consumer, requests it. Logs at
    most once in ``every_seconds`` of event time:

    - ``system/cpu_percent``: busy share of all cores since the last time;
    - ``system/memory_percent``, ``system/memory_used_bytes``;
    - ``system/disk_used_percent``: of the file system of the run's folder; ``system/disk_read_bytes_per_sec``,
    ``system/disk_write_bytes_per_sec``: all disks together;
    - ``system/network_received_bytes_per_sec``, ``system/network_sent_bytes_per_sec``: all interfaces but loopback;
    - of the GPUs that NVML shows: ``system/gpu_utilization_percent`` (mean), ``system/gpu_memory_used_bytes`` (sum),
    ``system/gpu_memory_percent`` (of all their memory), ``system/gpu_power_watts`` (sum),
    ``system/gpu_temperature_celsius`` (the hottest), ``system/gpu_clock_hertz`` (the slowest),
    ``system/gpu_throttled`` (how many have a reduced clock), ``system/gpu_xid_errors`` (in the last minute).

    With ``log_all_data`` also ``system/cpuN_percent`` of each core and ``system/gpuN/...`` of each GPU. Unavailable
    values are left out. In a run on several hosts, read with ``--stream``, the metrics of hosts other than the first
    are ``system/HOST/...``; a replay does not have them.

    ``gpu_available``: ``True`` ends the callback when NVML shows no GPU, ``False`` ignores GPUs, ``None`` reports a
    missing GPU once on standard error. Needs ``pip install 'offloop[system]'`` where the training runs. Reference:
    ``composer/callbacks/system_metrics_monitor.py``."""

    keeps: tuple[str, ...] = ("_logged_ns", "_reported")

    def __init__(
        self, gpu_available: bool | None = None, log_all_data: bool = False, every_seconds: float = 10.0
    ) -> None:
        if not every_seconds > 0:
            raise ConfigurationError(f"every_seconds is {every_seconds}: use a number of seconds above 0")
        self._gpu_available = gpu_available
        self._log_all_data = log_all_data
        self._every_ns = round(every_seconds * 1e9)
        self._logged_ns: dict[str, int] = {}  # by the prefix of the metrics
        self._reported: list[str] = []

    @Callback.on(HEALTH.value)
    def health(self, state: Snapshot, logger: Logger) -> None:
        if (health := Health.of(state.fields)) is not None:
            self._log(health, "system", state.time_ns, logger)

    def host_windows(self, windows: Sequence[HostWindow], logger: Logger) -> None:
        for window in windows:
            # The first host's come as events.
            if window.health is not None and 0 not in window.ranks:
                self._log(window.health, f"system/{one_line(window.host)}", window.time_ns, logger, window.last)

    def _log(self, health: Health, prefix: str, time_ns: int, logger: Logger, step: int | None = None) -> None:
        if 0 <= time_ns - self._logged_ns.get(prefix, -self._every_ns) < self._every_ns:
            return
        self._logged_ns[prefix] = time_ns
        for what, reason in health.missing.items():
            self._report(what, f"{one_line(reason)} (on {one_line(health.host)})")
        metrics = health.metrics(self._log_all_data)
        logger.log_metrics(
            {
                f"{prefix}/{name}": value
                for name, value in metrics.items()
                if self._gpu_available is not False or not name.startswith("gpu")
            },
            step,
        )

    def _report(self, what: str, reason: str) -> None:
        if what == "gpus" and self._gpu_available:
            raise CannotWorkError(reason)
        if what not in self._reported and (what != "gpus" or self._gpu_available is None):
            self._reported.append(what)
            _say(f"{reason}; {'system/gpu_...' if what == 'gpus' else 'system/...'} is not logged")
