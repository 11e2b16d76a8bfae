"""Callbacks that were written for Keras, in a consumer."""

from typing import Any, ClassVar

from offloop.bus.errors import ConfigurationError
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.event import Event
from offloop.consumers.adapters.adapter import IN_TRAINING, SAVES, TrainingAdapter, Unavailable, numbers
from offloop.consumers.api.logger import Logger

_THERE = "logs, params, model.stop_training and model.optimizer.learning_rate are there"


class _Model(Unavailable):
    """What a callback may do with ``self.model``. What it assigns stays there, for other callbacks' habits."""

    def __init__(self, adapter: "KerasCallback") -> None:
        super().__init__("model", adapter.shown_as, _THERE)
        vars(self)["optimizer"] = _Optimizer(adapter)
        vars(self)["stop_training"] = False

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self)[name] = value


class _Optimizer(Unavailable):
    """The learning rate; a new one is a command to the training."""

    def __init__(self, adapter: "KerasCallback") -> None:
        super().__init__("model.optimizer", adapter.shown_as, _THERE)
        vars(self)["_adapter"] = adapter

    @property
    def learning_rate(self) -> float:
        """That of the first group."""
        rates = [rate for group in vars(self)["_adapter"].snapshot.lr.values() for rate in group]
        if not rates:
            raise AttributeError("learning_rate")  # Python asks __getattr__ then, which says why
        return float(rates[0])

    @learning_rate.setter
    def learning_rate(self, rate: Any) -> None:
        if float(rate) != self.learning_rate:
            vars(self)["_adapter"].snapshot.send_command("set", "lr", float(rate))


class KerasCallback(TrainingAdapter):
    """A ``keras.callbacks.Callback`` as one of ours.

    ``logs`` has ``loss``, the mean over the epoch so far, the training's metrics by their names, and at the end of an
    epoch the evaluation's as ``val_NAME``."""

    framework = "Keras"
    roots: ClassVar = {"keras": "Callback", "tf_keras": "Callback"}
    methods: ClassVar = {
        "on_train_begin": None,
        "on_train_end": None,
        "on_epoch_begin": None,
        "on_epoch_end": None,
        "on_train_batch_begin": Event.BATCH_START,
        "on_batch_begin": Event.BATCH_START,
        "on_train_batch_end": None,
        "on_batch_end": None,
        "on_test_begin": None,
        "on_test_end": None,
        "on_test_batch_begin": Event.EVAL_BATCH_START,
        "on_test_batch_end": Event.EVAL_BATCH_END,
        "on_predict_begin": None,
        "on_predict_end": None,
    }
    refused: ClassVar = {
        **dict.fromkeys(("BackupAndRestore", "ModelCheckpoint", "OrbaxCheckpoint"), SAVES),
        "SwapEMAWeights": IN_TRAINING,
        "TensorBoard": "'--log tensorboard' writes such files",
    }

    def __init__(self, callback: Any) -> None:
        super().__init__(callback)
        if getattr(callback, "restore_best_weights", False):
            raise ConfigurationError(
                f"{self.shown_as}(restore_best_weights=True) cannot run in a consumer, which does not have the model's "
                "weights: leave it out, or run the callback in the training"
            )

    def begin(self) -> None:
        """Gives it a model with what is known of one, and calls it."""
        theirs = self.callback
        if self.restored and hasattr(theirs, "csv_file"):
            # The file is continued, and what the callback knows of it is found there.
            theirs.append, self.restored = True, {}
        self._model = _Model(self)
        theirs.set_params({"verbose": 1, "epochs": self.max_epochs, "steps": self.memory.get("length")})
        theirs.set_model(self._model)
        for name in ("logs", "found"):
            self.memory.setdefault(name, {})
        self.call("on_train_begin", {})

    def take_logged(self, values: dict[str, float]) -> None:
        """Takes metrics of the training."""
        self.memory["logs"] |= values

    def epoch_start(self, state: Snapshot, logger: Logger) -> None:
        """Calls the callback, and begins anew with the means."""
        self.memory |= {"logs": {}, "found": {}, "loss": 0.0, "samples": 0}
        self.call("on_epoch_begin", self.epoch, {})

    def batch_start(self, state: Snapshot, logger: Logger) -> None:
        """Calls the callback."""
        self.call("on_train_batch_begin", state.timestamp.values.batch_in_epoch, {})

    def batch_end(self, state: Snapshot, logger: Logger) -> None:
        """Calls the callback, with the means so far."""
        memory, samples = self.memory, state.batch_size or 1
        if state.loss is not None:
            memory["loss"] = memory.get("loss", 0.0) + state.loss * samples
            memory["samples"] = memory.get("samples", 0) + samples
            memory["logs"] = {"loss": 0.0, **memory["logs"]} | {"loss": memory["loss"] / memory["samples"]}
        memory["logs"] |= numbers(state.train_metrics)
        self.call("on_train_batch_end", state.timestamp.values.batch_in_epoch - 1, dict(memory["logs"]))

    def epoch_end(self, state: Snapshot, logger: Logger) -> None:
        """The training's metrics as they stand after the epoch."""
        self.memory["logs"] |= numbers(state.train_metrics)
        super().epoch_end(state, logger)

    def epoch_ended(self) -> None:
        """Calls the callback, with what was found in training and evaluation."""
        self.call("on_epoch_end", self.epoch - 1, {**self.memory["logs"], **self.memory["found"]})

    def eval_before_all(self, state: Snapshot, logger: Logger) -> None:
        """Calls the callback."""
        self.call("on_test_begin", {})

    def eval_batch_start(self, state: Snapshot, logger: Logger) -> None:
        """Calls the callback."""
        self.call("on_test_batch_begin", state.eval_timestamp.values.batch, {})

    def eval_batch_end(self, state: Snapshot, logger: Logger) -> None:
        """Calls the callback."""
        self.call("on_test_batch_end", state.eval_timestamp.values.batch - 1, {})

    def eval_end(self, state: Snapshot, logger: Logger) -> None:
        """Takes what was found."""
        self.memory["found"] |= self.metrics("val")
        super().eval_end(state, logger)

    def evaluated(self) -> None:
        """Calls the callback."""
        self.call("on_test_end", {name.removeprefix("val_"): value for name, value in self.memory["found"].items()})

    def fit_end(self, state: Snapshot, logger: Logger) -> None:
        """Calls the callback."""
        self.call("on_train_end", {**self.memory["logs"], **self.memory["found"]})

    def predict_start(self, state: Snapshot, logger: Logger) -> None:
        """Calls the callback."""
        self.call("on_predict_begin", {})

    def predict_end(self, state: Snapshot, logger: Logger) -> None:
        """Calls the callback."""
        self.call("on_predict_end", {})

    def send_commands(self) -> None:
        """Sends a stop that it has asked for."""
        if self._model.stop_training:
            self.stop("it set model.stop_training")
            self._model.stop_training = False
