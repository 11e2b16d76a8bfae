"""The adapter for Keras with its torch backend: ``model.fit(..., callbacks=[OffloopCallback()])``."""

import math
from os import PathLike
from pathlib import Path
from typing import Any, Unpack

from offloop.attached.adapter import Adapter, Wrapped, contain, missing
from offloop.attached.gradients import OF_GRADIENTS
from offloop.attached.options import Options, is_enabled
from offloop.attached.training import ALWAYS, EVALUATION_BATCHES, AttachedTraining, Framework
from offloop.bus.errors import ConfigurationError
from offloop.bus.types.event import Event

try:
    import keras
    import torch
    from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
except ModuleNotFoundError as _error:
    if _error.name in ("tensorflow", "jax", "openvino"):
        raise ModuleNotFoundError(
            f"Keras needs {_error.name}; offloop.keras attaches to its torch backend: set KERAS_BACKEND=torch before "
            "Keras is imported",
            name=_error.name,
        ) from None
    raise missing(_error, "offloop.keras", "keras") from None

_FRAMEWORK = Framework(
    "Keras",
    "keras",
    ALWAYS | EVALUATION_BATCHES,
    {
        "outputs": "Keras keeps the model's outputs within its step",
        "activations": "Keras calls layers without torch's hooks",
    },
    keeps_gradients=True,
)
_AT_START = frozenset({Event.AFTER_DATALOADER, Event.BATCH_START})
_RATES_AHEAD = 16
_MOMENTS = {"momentum": "exp_avg", "velocity": "exp_avg_sq"}


@contain("_begin", "_begin_batch", "_end_batch", "_begin_eval_batch", "_end_eval_batch", "_mark_checkpoint")
@contain("_announce", hooks=True, outside="on_train_begin")
class OffloopCallback(Adapter, keras.callbacks.Callback):  # type: ignore[misc]
    """Publishes a ``fit()`` as a run.

    Args:
        save_folder: folder for ``offloop send RUN checkpoint``, after batch 12 as ``ba12.keras``.
        options: as in :class:`offloop.trainer.Trainer`, see :class:`offloop.attached.options.Options`.

    Raises :class:`offloop.bus.errors.ConfigurationError` for invalid arguments, and for another backend than torch."""

    # Keras waits for the device after each batch if a callback handles its end. This one wraps Keras's functions for
    # batches.

    def __init__(self, *, save_folder: str | PathLike[str] | None = None, **options: Unpack[Options]) -> None:
        super().__init__(options)
        if keras.config.backend() != "torch":
            raise ConfigurationError(
                f"Keras runs on {keras.config.backend()}, and offloop.keras attaches to its torch backend: set "
                "KERAS_BACKEND=torch before Keras is imported"
            )
        self._save_folder = save_folder
        self._reached: dict[str, Any] | None = None  # at the end of the last fit()

    def on_train_begin(self, logs: Any = None) -> None:
        self._end(_left())
        self.detached: bool = not is_enabled(self._options)
        self._begin()

    def _begin(self) -> None:
        model = self.model
        optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        self._accumulation = optimizer.gradient_accumulation_steps or 1
        without = dict(_FRAMEWORK.without)
        if self._accumulation > 1:
            without |= dict.fromkeys(OF_GRADIENTS, "Keras adds up the gradients of microbatches within its optimizer")
        elif optimizer is not model.optimizer or optimizer.loss_scale_factor:
            without |= dict.fromkeys(OF_GRADIENTS, "Keras's gradients belong to a scaled loss")
        self._optimizer = _StandIn.of(optimizer, model)
        self._training = AttachedTraining(
            _FRAMEWORK._replace(without=without),
            self._options,
            model,
            [self._optimizer],
            max_duration=f"{self.params['epochs']}ep",
            precision=model.dtype_policy.name,
            config=_configuration(model, optimizer, self.params),
            evaluate="evaluate() would reset the metrics of this epoch",
            checkpoint=self._save if self._save_folder else "give OffloopCallback() a save_folder",
            set_lr=self._optimizer.set_rate
            if isinstance(optimizer._learning_rate, keras.Variable)
            else "it follows a schedule; give the optimizer a number to set it later",
        )
        self._training.at_exit = self._end
        self._has_begun = False
        # Not self.model in each batch: it looks at the backend each time.
        self._trained, self._history = model, getattr(model, "history", None)
        self._losses: list[Any] = []
        self._trackers = [one for one in model.metrics if one.name == "loss"]
        self._sums: list[tuple[Any, Any]] = []
        self._wrapped += [
            Wrapped(model, "train_function", self._begin_batch, self._end_batch, self._end),
            Wrapped(model, "save", self._mark_checkpoint, self._announce),
            Wrapped(model, "save_weights", self._mark_checkpoint, self._announce),
            *([] if model.jit_compile else [Wrapped(one, "update_state", self._keep_loss) for one in self._trackers]),
        ]

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._begin_fit(epoch)
        self._training.epoch_start()
        self._training.fetch_start()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if not self._training.state.stopped:
            self._training.epoch_end()
            self.model.stop_training |= self._training.state.stopped

    def on_test_begin(self, logs: Any = None) -> None:
        self._training.eval_start()
        self._wrapped.append(
            Wrapped(self.model, "test_function", self._begin_eval_batch, self._end_eval_batch, self._end)
        )

    def on_test_end(self, logs: Any = None) -> None:
        self._wrapped.pop().remove()
        self._training.eval_end(logs or {})

    def on_train_end(self, logs: Any = None) -> None:
        self._begin_fit(0)
        self._training.fit_end()
        self._reached = self._training.state_dict()
        self._end()

    def _begin_fit(self, epoch: int) -> None:
        # A resumed training begins with a later epoch.
        if not self._has_begun:
            self._has_begun = True
            steps = self.params["steps"]
            self._iterations = int(self._optimizer.source._iterations)
            self._training.fit_start(
                batches_per_epoch=steps // self._accumulation if steps and not steps % self._accumulation else None,
                batches_done=self._iterations // self._accumulation if epoch else 0,
                earlier=self._reached,
                epochs_done=epoch,
            )

    def _begin_batch(self, data: Any) -> None:
        training, optimizer = self._training, self._optimizer
        if self._trained.history is not self._history:
            self._end(_left())
            return
        if not _AT_START.isdisjoint(training.requested_events):
            optimizer.read_rate(self._iterations)
            training.fire(Event.AFTER_DATALOADER)
        training.batch_start(data[0])
        self._losses.clear()
        if self._trained.jit_compile:
            # A changed function would be recompiled.
            self._sums = [(one.total.value.clone(), one.count.value.clone()) for one in self._trackers]
        self._iterations += 1
        if (_global_optimizer_pre_hooks or _global_optimizer_post_hooks) and self._iterations % self._accumulation == 0:
            optimizer.step()

    def _end_batch(self, logs: Any, data: Any) -> None:
        training = self._training
        for tracker, (total, count) in zip(self._trackers, self._sums, strict=False):
            self._losses.append((tracker.total.value - total) / (tracker.count.value - count))
        if self._losses:
            loss = torch.as_tensor(self._losses[-1])
            training.add_loss(loss.mean() if loss.ndim else loss, 1 / self._accumulation)
            self._losses.clear()
        training.log_metrics({name: value for name, value in logs.items() if name != "loss"})
        if self._iterations % self._accumulation == 0:
            self._optimizer.read_rate(self._iterations)
            training.batch_end()
            if training.state.stopped:
                self.model.stop_training = True
                return
        training.fetch_start()

    def _begin_eval_batch(self, data: Any) -> None:
        self._losses.clear()
        self._training.eval_batch_start(data[0])

    def _end_eval_batch(self, logs: Any, data: Any) -> None:
        self._training.eval_batch_end()

    def _mark_checkpoint(self, *_: Any, **more: Any) -> None:
        self._training.checkpoint_saved()

    def _announce(self, _: Any, filepath: Any, *__: Any, **more: Any) -> None:
        self._training.checkpoint_written(filepath)

    def _keep_loss(self, values: Any, *_: Any, **more: Any) -> None:
        self._losses.append(values)

    def _save(self) -> Path | None:
        assert self._save_folder is not None
        state = self._training.state
        if state.rank:
            return None
        path = Path(self._save_folder, f"ba{state.timestamp.values.batch}.keras")
        path.parent.mkdir(parents=True, exist_ok=True)
        self.model.save(path)
        return path


class _StandIn(torch.optim.Optimizer):
    """An optimizer of Keras in the form that torch's hooks and fields need. Keras does the step."""

    source: Any
    _read_at: Any = None
    _schedule: Any = None
    _ahead: dict[int, float]

    @classmethod
    def of(cls, optimizer: Any, model: Any) -> "_StandIn":
        options = {
            name: value for name, value in optimizer.get_config().items() if isinstance(value, int | float | bool)
        }
        variables = model.trainable_variables
        options |= {"lr": options.pop("learning_rate", math.nan)}
        made: _StandIn = type(type(optimizer).__name__, (cls,), {})([one.value for one in variables], options)
        made.source, made._ahead = optimizer, {}
        kept = {one.name: one.value for one in optimizer.variables}
        for one in variables:
            moments = {ours: kept.get(f"{one.path.replace('/', '_')}_{theirs}") for theirs, ours in _MOMENTS.items()}
            made.state[one.value] = {name: value for name, value in moments.items() if value is not None}
        made.read_rate(int(optimizer._iterations))
        return made

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Run the hooks only."""

    def read_rate(self, iterations: int) -> None:
        # A rate in a variable may be on a GPU, so it is read only after a change.
        rate = self.source._learning_rate
        in_variable = isinstance(rate, keras.Variable)
        tensor = rate.value if in_variable else None
        now = iterations if tensor is None else (tensor, tensor._version)
        if now == self._read_at:
            return
        self._read_at = now
        if tensor is not None:
            value = float(tensor.detach())
        elif isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            value = self._scheduled(rate, iterations)
        else:
            # A user's function might count its calls.
            value = math.nan
        self.param_groups[0]["lr"] = value

    def _scheduled(self, schedule: Any, iterations: int) -> float:
        if schedule is not self._schedule or iterations not in self._ahead:
            # In turn, a rate takes half the time that it takes between a model's operations. A user's own schedule may
            # change at any time.
            count = _RATES_AHEAD if type(schedule).__module__.startswith("keras.") else 1
            every = self.source.gradient_accumulation_steps or 1
            with keras.device("cpu"):
                steps = range(iterations, iterations + count * every, every)
                self._schedule, self._ahead = schedule, {step: float(schedule(step)) for step in steps}
        return self._ahead.pop(iterations)

    def set_rate(self, rate: float) -> None:
        self.source.learning_rate = rate
        self.param_groups[0]["lr"] = rate


def _left() -> Exception:
    return RuntimeError("fit() was left before its end")


def _configuration(model: Any, optimizer: Any, params: dict[str, Any]) -> dict[str, Any]:
    loss, rate = model.loss, optimizer.get_config()["learning_rate"]
    return {
        **{name: params[name] for name in ("epochs", "steps")},
        **({"learning_rate": rate["config"]} if isinstance(rate, dict) else {}),
        "jit_compile": model.jit_compile,
        "loss": getattr(loss, "name", None) or getattr(loss, "__name__", None) or str(loss),
    }
