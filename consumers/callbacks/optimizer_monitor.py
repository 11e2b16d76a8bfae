"""Norms of gradients, and the optimizer's values for each parameter, as metrics."""

import math
from collections.abc import Sequence
from typing import Any

from offloop.bus.errors import check_at_least
from offloop.bus.protocol.host_windows import HostWindow
from offloop.bus.protocol.snapshot import Snapshot
from offloop.consumers.api.callback import Callback
from offloop.consumers.api.logger import Logger
from offloop.consumers.callbacks.shards import HostNorms, WholeNorms

_GLOBAL = "l2_norm/grad/global"


class OptimizerMonitor(Callback):
    """L2 norms of the gradients, and the optimizer's report of each parameter, every ``batch_log_interval`` batches.

    Logs at ``BATCH_END``, after the step and under its number:

    - ``l2_norm/grad/PARAMETER``, of each trained parameter;
    - ``l2_norm/grad/global``, of all of them together;
    - the results of the optimizer's method ``report_per_parameter_metrics``, where it has one, such as
    ``l2_norm/moment/PARAMETER``, ``l2_norm/param/PARAMETER`` and ``l2_norm/update/PARAMETER``.

    The trainer computes the norms in requested batches only. Gradients are those that the optimizer uses: of the whole
    batch, unscaled, and clipped where an algorithm clips.

    Of sharded weights (FSDP2, tensor parallelism) each rank computes the norms of its shards, and they are added up
    here. The optimizer's report is then ``l2_norm/moment/PARAMETER`` and ``l2_norm/param/PARAMETER``. Of weights that
    are sharded over several hosts there is only ``l2_norm/grad/global``, once a window (``--stream``).

    Args:
        log_optimizer_metrics: log the optimizer's report.
        batch_log_interval: how often, in batches: 10 for the batches 10, 20, ...
        only_global: log ``l2_norm/grad/global`` alone.

    Reference: ``composer/callbacks/optimizer_monitor.py``."""

    all_ranks = True
    resumes = False
    keeps: tuple[str, ...] = ("_norms",)

    def __init__(
        self, log_optimizer_metrics: bool = True, batch_log_interval: int = 10, only_global: bool = False
    ) -> None:
        check_at_least("batch_log_interval", batch_log_interval, 1)
        self._field = "gradient_norms"
        if only_global:
            self._field = "gradient_norm"
        elif log_optimizer_metrics:
            self._field = "optimizer_norms"
        self._norms = WholeNorms(self._field)
        self._of_hosts = HostNorms()
        # The request of this object.
        self.fields: tuple[str, ...] = (self._field,)
        self.every: int = batch_log_interval

    def batch_end(self, state: Snapshot, logger: Logger) -> None:
        norms = self._norms.whole(state)
        if norms is not None:
            logger.log_metrics(self._metrics(norms))

    def host_windows(self, windows: Sequence[HostWindow], logger: Logger) -> None:
        for batch, norm in self._of_hosts.add(windows):
            logger.log_metrics({_GLOBAL: norm}, batch)

    def _metrics(self, norms: Any) -> dict[str, float]:
        if self._field == "optimizer_norms":
            return dict(norms)
        if self._field == "gradient_norm":
            return {_GLOBAL: norms}
        metrics = {f"l2_norm/grad/{name}": norm for name, norm in norms.items()}
        return metrics | {_GLOBAL: math.sqrt(math.fsum(norm * norm for norm in norms.values()))}
