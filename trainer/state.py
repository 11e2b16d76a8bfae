"""What is going on in the training: everything that algorithms may read and change."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from bus.time import Time, TimeInput, Timestamp, TimeUnit
from trainer.batch import BatchKey, batch_get, batch_set
from trainer.durations import check_max_duration, counter_of

if TYPE_CHECKING:
    from trainer.algorithm import Algorithm
    from trainer.data import DataSpec
    from trainer.device import Device
    from trainer.evaluator import Evaluator

__all__ = ["State"]


class State:
    """The state of a training run, with the reference's names. Reference: ``composer/core/state.py``.

    Attributes:
        model: what is trained.
        optimizers, schedulers, algorithms, evaluators: in the order given to the trainer.
        train_dataloader: what is trained on.
        timestamp: training time; it advances just before ``BATCH_END`` and ``EPOCH_END``.
        previous_timestamp: training time before that; ``None`` before the first batch ended.
        batch: the batch in use; during the forward and backward passes, the microbatch.
        batch_size: samples in it.
        outputs, loss: of the last microbatch, on the device.
        batch_loss: of the last batch, on the device: the sum over microbatches of loss x (rows / batch rows).
        train_metrics: metric objects of the training by name.
        eval_metrics: metric objects by evaluator label and name.
        eval_metric_values: what they said at the end of the last evaluation, as plain numbers.
        device: where it all is.
        rank, world_size: which process this is, and of how many.
        stopped: whether :meth:`stop_training` was called.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        device: "Device",
        seed: int,
        run_name: str,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        schedulers: Sequence[Any] = (),
        algorithms: Iterable["Algorithm"] = (),
        evaluators: Iterable["Evaluator"] = (),
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        # The model is typed loosely: algorithms may put another one in its place, and the loop calls what a plain
        # module has not, such as `loss`.
        self.model: Any = model
        self.device = device
        self.seed = seed
        self.run_name = run_name
        self.optimizers = list(optimizers)
        self.schedulers = list(schedulers)
        self.algorithms = list(algorithms)
        self.evaluators = list(evaluators)
        self.rank = rank
        self.world_size = world_size

        self.train_dataloader: Any = None
        self.timestamp = Timestamp()
        self.previous_timestamp: Timestamp | None = None
        self.batch: Any = None
        self.batch_size: int | None = None
        self.outputs: Any = None
        self.loss: Any = None
        self.batch_loss: torch.Tensor | None = None
        self.train_metrics: dict[str, Any] = {}
        self.eval_metrics: dict[str, dict[str, Any]] = {}
        self.eval_metric_values: dict[str, dict[str, Any]] = {}
        self.stopped = False

        self.context_changed = True
        self._data: DataSpec | None = None
        self._dataloader_label: str | None = None
        self._dataloader_len: int | None = None
        self._eval_timestamp = Timestamp()
        self._predict_timestamp = Timestamp()
        self._max_duration: Time | None = None
        self._limit = (0, 0)

    @property
    def max_duration(self) -> Time | None:
        """How long to train. Takes a :class:`Time`, a time string or a number of epochs."""
        return self._max_duration

    @max_duration.setter
    def max_duration(self, duration: TimeInput | None) -> None:
        self._max_duration = None if duration is None else check_max_duration(duration)
        self._limit = (0, 0) if self._max_duration is None else counter_of(self._max_duration)
        self.context_changed = True

    @property
    def total_loss(self) -> torch.Tensor | None:
        """The loss of the last batch, detached, on the device; ``None`` before the first."""
        return None if self.batch_loss is None else self.batch_loss.detach()

    @property
    def dataloader(self) -> Any:
        """The dataloader in use."""
        return None if self._data is None else self._data.dataloader

    @property
    def dataloader_label(self) -> str | None:
        """``train``, or the label of the evaluator at work."""
        return self._dataloader_label

    @property
    def dataloader_len(self) -> int | None:
        """Batches in the dataloader in use, when it has a length."""
        return self._dataloader_len

    def set_dataloader(self, spec: "DataSpec | None", label: str | None) -> None:
        """Names the dataloader that is used from now on."""
        self._data = spec
        self._dataloader_label = label
        self._dataloader_len = None if spec is None else spec.length
        self.context_changed = True

    @property
    def dataloader_in_use(self) -> "tuple[DataSpec | None, str | None]":
        """What :meth:`set_dataloader` was last told, to come back to it."""
        return self._data, self._dataloader_label

    @property
    def eval_timestamp(self) -> Timestamp:
        """Time within the current evaluation, or the last one."""
        return self._eval_timestamp

    @eval_timestamp.setter
    def eval_timestamp(self, timestamp: Timestamp) -> None:
        self._eval_timestamp = timestamp
        self.context_changed = True

    @property
    def predict_timestamp(self) -> Timestamp:
        """Time within the current prediction, or the last one."""
        return self._predict_timestamp

    @predict_timestamp.setter
    def predict_timestamp(self, timestamp: Timestamp) -> None:
        self._predict_timestamp = timestamp
        self.context_changed = True

    def batch_get_item(self, key: BatchKey) -> Any:
        """A part of the batch: an index (0 for inputs and 1 for targets in a pair), a name in a mapping, a sequence of
        these for a nested part, or a pair of functions ``(get, set)``.

        Raises :class:`bus.errors.ConfigurationError` when the batch has no such part."""
        return batch_get(self.batch, key)

    def batch_set_item(self, key: BatchKey, value: Any) -> None:
        """Puts a value in place of a part of the batch; :attr:`batch` is a new batch afterwards where the old one
        cannot be written to, such as a tuple."""
        self.batch = batch_set(self.batch, key, value)

    def reached_max_duration(self) -> bool:
        """Whether the training is to end here."""
        index, limit = self._limit
        return self.timestamp.values[index] >= limit

    def get_elapsed_duration(self) -> Time | None:
        """Which part of ``max_duration`` is over, in the unit ``dur``; ``None`` without one."""
        if self._max_duration is None:
            return None
        elapsed: Time = self.timestamp.get(self._max_duration.unit) / self._max_duration
        return elapsed

    def stop_training(self) -> None:
        """Ends the training after the batch at hand; evaluations that are due still run."""
        self.max_duration = Time(self.timestamp.values[2], TimeUnit.BATCH)
        self.stopped = True
