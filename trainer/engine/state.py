"""The state of a training, the algorithms that may change it, and their logger."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from weakref import WeakMethod

import torch

from offloop.bus.publisher.own_events import OwnEvents
from offloop.bus.publisher.publisher import Publisher
from offloop.bus.types.deferred import LeftOut
from offloop.bus.types.event import Event
from offloop.bus.types.intervals import counter_of
from offloop.bus.types.time import Time, TimeInput, TimeUnit
from offloop.bus.types.timestamp import Timestamp
from offloop.trainer.arguments.durations import check_max_duration
from offloop.trainer.arguments.values import to_builtin
from offloop.trainer.device.batch import BatchKey, batch_get, batch_set

if TYPE_CHECKING:
    from offloop.trainer.data.evaluator import Evaluator
    from offloop.trainer.data.spec import DataSpec
    from offloop.trainer.device.device import Device


class Algorithm(ABC):
    """A change to the training that is applied at certain events. It may read and write all of the state.

    A callback only observes: it gets a copy of the state and runs in another process. An algorithm is part of the
    training, which waits for it and fails with it. Define both methods::

        class HalveTheRate(Algorithm):
            def match(self, event, state):
                return event is Event.EPOCH_END

            def apply(self, event, state, logger):
                for group in state.optimizers[0].param_groups:
                    group["lr"] /= 2
                logger.log_metrics({"rate": group["lr"]})

    Reference: ``composer/core/algorithm.py``."""

    position: ClassVar[Mapping[Event, Literal["first", "last"]]] = {}
    """The events at which it is applied before all others, or after them."""

    @abstractmethod
    def match(self, event: Event, state: "State") -> bool:
        """Return whether to apply it at this event. Called at every event, so keep it short."""

    @abstractmethod
    def apply(self, event: Event, state: "State", logger: "AlgorithmLogger") -> int | None:
        """Change the state. The result is ignored; the reference's algorithms return an exit code."""

    def check(self, state: "State") -> None:  # noqa: B027 - most algorithms go with every training
        """Raise :class:`offloop.bus.errors.ConfigurationError` for a training to which it cannot be applied.

        Called before anything is started, with the model given to the trainer."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything that is saved to resume the algorithm in another process."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 - most algorithms have nothing to restore
        """Restore the result of :meth:`state_dict`."""


class AlgorithmLogger(OwnEvents):
    """Collects logged values. They travel with the next published event, as its field ``logged``.

    Reference: ``composer/loggers/logger.py``."""

    def __init__(self, state: "State") -> None:
        super().__init__()
        self._state = state
        self.requested_events: set[Event] = set()
        self._publisher: Publisher | None = None
        self._send_own: WeakMethod[Callable[[Event, dict[str, Any]], None]] | None = None
        self.entries: list[list[Any]] = []
        """Unpublished pairs of step and metrics; always the same list."""
        self.left_out: LeftOut = LeftOut(state.run_name)
        """The values that could not be logged."""

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log numbers by name at a step, by default the number of finished batches.

        A tensor is read at once, which waits for a GPU: log numbers if that matters. A value that cannot be sent is
        left out, and reported once for each name."""
        if step is None:
            step = self._state.timestamp.values.batch
        values = {}
        for name, value in metrics.items():
            try:
                values[name] = self._value_of(name, value)
            except Exception as error:  # noqa: BLE001  it is the user's value, whose methods may raise anything
                self.left_out.add(name, error)
        if values:
            self.entries.append([step, values])

    def _value_of(self, name: str, value: Any) -> Any:
        return to_builtin(value)

    def connect(self, publisher: Publisher, send_own: Callable[[Event, dict[str, Any]], None]) -> None:
        """Publish custom events and rows of tables from here on, by ``send_own``, a method."""
        self.requested_events, self._publisher = publisher.requested_events, publisher
        # Its object has this logger: a cycle would keep the model of an abandoned trainer.
        self._send_own = WeakMethod(send_own)

    def publish_own(self, event: Event, fields: dict[str, Any]) -> None:
        """Publish a requested custom event or rows of a table."""
        send_own = None if self._send_own is None else self._send_own()
        if send_own is not None:
            send_own(event, fields)

    def room_for_rows(self) -> int:
        return 0 if self._publisher is None else self._publisher.room_for_rows()

    def _refuse_own(self, what: str, error: Exception) -> None:
        self.left_out.add(what, error)

    def _default_step(self) -> int:
        return self._state.timestamp.values.batch

    def take(self) -> list[list[Any]]:
        """Return everything logged since the last call, as pairs of step and metrics."""
        entries = list(self.entries)
        # A signal handler or another thread may have logged more meanwhile.
        del self.entries[: len(entries)]
        return entries


class State:
    """The state of a training run, with the reference's names. Reference: ``composer/core/state.py``.

    Attributes:
        model: the model.
        optimizers, schedulers, algorithms, evaluators: in the order given to the trainer.
        train_dataloader: the training data.
        dataloader_label: ``train``, ``predict``, or the label of the current evaluator.
        dataloader_len: batches in the current dataloader, if it has a length.
        timestamp: training time; it advances just before ``BATCH_END`` and ``EPOCH_END``.
        previous_timestamp: the training time before; ``None`` in the first batch.
        batch: the current batch; during the forward and backward passes, the microbatch.
        batch_size: samples in it.
        outputs, loss: of the last microbatch, on the device.
        batch_loss: of the last batch, on the device: the sum over microbatches of loss x (rows / batch rows). A number
            where another loop's loss is read at once, on a CPU.
        batch_losses: the parts of a loss that is a map or a list, by name, without the total.
        train_metrics: metric objects of the training by name.
        train_metric_values: with several ranks, their values for the last batch over all ranks.
        eval_metrics: metric objects by evaluator label and name.
        eval_metric_values: their values at the end of the last evaluation, as plain numbers.
        evaluated_at: the number of training batches at each evaluator's last run, by label.
        total_eval_wct: microseconds spent evaluating, including those before a loaded checkpoint.
        device: where the training runs.
        precision: ``fp32``, ``amp_bf16`` or ``amp_fp16``; ``None`` for a training in another loop while it is unknown.
        scaler: scales the loss for ``amp_fp16``; otherwise ``None``.
        device_train_microbatch_size: samples in a microbatch, with ``auto`` the number that fits into memory; ``None``
            while batches are whole.
        iteration_length: epochs or tokens of an iteration; ``None`` if the whole training is one.
        rank, world_size: number of this process, and of all.
        recompute_gradients: within ``fit()``, for algorithms at ``AFTER_TRAIN_BATCH``: computes the gradients of the
            batch again, at the present weights, and returns the batch's loss. Algorithms receive the events of the
            forward and backward passes a second time; they are not published.
        gather_checkpoint: within ``fit()``: returns the contents of a checkpoint of this moment; otherwise ``None``.
        evaluate_now: within ``fit()``, between two batches: evaluates, whatever the interval.
        fitting: whether the training can be stopped: from ``FIT_START`` on, before ``FIT_END``.
        stopped, stop_reason: whether and why :meth:`stop_training` ended the training.
        stop_requested, requested_reason: whether and why the training ends after the current batch."""

    recompute_gradients: Callable[[], torch.Tensor]
    evaluate_now: Callable[[], object]

    device_train_microbatch_size: int | None = None
    iteration_length: Time | None = None
    train_dataloader: Any = None
    dataloader_label: str | None = None
    dataloader_len: int | None = None
    previous_timestamp: Timestamp | None = None
    batch: Any = None
    batch_size: int | None = None
    outputs: Any = None
    loss: Any = None
    batch_loss: "torch.Tensor | float | None" = None
    train_metric_values: dict[str, Any] | None = None
    total_eval_wct = 0
    gather_checkpoint: Callable[[], dict[str, Any]] | None = None
    fitting = False
    stopped: bool = False
    stop_reason: str | None = None
    stop_requested: bool = False
    requested_reason: str | None = None
    context_changed: bool = True
    _data: "DataSpec | None" = None
    _subset_num_batches = -1
    _max_duration: Time | None = None
    _planned_duration: Time | None = None
    _limit = (0, 0)

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        device: "Device",
        seed: int,
        run_name: str,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        schedulers: Sequence[Any] = (),
        algorithms: Iterable[Algorithm] = (),
        evaluators: Iterable["Evaluator"] = (),
        precision: str | None = "fp32",
        scaler: "torch.amp.GradScaler | None" = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        # Typed loosely: algorithms may replace the model, and the loop calls methods such as `loss`, which a plain
        # module does not have.
        self.model: Any = model
        self.device = device
        self.precision = precision
        self.scaler = scaler
        self.seed = seed
        self.run_name = run_name
        self.rank = rank
        self.world_size = world_size
        self.optimizers: list[torch.optim.Optimizer] = list(optimizers)
        self.schedulers: list[Any] = list(schedulers)
        self._algorithms = list(algorithms)
        self.evaluators: list[Evaluator] = list(evaluators)
        self.timestamp: Timestamp = Timestamp()
        self._eval_timestamp = self._predict_timestamp = self.timestamp
        self.batch_losses: dict[str, Any] = {}
        self.train_metrics: dict[str, Any] = {}
        self.eval_metrics: dict[str, dict[str, Any]] = {}
        self.eval_metric_values: dict[str, dict[str, Any]] = {}
        self.evaluated_at: dict[str, int] = {}

    @property
    def algorithms(self) -> list[Algorithm]:
        """The algorithms of the training; the list can be changed, but not replaced."""
        return self._algorithms

    @property
    def max_duration(self) -> Time | None:
        """Length of the training. Set it to a :class:`Time`, a time string or a number of epochs."""
        return self._max_duration

    @max_duration.setter
    def max_duration(self, duration: TimeInput | None) -> None:
        self._planned_duration = None if duration is None else check_max_duration(duration)
        self._end_at(self._planned_duration)

    @property
    def planned_duration(self) -> Time | None:
        """Length of the training before it was stopped; :attr:`max_duration` otherwise."""
        return self._planned_duration

    def _end_at(self, duration: Time | None) -> None:
        self._max_duration = duration
        self._limit = (0, 0) if duration is None else counter_of(duration)
        self.context_changed = True

    @property
    def total_loss(self) -> "torch.Tensor | float | None":
        """The loss of the last batch, detached, as :attr:`batch_loss`; ``None`` before the first."""
        return self.batch_loss.detach() if isinstance(self.batch_loss, torch.Tensor) else self.batch_loss

    @property
    def dataloader(self) -> Any:
        """The dataloader in use."""
        return None if self._data is None else self._data.dataloader

    def set_dataloader(self, spec: "DataSpec | None", label: str | None, subset_num_batches: int = -1) -> None:
        """Set the current dataloader, of which only so many batches count (-1 for all)."""
        self._data = spec
        self.dataloader_label = label
        length = None if spec is None else spec.length
        if spec is not None and subset_num_batches >= 0:
            length = subset_num_batches if length is None else min(length, subset_num_batches)
        self.dataloader_len = length
        self._subset_num_batches = subset_num_batches
        self.context_changed = True

    @property
    def dataloader_in_use(self) -> "tuple[DataSpec | None, str | None, int]":
        """The arguments of the last :meth:`set_dataloader`, to return to them."""
        return self._data, self.dataloader_label, self._subset_num_batches

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
        """Return a part of the batch.

        Args:
            key: an index (in a pair 0 for inputs and 1 for targets), a name in a mapping, a sequence of these for a
                nested part, or a pair of functions ``(get, set)``.

        Raises:
            ConfigurationError: the batch has no such part."""
        return batch_get(self.batch, key)

    def batch_set_item(self, key: BatchKey, value: Any) -> None:
        """Replace a part of the batch: :attr:`batch` becomes a copy, the old one is unchanged."""
        self.batch = batch_set(self.batch, key, value)

    def reached_max_duration(self) -> bool:
        """Return whether the training ends here."""
        index, limit = self._limit
        return self.timestamp.values[index] >= limit

    def get_elapsed_duration(self) -> Time | None:
        """Return the elapsed share of ``max_duration``, in the unit ``dur``; ``None`` without one."""
        if self._max_duration is None:
            return None
        if not self._max_duration.value:
            return Time(1.0, TimeUnit.DURATION)
        elapsed: Time = self.timestamp.get(self._max_duration.unit) / self._max_duration
        return elapsed

    def stop_training(self, reason: str | None = None) -> None:
        """End the training after the current batch; evaluations that are due still run.

        Does nothing from ``FIT_END`` on. ``max_duration`` becomes the present training time, in its own unit, or in
        batches if it was in epochs. With several ranks a call on one of them suffices. They agree after a batch, after
        an evaluation and at the end of an epoch; a call at ``BATCH_END`` takes effect after the next batch.

        Args:
            reason: a few words, such as ``loss above 100``, for the training's output, ``offloop show`` and
                dashboards."""
        if self.world_size > 1:
            self.request_stop(reason)
        else:
            self.stop_now(reason)

    def request_stop(self, reason: str | None = None) -> None:
        """End the training after the current batch: for requests from outside the loop."""
        self.stop_requested = True
        self.requested_reason = self.requested_reason or reason

    def stop_now(self, reason: str | None = None) -> None:
        """End the training after the current batch, on this rank: for the training loop."""
        if self.fitting:
            # The first request counts.
            self.stop_reason = self.stop_reason or reason or self.requested_reason
            unit = TimeUnit.EPOCH if self._max_duration is None else self._max_duration.unit
            # Epochs end too late: the current one would be finished first.
            self._end_at(self.timestamp.get(TimeUnit.BATCH if unit is TimeUnit.EPOCH else unit))
            self.stopped = True
        self.withdraw_stop()

    def withdraw_stop(self) -> None:
        self.stop_requested, self.requested_reason = False, None
