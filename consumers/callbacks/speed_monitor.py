"""Throughput of a run."""

from collections import deque
from typing import Any, Literal, TypeAlias

from offloop.bus.errors import check_at_least, check_choice
from offloop.bus.protocol.snapshot import Snapshot
from offloop.consumers.api.callback import Callback
from offloop.consumers.api.logger import Logger

TimeUnitName: TypeAlias = Literal["seconds", "minutes", "hours", "days"]

SECONDS_IN = {"seconds": 1, "minutes": 60, "hours": 60 * 60, "days": 24 * 60 * 60}


# Teraflops per second, dense: where a datasheet gives only the figure "with sparsity", half of it. 16 stands for
# float16 and bfloat16, which are equally fast. From NVIDIA's datasheets "B200 (HGX B200)", "H200 Tensor Core GPU",
# "H100 Tensor Core GPU" (SXM, PCIe and NVL), "A100 Tensor Core GPU", "A30", "A10", "L40S", "L4", "V100" and "T4". The
# first entry whose words all occur in the device's name counts, so special ones come first.
_TERAFLOPS: tuple[tuple[str, dict[str, float]], ...] = (
    ("B200", {"fp32": 75, "tf32": 1125, "16": 2250, "fp8": 4500}),
    ("H200", {"fp32": 67, "tf32": 494.5, "16": 989.5, "fp8": 1979}),
    ("H100 PCIe", {"fp32": 51, "tf32": 378, "16": 756, "fp8": 1513}),
    ("H100 NVL", {"fp32": 60, "tf32": 417.5, "16": 835.5, "fp8": 1671}),
    ("H100", {"fp32": 67, "tf32": 494.5, "16": 989.5, "fp8": 1979}),
    ("A100", {"fp32": 19.5, "tf32": 156, "16": 312}),
    ("A30", {"fp32": 10.3, "tf32": 82, "16": 165}),
    ("A10", {"fp32": 31.2, "tf32": 62.5, "16": 125}),
    ("L40S", {"fp32": 91.6, "tf32": 183, "16": 362, "fp8": 733}),
    ("L4", {"fp32": 30.3, "tf32": 60, "16": 121, "fp8": 242.5}),
    ("V100 SXM2", {"fp32": 15.7, "fp16": 125}),
    ("V100 PCIe", {"fp32": 14, "fp16": 112}),
    ("T4", {"fp32": 8.1, "fp16": 65}),
)
_KIND = {"fp16": "16", "bf16": "16"}


class SpeedMonitor(Callback):
    """Batches, samples, tokens and FLOPs a second over the last batches, and the time spent training and evaluating.

    Logs at ``BATCH_END``, from the training time of the events alone:

    - ``throughput/batches_per_sec`` and ``throughput/samples_per_sec`` after ``window_size`` + 1 batches;
    - ``throughput/tokens_per_sec`` when tokens are counted;
    - ``throughput/flops_per_sec`` when the snapshot has ``flops_per_batch`` (FLOPs of one batch over all ranks), and
    ``throughput/device/mfu``, the share of the device's peak;
    - each of them as ``throughput/device/...`` too, divided by the number of ranks;
    - ``time/train``, ``time/val``, ``time/total`` in ``time_unit``, logged as the hyperparameter ``time/unit`` if it is
    not hours; they continue where a training resumes from a checkpoint.

    ``gpu_flops_available`` is the device's peak in FLOPs per second, by default its published figure, if known.
    Reference: ``composer/callbacks/speed_monitor.py``."""

    def __init__(
        self, window_size: int = 100, gpu_flops_available: float | None = None, time_unit: TimeUnitName = "hours"
    ) -> None:
        check_at_least("window_size", window_size, 1)
        check_choice("time_unit", time_unit, SECONDS_IN)
        self._gpu_flops_available = gpu_flops_available
        self._time_unit = time_unit
        self._divider = SECONDS_IN[time_unit]
        self._full = window_size + 1
        # For each batch the counts of batches, samples and tokens, and the seconds trained.
        self._batches: deque[tuple[int, int, int, float]] = deque(maxlen=self._full)
        self._flops: deque[float] = deque(maxlen=self._full)
        self._eval_seconds = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"total_eval_wct": self._eval_seconds, "batches": list(self._batches), "flops": list(self._flops)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._eval_seconds = state["total_eval_wct"]
        self._batches = deque(map(tuple, state.get("batches", ())), self._full)
        self._flops = deque(state.get("flops", ()), self._full)

    def fit_start(self, state: Snapshot, logger: Logger) -> None:
        if self._time_unit != "hours":
            logger.log_hyperparameters({"time/unit": self._time_unit})
        microseconds = state.fields.get("total_eval_wct")
        if microseconds is not None:
            self._eval_seconds = microseconds / 1e6

    def batch_end(self, state: Snapshot, logger: Logger) -> None:
        timestamp = state._body.timestamp  # without a Timestamp: every batch of a run passes here
        train_seconds = timestamp.total_wct / 1e6
        now = (timestamp.batch, timestamp.sample, timestamp.token, train_seconds)
        batches = self._batches
        if batches and train_seconds < batches[-1][3]:
            # The training continues from an earlier checkpoint, or begins again.
            batches.clear()
            self._flops.clear()
        batches.append(now)
        flops = state.get("flops_per_batch")
        if flops is not None:
            self._flops.append(flops)
        first = batches[0]
        elapsed = train_seconds - first[3]
        metrics: dict[str, float] = {}
        # A loop that publishes no training time has nothing to divide by.
        if elapsed > 0 and len(batches) == self._full:
            ranks = state.get("world_size", 1)
            # Not every batch has an event in a stream made from a log, and a custom loop may count none.
            batches_per_sec = (now[0] - first[0] or self._full - 1) / elapsed
            samples_per_sec = (now[1] - first[1]) / elapsed
            tokens_per_sec = (now[2] - first[2]) / elapsed
            metrics = {
                "throughput/batches_per_sec": batches_per_sec,
                "throughput/samples_per_sec": samples_per_sec,
                "throughput/device/batches_per_sec": batches_per_sec / ranks,
                "throughput/device/samples_per_sec": samples_per_sec / ranks,
            }
            if tokens_per_sec > 0:
                metrics["throughput/tokens_per_sec"] = tokens_per_sec
                metrics["throughput/device/tokens_per_sec"] = tokens_per_sec / ranks
        if elapsed > 0 and len(self._flops) == self._full:
            metrics |= self._flops_metrics(elapsed, state)
        divider, eval_seconds = self._divider, self._eval_seconds
        metrics["time/train"] = train_seconds / divider
        metrics["time/val"] = eval_seconds / divider
        metrics["time/total"] = (train_seconds + eval_seconds) / divider
        logger.log_metrics(metrics)

    def eval_end(self, state: Snapshot, logger: Logger) -> None:
        self._eval_seconds += state.eval_timestamp.values.total_wct / 1e6

    def _flops_metrics(self, elapsed: float, state: Snapshot) -> dict[str, float]:
        flops, ranks = sum(list(self._flops)[1:]) / elapsed, state.world_size
        metrics = {"throughput/flops_per_sec": flops, "throughput/device/flops_per_sec": flops / ranks}
        peak = self._gpu_flops_available or peak_flops(state.get("device_name"), state.get("precision"))
        if peak:
            metrics["throughput/device/mfu"] = flops / ranks / peak
        return metrics


def peak_flops(device_name: str | None, precision: str | None) -> float | None:
    """Return a device's peak in floating point operations per second; ``None`` for an unknown device.

    ``device_name`` as CUDA names it (``NVIDIA A100-SXM4-80GB``); ``precision`` is ``fp32``, ``tf32``, ``fp16``,
    ``bf16`` or ``fp8``, with or without ``amp_``. Reference: ``composer/callbacks/speed_monitor.py``."""
    if device_name is None or precision is None:
        return None
    kind = precision.lower().removeprefix("amp_")
    words = set(device_name.lower().replace("-", " ").split())
    for model, teraflops in _TERAFLOPS:
        if words.issuperset(model.lower().split()):
            figure = teraflops.get(kind, teraflops.get(_KIND.get(kind, kind)))
            return None if figure is None else figure * 1e12
    return None
