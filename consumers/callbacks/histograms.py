"""Histograms of gradients and weights."""

from offloop.bus.errors import check_at_least, check_choice
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.histograms import BINS, EDGES
from offloop.consumers.api.callback import Callback
from offloop.consumers.api.logger import Logger
from offloop.consumers.callbacks.shards import WholeNorms

_FIELDS = {"gradients": "gradient_histograms", "parameters": "parameter_histograms"}


class Histograms(Callback):
    """Histograms of the gradients and weights of each parameter, every ``batch_log_interval`` batches.

    Logs ``histogram/gradients/PARAMETER`` and ``histogram/parameters/PARAMETER`` for loggers with histograms
    (TensorBoard, W&B), and the number of NaN and infinities, if there are any, as ``.../PARAMETER/not_finite``. Bins
    are powers of two, so that the ranks' shards of sharded weights add up.

    Args:
        of: ``gradients``, ``parameters``, or both.
        batch_log_interval: how often, in batches."""

    all_ranks = True
    resumes = False
    keeps: tuple[str, ...] = ("_gradients", "_parameters")

    def __init__(self, of: tuple[str, ...] = ("gradients", "parameters"), batch_log_interval: int = 100) -> None:
        check_at_least("batch_log_interval", batch_log_interval, 1)
        for one in of:
            check_choice("of", one, _FIELDS)
        self._gradients, self._parameters = (WholeNorms(field) for field in _FIELDS.values())
        # The request of this object.
        self.fields: tuple[str, ...] = tuple(_FIELDS[one] for one in of)
        self.every: int = batch_log_interval

    def batch_end(self, state: Snapshot, logger: Logger) -> None:
        for what, whole in zip(_FIELDS, (self._gradients, self._parameters), strict=True):
            for name, counts in (whole.whole(state) or {}).items():
                shown = f"histogram/{what}/{name}"
                if counts[BINS]:
                    logger.log_metrics({f"{shown}/not_finite": counts[BINS]})
                used = [number for number in range(BINS) if counts[number]]
                if used:
                    first, last = used[0], used[-1] + 1
                    logger.log_histogram(counts[first:last], EDGES[first : last + 1], shown)
