"""Inputs and outputs of the model's modules, as metrics."""

from collections.abc import Sequence

from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.demand import Demand, EventDemand
from offloop.bus.types.event import Event
from offloop.bus.types.time import Time, TimeUnit
from offloop.consumers.api.callback import Callback
from offloop.consumers.api.logger import Logger


class ActivationMonitor(Callback):
    """Statistics of the inputs and outputs of each module of the model, in one batch of each interval.

    Logs ``activations/STATISTIC/MODULE_input.N`` and ``activations/STATISTIC/MODULE_output.N``, with the dotted name of
    the module, at ``AFTER_TRAIN_BATCH``, for the step at which the batch began, from its first microbatch. Statistics
    are

    - ``average``, ``std``, ``max_abs`` and ``zeros``, the share of zeros, of all numbers of the tensor;
    - ``l2_norm``, ``max`` and ``kurtosis`` over its last dimension, averaged over the others.

    Tensors that are not of real numbers are left out.

    Args:
        interval: how often, from the first batch on: ``25ba`` for the batches that begin when 0, 25, 50, ... are done,
            ``1ep`` for the first one of each epoch, ``0.1dur``; a number counts batches. Each time costs some passes
            over all inputs and outputs.
        ignore_module_types: leave out modules whose name contains one of these, such as ``dropout``.

    Reference: ``composer/callbacks/activation_monitor.py``, which logs the outputs row by row; here they are logged as
    a whole."""

    def __init__(self, interval: int | str | Time = "25ba", ignore_module_types: Sequence[str] | None = None) -> None:
        self._interval = str(Time.from_input(interval, TimeUnit.BATCH))
        self._ignored = tuple(ignore_module_types or ())
        # Refuses an invalid interval now, where it was chosen.
        self.demand()

    def demand(self) -> Demand:
        return Demand({Event.AFTER_TRAIN_BATCH: EventDemand(self._interval, {"activations": self._interval})})

    def after_train_batch(self, state: Snapshot, logger: Logger) -> None:
        found = state.fields.get("activations", {})
        modules = {key: key.partition("/")[2].rpartition("_")[0] for key in found}
        kept = [key for key, module in modules.items() if not any(part in module for part in self._ignored)]
        logger.log_metrics({f"activations/{key}": found[key] for key in kept})
