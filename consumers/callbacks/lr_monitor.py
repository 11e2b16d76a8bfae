"""Learning rates as metrics."""

from offloop.bus.protocol.snapshot import Snapshot
from offloop.consumers.api.callback import Callback
from offloop.consumers.api.logger import Logger


class LRMonitor(Callback):
    """Learning rate of every parameter group, after each batch.

    Logs ``lr-OPTIMIZER/groupN`` at ``BATCH_END``: the rate of the next batch, because schedulers have stepped by then.
    Reference: ``composer/callbacks/lr_monitor.py``."""

    def batch_end(self, state: Snapshot, logger: Logger) -> None:
        metrics = {}
        for optimizer, rates in state.get("lr", {}).items():
            for group, rate in enumerate(rates):
                metrics[f"lr-{optimizer}/group{group}"] = rate
        logger.log_metrics(metrics)
