"""Callbacks and loggers that were written for Lightning, in a consumer."""

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any, ClassVar

from offloop.bus.errors import ConfigurationError
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.event import Event
from offloop.consumers.adapters.adapter import IN_TRAINING, SAVES, TrainingAdapter, Unavailable, numbers
from offloop.consumers.api.logger import Logger, LoggerDestination, Row

_TRAINER = (
    "callback_metrics, current_epoch, global_step, should_stop, optimizers with their rates, loggers, max_epochs and "
    "max_steps are there"
)
_MODULE = "log() and log_dict() are there"


class _Logs:
    """What callbacks have as ``trainer.logger``: the consumer's loggers."""

    name = version = "offloop"
    save_dir = None

    def __init__(self, adapter: "LightningCallback") -> None:
        self._adapter = adapter

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Logs them."""
        self._adapter.logger.log_metrics(dict(metrics), step)

    def log_hyperparams(self, params: Mapping[str, Any], *_: Any, **__: Any) -> None:
        """Logs them."""
        self._adapter.logger.log_hyperparameters(dict(params))

    @property
    def experiment(self) -> Unavailable:
        """Not there."""
        return self._adapter.missing("trainer.logger.experiment", "trainer.logger.log_metrics() is there")


class _Module(Unavailable):
    """What callbacks may do with ``pl_module``."""

    def __init__(self, adapter: "LightningCallback") -> None:
        super().__init__("pl_module", adapter.shown_as, _MODULE)
        vars(self)["_adapter"] = adapter

    def log(self, name: str, value: Any, *_: Any, **__: Any) -> None:
        """Logs a value."""
        self.log_dict({name: value})

    def log_dict(self, dictionary: Mapping[str, Any], *_: Any, **__: Any) -> None:
        """Logs several."""
        vars(self)["_adapter"].logger.log_metrics(dict(dictionary))


class _Trainer(Unavailable):
    """What callbacks may do with ``trainer``. Lightning's own names."""

    fast_dev_run = sanity_checking = False
    val_check_interval = 1.0
    check_val_every_n_epoch = 1
    is_global_zero = True
    global_rank = local_rank = 0
    lr_scheduler_configs: ClassVar[list[Any]] = []

    def __init__(self, adapter: "LightningCallback") -> None:
        super().__init__("trainer", adapter.shown_as, _TRAINER)
        states = import_module(f"{adapter.package}.trainer.states")
        vars(self).update(
            _adapter=adapter,
            should_stop=False,
            state=states.TrainerState(fn=states.TrainerFn.FITTING, stage=states.RunningStage.TRAINING),
            loggers=[_Logs(adapter)],
            callback_metrics={},
            strategy=SimpleNamespace(
                reduce_boolean_decision=lambda decision, all=True: decision,
                broadcast=lambda value, src=0: value,
                barrier=lambda *_, **__: None,
                root_device=sys.modules["torch"].device("cpu"),
            ),
        )
        self.logger = self.loggers[0]

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self)[name] = value

    @property
    def _now(self) -> "LightningCallback":
        adapter: LightningCallback = vars(self)["_adapter"]
        return adapter

    @property
    def global_step(self) -> int:
        return self._now.step

    @property
    def current_epoch(self) -> int:
        # Theirs still counts as the current one while what belongs to its end is done.
        return self._now.epoch - ("ended" in self._now.memory)

    @property
    def logged_metrics(self) -> Any:
        return self.callback_metrics

    @property
    def world_size(self) -> int:
        return self._now.snapshot.world_size

    @property
    def max_epochs(self) -> int | None:
        return self._now.max_epochs

    @property
    def max_steps(self) -> int:
        return self._now.max_steps or -1

    @property
    def num_training_batches(self) -> Any:
        return self._now.memory.get("length", float("inf"))

    @property
    def log_every_n_steps(self) -> int:
        return self._now.log_every_n_steps

    @property
    def _logger_connector(self) -> Any:
        # In Lightning too, the step that is about to be taken counts here already.
        return SimpleNamespace(should_update_logs=(self._now.step + 1) % self.log_every_n_steps == 0)

    @property
    def fit_loop(self) -> Any:
        return SimpleNamespace(epoch_loop=SimpleNamespace(_batches_that_stepped=self._now.step))

    @property
    def optimizers(self) -> list[Any]:
        return [
            type(name, (), {"param_groups": [{"lr": rate} for rate in rates], "defaults": {}})()
            for name, rates in self._now.snapshot.lr.items()
        ]


class LightningCallback(TrainingAdapter):
    """A ``Callback`` of Lightning as one of ours, of ``lightning`` or of ``pytorch_lightning``.

    ``trainer.callback_metrics`` has ``train_loss``, the training's metrics by their names and as ``train_NAME``, the
    evaluation's as ``val_NAME`` and by their names, if no metric of the training has that name. What the callback logs
    goes to the consumer's loggers.

    Args:
        callback: the callback.
        log_every_n_steps: what ``trainer.log_every_n_steps`` is, as in Lightning's ``Trainer``.
    """

    framework = "Lightning"
    roots: ClassVar = {"lightning": "Callback", "pytorch_lightning": "Callback"}
    methods: ClassVar = {
        "setup": None,
        "on_fit_start": None,
        "on_train_start": None,
        "on_train_epoch_start": None,
        "on_train_batch_start": Event.BATCH_START,
        "on_train_batch_end": None,
        "on_train_epoch_end": None,
        "on_validation_start": None,
        "on_validation_epoch_start": None,
        "on_validation_batch_start": Event.EVAL_BATCH_START,
        "on_validation_batch_end": Event.EVAL_BATCH_END,
        "on_validation_epoch_end": None,
        "on_validation_end": None,
        "on_train_end": None,
        "on_fit_end": None,
        "teardown": None,
    }
    refused: ClassVar = {
        **dict.fromkeys(("BaseFinetuning", "BasePredictionWriter", "BatchSizeFinder"), IN_TRAINING),
        **dict.fromkeys(("GradientAccumulationScheduler", "LearningRateFinder", "ModelPruning"), IN_TRAINING),
        **dict.fromkeys(("ModelSummary", "StochasticWeightAveraging", "WeightAveraging"), IN_TRAINING),
        "Checkpoint": SAVES,
        "DeviceStatsMonitor": "the callbacks 'memory' and 'system' log such values",
        "ProgressBar": "'--log progress' shows such a bar",
        "SpikeDetection": "the callback 'nan' watches the loss, the callback 'alert' takes rules",
        "ThroughputMonitor": "the callback 'speed' logs such values",
    }

    def __init__(self, callback: Any, log_every_n_steps: int = 50) -> None:
        super().__init__(callback)
        if log_every_n_steps < 1:
            raise ConfigurationError(f"log_every_n_steps is {log_every_n_steps}: use 1 or more")
        self.log_every_n_steps = log_every_n_steps

    @property
    def package(self) -> str:
        """Which of Lightning's two packages the callback is from."""
        return self.root.__module__.rpartition(".callbacks")[0]

    def begin(self) -> None:
        """Gives it a trainer with what is known of one, and calls it."""
        self._trainer, self._module = _Trainer(self), _Module(self)
        self._set_values(self.memory.get("values", {}))
        if any(base.__name__ == "Timer" for base in type(self.callback).__mro__):
            self._give_time()
        self._notify("setup", "fit")
        self._notify("on_fit_start")
        self._notify("on_train_start")

    def take_logged(self, values: dict[str, float]) -> None:
        """Takes metrics of the training."""
        self._take_metrics(values)

    def epoch_start(self, state: Snapshot, logger: Logger) -> None:
        """Calls the callback."""
        self._notify("on_train_epoch_start")

    def batch_start(self, state: Snapshot, logger: Logger) -> None:
        """Calls the callback."""
        self._notify("on_train_batch_start", self._batch(), state.timestamp.values.batch_in_epoch)

    def batch_end(self, state: Snapshot, logger: Logger) -> None:
        """Calls the callback."""
        loss = {} if state.loss is None else {"loss": state.loss}
        self._take_training(state)
        outputs = self._tensors(loss)
        self._notify("on_train_batch_end", outputs, self._batch(), state.timestamp.values.batch_in_epoch - 1)

    def epoch_end(self, state: Snapshot, logger: Logger) -> None:
        """Takes the training's metrics as they stand after the epoch."""
        self._take_training(state)
        super().epoch_end(state, logger)

    def epoch_ended(self) -> None:
        """Calls the callback."""
        self._notify("on_train_epoch_end")

    def eval_before_all(self, state: Snapshot, logger: Logger) -> None:
        """Calls the callback."""
        self._notify("on_validation_start")
        self._notify("on_validation_epoch_start")

    def eval_batch_start(self, state: Snapshot, logger: Logger) -> None:
        """Calls the callback."""
        self._notify("on_validation_batch_start", self._batch(), state.eval_timestamp.values.batch)

    def eval_batch_end(self, state: Snapshot, logger: Logger) -> None:
        """Calls the callback."""
        self._notify("on_validation_batch_end", None, self._batch(), state.eval_timestamp.values.batch - 1)

    def eval_end(self, state: Snapshot, logger: Logger) -> None:
        """Takes what was found."""
        found = numbers(state.eval_metrics.get(state.dataloader_label or "", {}))
        of_training = self.memory.get("of_training", [])
        self._set_values({name: value for name, value in found.items() if name not in of_training})
        self._set_values(self.metrics("val"))
        super().eval_end(state, logger)

    def evaluated(self) -> None:
        """Calls the callback."""
        self._notify("on_validation_epoch_end")
        self._notify("on_validation_end")

    def fit_end(self, state: Snapshot, logger: Logger) -> None:
        """Calls the callback."""
        self._notify("on_train_end")
        self._notify("on_fit_end")
        self._notify("teardown", "fit")

    def send_commands(self) -> None:
        """Sends a stop that it has asked for."""
        if self._trainer.should_stop:
            self.stop(getattr(self.callback, "stopping_reason_message", None) or "it set trainer.should_stop")
            self._trainer.should_stop = False

    def _notify(self, name: str, *arguments: Any) -> None:
        stage = [arguments[0]] if name in ("setup", "teardown") else arguments
        if self.overrides(name):
            self.call(name, self._trainer, self._module, *stage)

    def _batch(self) -> Unavailable:
        return self.missing("the batch", "fields on demand such as 'inputs' are what callbacks of offloop have")

    def _take_training(self, state: Snapshot) -> None:
        self._take_metrics(numbers(state.train_metrics))
        if state.loss is not None and "train_loss" not in self.memory["of_training"]:
            self._set_values({"train_loss": state.loss})

    def _take_metrics(self, metrics: Mapping[str, float]) -> None:
        self.memory["of_training"] = sorted({*self.memory.get("of_training", ()), *metrics})
        named = {name if name.startswith("train_") else f"train_{name}": value for name, value in metrics.items()}
        self._set_values({**metrics, **named})

    def _set_values(self, values: Mapping[str, float]) -> None:
        self.memory["values"] = {**self.memory.get("values", {}), **values}
        self._trainer.callback_metrics.update(self._tensors(values))

    def _tensors(self, values: Mapping[str, float]) -> dict[str, Any]:
        tensor = sys.modules["torch"].tensor
        return {name: tensor(float(value)) for name, value in values.items()}

    def _give_time(self) -> None:
        """Has their ``Timer`` take the time from the events: a replay then says what the run did."""
        began = self.memory.setdefault("began", self.snapshot.time)
        self.callback.time_elapsed = lambda stage="train": self.snapshot.time - began if stage == "train" else 0.0


class LightningLogger(LoggerDestination):
    """A ``Logger`` of Lightning, such as ``CSVLogger`` or ``TensorBoardLogger``, as a destination of ours."""

    roots: ClassVar = {"lightning": "Logger", "pytorch_lightning": "Logger"}

    def __init__(self, logger: Any) -> None:
        self.logger = logger

    @property
    def shown_as(self) -> str:
        """What people know it as: its own class."""
        return type(self.logger).__name__

    @property
    def where(self) -> str | None:
        """Its directory, if it has one."""
        where = getattr(self.logger, "log_dir", None) or self.logger.save_dir
        return None if where is None else str(where)

    def log_rows(self, rows: Sequence[Row], state: Snapshot) -> None:
        """Logs the numbers in each row, with the epoch, as Lightning does."""
        for row in rows:
            values = numbers(row.metrics)
            if values:
                self.logger.log_metrics({"epoch": state.timestamp.values.epoch, **values}, step=row.step)

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any], state: Snapshot) -> None:
        """Logs them."""
        self.logger.log_hyperparams(dict(hyperparameters))

    def close(self) -> None:
        """Writes what it still has."""
        self.logger.save()
        self.logger.finalize("success")
