"""Callbacks that were written for Hugging Face Transformers, in a consumer."""

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from offloop.bus.errors import ConfigurationError
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.event import Event
from offloop.consumers.adapters.adapter import IN_TRAINING, TrainingAdapter, Unavailable
from offloop.consumers.api.callback import CannotWorkError
from offloop.consumers.api.logger import Logger

_THERE = "args, state, control, logs and metrics are there"
_WITHOUT = ("model", "processing_class", "optimizer", "lr_scheduler")
_COMPUTED = {"loss", "learning_rate", "epoch", "train_loss"} | {
    f"train_{name}" for name in ("runtime", "samples_per_second", "steps_per_second")
}
"""Logs that are made here, from the events."""


class _Loader(Unavailable):
    """A dataloader of which the length is known."""

    def __len__(self) -> int:
        length = vars(self)["_length"]
        if length is None:
            raise TypeError("the length of this dataloader is not known")
        return int(length)


class TransformersCallback(TrainingAdapter):
    """A ``TrainerCallback`` as one of ours.

    Args:
        callback: the callback.
        args: training arguments, as a map or as texts such as ``logging_steps=10``. They count before those that the
            run publishes as its hyperparameters; others have their defaults. If nothing says otherwise, the metric for
            the best model is ``loss``, and evaluations take place.
    """

    framework = "Transformers"
    roots: ClassVar = {"transformers": "TrainerCallback"}
    relatives = ("trl",)
    before_label = "eval_"
    methods: ClassVar = {
        "on_init_end": None,
        "on_train_begin": None,
        "on_train_end": None,
        "on_epoch_begin": None,
        "on_epoch_end": None,
        "on_step_begin": Event.BATCH_START,
        "on_pre_optimizer_step": Event.AFTER_TRAIN_BATCH,
        "on_step_end": None,
        "on_log": None,
        "on_evaluate": None,
        "on_predict": None,
        "on_prediction_step": Event.EVAL_BATCH_END,
    }
    refused: ClassVar = {
        "DefaultFlowCallback": "the training decides itself when it logs, evaluates and saves",
        **dict.fromkeys(("BEMACallback", "LogCompletionsCallback", "MergeModelCallback"), IN_TRAINING),
        **dict.fromkeys(("SyncRefModelCallback", "WeaveCallback", "WinRateCallback"), IN_TRAINING),
    }

    def __init__(self, callback: Any, args: Mapping[str, Any] | Sequence[str] = ()) -> None:
        super().__init__(callback)
        self._given = dict(args) if isinstance(args, Mapping) else dict(map(_argument, args))

    def begin(self) -> None:
        """Makes their objects, and calls the callback."""
        theirs: Any = sys.modules[self.root.__module__]
        self._args = self._arguments()
        self._state, self._control = theirs.TrainerState(), theirs.TrainerControl()
        self._flow, self._new_control = theirs.DefaultFlowCallback(), theirs.TrainerControl
        self._state.best_metric = self.memory.get("best_metric")
        for name in ("loss", "steps", "all_loss", "all_steps"):
            self.memory.setdefault(name, 0)
        self.memory.setdefault("began", self.snapshot.time)
        self._update()
        self._notify("on_init_end")
        self._notify("on_train_begin")

    def take_logged(self, values: dict[str, float]) -> None:
        """Calls the callback of these logs: they are those of the step before."""
        if logs := {name: one for name, one in values.items() if name not in _COMPUTED}:
            self._log(logs)

    def epoch_start(self, state: Snapshot, logger: Logger) -> None:
        """Calls the callback."""
        self._update()
        self.memory.setdefault("rate", _rate(state))
        self._notify("on_epoch_begin")

    def batch_start(self, state: Snapshot, logger: Logger) -> None:
        """Calls the callback."""
        self._notify("on_step_begin")

    def after_train_batch(self, state: Snapshot, logger: Logger) -> None:
        """Calls the callback."""
        self._notify("on_pre_optimizer_step")

    def batch_end(self, state: Snapshot, logger: Logger) -> None:
        """Calls the callback, and of logs in steps in which the training's arguments have it log."""
        self._update()
        memory = self.memory
        for names in (("loss", "steps"), ("all_loss", "all_steps")):
            for name, value in zip(names, (state.loss or 0.0, 1), strict=True):
                memory[name] += value
        # Transformers logs the rate that the step was made with, a snapshot has that of the next one.
        memory["rate"], memory["next_rate"] = memory.get("next_rate", memory.get("rate")), _rate(state)
        self._notify("on_step_end")
        self._log_if_due(self._flow.on_step_end)

    def epoch_end(self, state: Snapshot, logger: Logger) -> None:
        """Calls the callback: here an epoch ends before the evaluation that belongs to it."""
        self._update()
        self._notify("on_epoch_end")
        self._log_if_due(self._flow.on_epoch_end)

    def eval_batch_end(self, state: Snapshot, logger: Logger) -> None:
        """Calls the callback."""
        self._notify("on_prediction_step")

    def eval_end(self, state: Snapshot, logger: Logger) -> None:
        """Calls the callback what was found, and finds out whether that is the best so far."""
        metrics = self.metrics("eval")
        self._log(metrics)
        self._notify("on_evaluate", metrics=metrics)
        name = str(self._args.metric_for_best_model)
        value = metrics.get(name if name.startswith("eval_") else f"eval_{name}")
        best = self._state.best_metric
        if value is not None and (best is None or (value > best if self._args.greater_is_better else value < best)):
            self._state.best_metric = self.memory["best_metric"] = value
            self._state.best_global_step = self.step

    def predict_end(self, state: Snapshot, logger: Logger) -> None:
        """Calls the callback."""
        self._notify("on_predict", metrics={})

    def fit_end(self, state: Snapshot, logger: Logger) -> None:
        """Calls the callback of the last logs, those of the whole training, and of its end."""
        self._update()
        seconds = state.time - self.memory.pop("began")
        steps, loss = self.memory["all_steps"], self.memory["all_loss"]
        logs = {"train_runtime": round(seconds, 4)}
        if seconds > 0 and steps:
            logs["train_samples_per_second"] = round(state.timestamp.values.sample / seconds, 3)
            logs["train_steps_per_second"] = round(steps / seconds, 3)
        if steps:
            logs["train_loss"] = loss / steps
        self._log(logs)
        self._notify("on_train_end")

    def send_commands(self) -> None:
        """Sends what it has set in its ``control``."""
        control = self._control
        if control.should_training_stop:
            self.stop("it set control.should_training_stop")
        if control.should_epoch_stop:
            raise CannotWorkError(
                f"{self.shown_as} sets control.should_epoch_stop: an epoch cannot be ended from a consumer; set "
                "should_training_stop, or run this callback in the training"
            )
        if control.should_save:
            self.snapshot.send_command("checkpoint")
        if control.should_evaluate:
            self.snapshot.send_command("set", "eval", "now")
        control.should_training_stop = control.should_save = control.should_evaluate = False

    def _notify(self, name: str, **more: Any) -> None:
        if not self.overrides(name):
            return
        training = {one: self.missing(f"the {one}", _THERE) for one in _WITHOUT}
        lengths = {"train": self.memory.get("length"), "eval": self.snapshot.dataloader_len}
        for label, length in lengths.items():
            loader = _Loader(f"the {label}_dataloader", self.shown_as, f"its length and {_THERE}")
            vars(loader)["_length"] = length
            training[f"{label}_dataloader"] = loader
        result = getattr(self.callback, name)(self._args, self._state, self._control, **training, **more)
        self._control = result or self._control
        self.send_commands()

    def _log_if_due(self, decide: Any) -> None:
        flow = decide(self._args, self._state, self._new_control())
        memory = self.memory
        if (flow.should_log or self._control.should_log) and memory["steps"]:
            logs = {"loss": memory["loss"] / memory["steps"]}
            if "gradient_norm" in self.snapshot.fields:
                logs["grad_norm"] = self.snapshot.gradient_norm
            if memory["rate"] is not None:
                logs["learning_rate"] = memory["rate"]
            memory["loss"], memory["steps"] = 0, 0
            self._log(logs)
        self._control.should_log = False

    def _log(self, logs: dict[str, Any]) -> None:
        logs["epoch"] = self._state.epoch
        self._state.log_history.append({**logs, "step": self._state.global_step})
        self._notify("on_log", logs=logs)

    def _update(self) -> None:
        now, state, length = self.snapshot.timestamp.values, self._state, self.memory.get("length")
        state.epoch = now.epoch + (now.batch_in_epoch / length if length else 0.0)
        state.global_step = now.batch
        state.num_input_tokens_seen = now.token
        state.train_batch_size = self.snapshot.batch_size
        state.max_steps = self.max_steps or 0
        state.num_train_epochs = self.max_epochs or (-(-state.max_steps // length) if length else 0)
        state.compute_steps(self._args, state.max_steps)
        state.logging_steps = max(1, state.logging_steps)

    def _arguments(self) -> Any:
        """Training arguments, made without what theirs do when they are made: they look for devices."""
        kind = sys.modules["transformers.training_args"].TrainingArguments
        args = object.__new__(kind)
        deepest_first = sorted(self.hyperparameters, key=lambda name: -name.count("/"))
        known = {name.rpartition("/")[2]: self.hyperparameters[name] for name in deepest_first}
        given = {"eval_strategy": "epoch", "output_dir": self.snapshot.run_name, **known, **self._given}
        for field in dataclasses.fields(kind):
            made = None if field.default_factory is dataclasses.MISSING else field.default_factory()
            default = made if field.default is dataclasses.MISSING else field.default
            setattr(args, field.name, given.get(field.name, default))
        args.metric_for_best_model = args.metric_for_best_model or "loss"
        if args.greater_is_better is None:
            args.greater_is_better = not args.metric_for_best_model.endswith("loss")
        return args


def _argument(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigurationError(f"invalid training argument {text!r}: use NAME=VALUE, such as logging_steps=10")
    try:
        return name.strip(), json.loads(value)
    except ValueError:
        return name.strip(), value


def _rate(state: Snapshot) -> float | None:
    return next((rate for rates in state.lr.values() for rate in rates), None)
