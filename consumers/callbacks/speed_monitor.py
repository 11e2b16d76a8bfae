"""How fast a run trains."""

from collections import deque
from typing import Any, Literal, TypeAlias

from offloop.bus.errors import ConfigurationError
from offloop.bus.protocol.snapshot import Snapshot
from offloop.consumers.api.callback import Callback
from offloop.consumers.api.logger import Logger
from offloop.consumers.callbacks.peak_flops import peak_flops

TimeUnitName: TypeAlias = Literal["seconds", "minutes", "hours", "days"]

_SECONDS_IN = {"seconds": 1, "minutes": 60, "hours": 60 * 60, "days": 24 * 60 * 60}


class SpeedMonitor(Callback):
    """Batches, samples, tokens and FLOPs a second over the last batches, and the time spent training and evaluating.

    Logs at ``BATCH_END``, from the training time of the events alone:

    - ``throughput/batches_per_sec`` and ``throughput/samples_per_sec`` once ``window_size`` + 1 batches are over;
    - ``throughput/tokens_per_sec`` when there are tokens;
    - ``throughput/flops_per_sec`` when the snapshot has ``flops_per_batch`` (FLOPs of one batch over all ranks), and
      ``throughput/device/mfu``, the share of the device's peak;
    - each of them as ``throughput/device/...`` too, divided by the number of ranks;
    - ``time/train``, ``time/val``, ``time/total`` in ``time_unit``, logged as the hyperparameter ``time/unit``
      where it is not hours; they continue where a training resumes from a checkpoint.

    ``gpu_flops_available`` is the device's peak in FLOPs per second; without it the published figure of the device is
    taken, if it is known. Reference: ``composer/callbacks/speed_monitor.py``.
    """

    def __init__(
        self,
        window_size: int = 100,
        gpu_flops_available: float | None = None,
        time_unit: TimeUnitName = "hours",
    ) -> None:
        if window_size < 1:
            raise ConfigurationError(f"window_size counts batches and is at least 1, not {window_size}")
        if time_unit not in _SECONDS_IN:
            raise ConfigurationError(f"time_unit {time_unit!r} is not known: use {', '.join(_SECONDS_IN)}")
        self._gpu_flops_available = gpu_flops_available
        self._time_unit = time_unit
        self._divider = _SECONDS_IN[time_unit]
        self._full = window_size + 1
        self._batches: deque[int] = deque(maxlen=self._full)
        self._samples: deque[int] = deque(maxlen=self._full)
        self._tokens: deque[int] = deque(maxlen=self._full)
        self._seconds: deque[float] = deque(maxlen=self._full)
        self._flops: deque[float] = deque(maxlen=self._full)
        self._window: dict[str, deque[Any]] = {
            "batches": self._batches,
            "samples": self._samples,
            "tokens": self._tokens,
            "seconds": self._seconds,
            "flops": self._flops,
        }
        self._eval_seconds = 0.0

    def state_dict(self) -> dict[str, Any]:
        window = {name: list(values) for name, values in self._window.items()}
        return {"total_eval_wct": self._eval_seconds, "window": window}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._eval_seconds = state["total_eval_wct"]
        for name, values in state.get("window", {}).items():
            self._window[name].extend(values)

    def fit_start(self, state: Snapshot, logger: Logger) -> None:
        if self._time_unit != "hours":
            logger.log_hyperparameters({"time/unit": self._time_unit})
        microseconds = state.fields.get("total_eval_wct")
        if microseconds is not None:
            self._eval_seconds = microseconds / 1e6

    def batch_end(self, state: Snapshot, logger: Logger) -> None:
        timestamp = state.timestamp.values
        train_seconds = timestamp.total_wct / 1e6
        self._batches.append(timestamp.batch)
        self._samples.append(timestamp.sample)
        self._tokens.append(timestamp.token)
        self._seconds.append(train_seconds)
        flops = state.get("flops_per_batch")
        if flops is not None:
            self._flops.append(flops)
        elapsed = train_seconds - self._seconds[0]
        # A loop that publishes no training time has nothing to divide by.
        if elapsed > 0:
            self._log_throughput(elapsed, state, logger)
        logger.log_metrics(
            {
                "time/train": train_seconds / self._divider,
                "time/val": self._eval_seconds / self._divider,
                "time/total": (train_seconds + self._eval_seconds) / self._divider,
            }
        )

    def eval_end(self, state: Snapshot, logger: Logger) -> None:
        self._eval_seconds += state.eval_timestamp.values.total_wct / 1e6

    def _log_throughput(self, elapsed: float, state: Snapshot, logger: Logger) -> None:
        ranks = state.world_size
        if len(self._seconds) == self._full:
            # Not every batch has an event in a stream made from a log. A loop of one's own may count none.
            batches = (self._batches[-1] - self._batches[0] or len(self._seconds) - 1) / elapsed
            samples = (self._samples[-1] - self._samples[0]) / elapsed
            tokens = (self._tokens[-1] - self._tokens[0]) / elapsed
            logger.log_metrics(
                {
                    "throughput/batches_per_sec": batches,
                    "throughput/samples_per_sec": samples,
                    "throughput/device/batches_per_sec": batches / ranks,
                    "throughput/device/samples_per_sec": samples / ranks,
                }
            )
            if tokens > 0:
                logger.log_metrics(
                    {"throughput/tokens_per_sec": tokens, "throughput/device/tokens_per_sec": tokens / ranks}
                )
        if len(self._flops) == self._full:
            flops = sum(list(self._flops)[1:]) / elapsed
            logger.log_metrics({"throughput/flops_per_sec": flops, "throughput/device/flops_per_sec": flops / ranks})
            peak = self._gpu_flops_available or peak_flops(state.get("device_name"), state.get("precision"))
            if peak:
                logger.log_metrics({"throughput/device/mfu": flops / ranks / peak})
