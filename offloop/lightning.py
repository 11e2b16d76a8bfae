"""The adapter for Lightning, under both of its names: ``Trainer(callbacks=[OffloopCallback()])``."""

import os
from collections.abc import Mapping, Set
from importlib import import_module
from typing import Any, Unpack

from offloop.attached.adapter import Adapter, Wrapped, contain, missing
from offloop.attached.options import Options, is_enabled
from offloop.attached.training import ALWAYS, AT_FETCH, EVALUATION_BATCHES, STEP, AttachedTraining, Framework
from offloop.bus.errors import ConfigurationError
from offloop.bus.types.event import Event


def _installed(*names: str) -> tuple[type, ...]:
    """Return the callback classes of these namespaces; a trainer accepts only its own."""
    found, trouble = [], None
    for name in names:
        try:
            found.append(import_module(name).Callback)
        except ModuleNotFoundError as error:
            if (error.name or "") not in name.split(".")[:1]:
                raise
            trouble = trouble or error
    if not found and trouble is not None:
        raise missing(trouble, "offloop.lightning", "lightning") from None
    return tuple(found)


_Callback: Any = type("_Callback", _installed("lightning.pytorch", "pytorch_lightning"), {})
_EVENTS = ALWAYS | EVALUATION_BATCHES | STEP
_TRAINER_FACTS = (
    *("accumulate_grad_batches", "gradient_clip_algorithm", "gradient_clip_val", "num_devices", "num_nodes"),
    *("min_epochs", "max_epochs", "min_steps", "max_steps", "overfit_batches", "limit_train_batches"),
    *("limit_val_batches", "val_check_interval", "check_val_every_n_epoch"),
)
_HOOKS_OF_EVENTS = {
    "on_before_backward": (Event.AFTER_LOSS, Event.BEFORE_BACKWARD),
    "on_after_backward": (Event.AFTER_BACKWARD,),
    "on_before_optimizer_step": (Event.AFTER_TRAIN_BATCH,),
}
_OF_HOOKS = frozenset(event for events in _HOOKS_OF_EVENTS.values() for event in events)
_AT_START = frozenset({Event.AFTER_DATALOADER, Event.BEFORE_FORWARD})
_AT_ONCE = {"val_check_batch": 1, "check_val_every_n_epoch": 1, "_val_check_time_interval": 0}
"""Intervals that make an evaluation due after the next batch."""


@contain("teardown", "_begin", "_start_fetch", "_checkpoint_written", hooks=True, outside="on_train_start")
class OffloopCallback(Adapter, _Callback):  # type: ignore[misc]
    """Publishes each ``fit`` of Lightning's ``Trainer`` as a run.

        Trainer(callbacks=[OffloopCallback()])

    A batch is a step of the optimizer; the dataloader batches accumulated for it are its microbatches. With manual
    optimization a batch is a dataloader batch in which an optimizer has stepped.

    Args:
        options: as in :class:`offloop.trainer.Trainer`, see :class:`offloop.attached.options.Options`.

    Raises :class:`offloop.bus.errors.ConfigurationError` for invalid options."""

    def __init__(self, **options: Unpack[Options]) -> None:
        super().__init__(options)
        self._trainer: Any
        self._resumed: Mapping[str, Any] | None = None
        self._reached: dict[str, Any] = {}
        self._steps = 0
        self._losses: list[Any] = []
        self._epoch_values: dict[str, Any] = {}
        self._intervals: dict[str, Any] = {}
        self._logged_names: dict[str, str] = {}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._resumed = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.detached: bool = not is_enabled(self._options)
        self._begin(trainer, pl_module)

    def _begin(self, trainer: Any, pl_module: Any) -> None:
        self._training = training = AttachedTraining(
            Framework("Lightning", type(trainer).__module__.partition(".")[0].replace("_", "-"), _EVENTS),
            self._options,
            pl_module,
            trainer.optimizers,
            [one.scheduler for one in trainer.lr_scheduler_configs],
            max_duration=_max_duration(trainer),
            precision=trainer.precision,
            config=_config(trainer, pl_module),
            evaluate=self._evaluate,
            checkpoint=lambda: _save(trainer),
        )
        # In a spawned process Lightning calls no hook after an exception.
        training.error_if_left = RuntimeError("the process ended within the training; see its output")
        earlier = self._reached if trainer.global_step == self._steps else {}
        self._trainer, self._steps, self._has_stepped = trainer, trainer.global_step, False
        self._losses.clear()
        self._epoch_values.clear()
        self._logged_names.clear()
        self._choose_hooks(frozenset())
        self._wrapped = [
            Wrapped(trainer.fit_loop.epoch_loop, "_on_before_fetch", self._before_fetch),
            # The hook is called before a checkpoint is written, without its name.
            Wrapped(trainer, "save_checkpoint", after=self._checkpoint_written),
        ]
        resumed, batches = self._resumed, trainer.global_step
        if (known := resumed or earlier) and not pl_module.automatic_optimization:
            # Lightning counts the steps of every optimizer.
            batches = known["timestamp"][2]
        training.fit_start(
            **_data(trainer),
            resumed=resumed,
            earlier=earlier,
            batches_done=batches,
            epochs_done=trainer.current_epoch,
        )

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._log_epoch(trainer)
        self._training.use_data(**_data(trainer))
        self._training.epoch_start()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        training = self._training
        requested = training.requested_events
        if (of_hooks := requested & _OF_HOOKS) != self._hooked:
            self._choose_hooks(of_hooks)
        is_observed = not _AT_START.isdisjoint(requested)
        if is_observed:
            training.fire(Event.AFTER_DATALOADER)
        training.batch_start(batch)
        if is_observed:
            training.fire(Event.BEFORE_FORWARD)

    def _choose_hooks(self, requested: Set[Event]) -> None:
        # Lightning passes over a hook that is not callable, and takes some 3 microseconds for any other.
        self._hooked = requested
        for hook, events in _HOOKS_OF_EVENTS.items():
            self.__dict__[hook] = None
            if not requested.isdisjoint(events):
                del self.__dict__[hook]

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        self._training.fire(Event.AFTER_LOSS)
        self._training.fire(Event.BEFORE_BACKWARD)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self._training.fire(Event.AFTER_BACKWARD)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if not self._has_stepped:
            self._has_stepped = True
            self._training.fire(Event.AFTER_TRAIN_BATCH)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        training = self._training
        if outputs and (loss := outputs.get("loss")) is not None:
            self._losses.append(loss)
        if (steps := trainer.global_step) == self._steps:
            return
        self._steps, self._has_stepped = steps, False
        losses, self._losses = self._losses, []
        for loss in losses:
            # Lightning divides by the full number of microbatches, also if there were fewer.
            training.add_loss(loss, trainer.accumulate_grad_batches / len(losses))
        training.log(self._logged_in_step(trainer))
        training.batch_end()
        self._stop_if_asked(trainer)

    def _logged_in_step(self, trainer: Any) -> dict[str, Any]:
        results, names, found = trainer._results, self._logged_names, {}
        for key, one in results.items():
            if not one.has_reset and (value := results._get_cache(one, True)) is not None:
                name = names.get(key)
                if name is None:
                    name = names[key] = f"metrics/train/{results._forked_name(one, True)[1]}"
                found[name] = value
        return found

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._restore_intervals()
        self._training.eval_start("val", batches=_finite(sum(trainer.num_val_batches)))

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._training.eval_batch_start(batch)

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._training.eval_batch_end()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._training.eval_end(_logged(trainer))
        self._stop_if_asked(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        # Also called when the training stops within an epoch.
        if trainer.is_last_batch:
            self._training.epoch_end()
            self._stop_if_asked(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._log_epoch(trainer)
        self._training.fit_end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._leave(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._leave()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self._training.checkpoint_saved()

    def _checkpoint_written(self, _: Any, filepath: Any, *__: Any, **more: Any) -> None:
        self._training.checkpoint_written(filepath, **self._score_of(str(filepath)))

    def _score_of(self, path: str) -> dict[str, Any]:
        for one in self._trainer.checkpoint_callbacks:
            name = getattr(one, "monitor", None)
            if name is not None and path in (scores := getattr(one, "best_k_models", {})):
                label = "val" if name in self._training.state.eval_metric_values.get("val", {}) else "train"
                return {"metric": f"metrics/{label}/{name}", "value": scores[path], "mode": one.mode}
        return {}

    def state_dict(self) -> dict[str, Any]:
        return self._reached if self.detached else self._training.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resumed = state_dict

    def detach(self, error: BaseException) -> None:
        # The state of an earlier fit does not belong to this fit's checkpoints.
        self._reached = {}
        super().detach(error)

    def _release(self) -> AttachedTraining:
        self._restore_intervals()
        self._choose_hooks(_OF_HOOKS)
        del self._trainer
        return super()._release()

    def _leave(self, error: BaseException | None = None) -> None:
        self._reached = self._training.state_dict()
        self._end(error)

    def _before_fetch(self) -> None:
        if not self.detached and not AT_FETCH.isdisjoint(self._training.requested_events):
            self._start_fetch()

    def _start_fetch(self) -> None:
        self._training.fetch_start()

    def _stop_if_asked(self, trainer: Any) -> None:
        if self._training.state.stopped:
            trainer.should_stop = True

    def _log_epoch(self, trainer: Any) -> None:
        # Lightning computes them after the last hook of an epoch.
        results, found = trainer._results, trainer.callback_metrics
        names = [results._forked_name(one, False)[1] for one in results.values() if one.meta.on_epoch]
        values = {name: found[name] for name in names if found.get(name) is not self._epoch_values.get(name)}
        self._epoch_values.update(values)
        self._training.log_metrics(values)

    def _evaluate(self) -> None:
        trainer = self._trainer
        if not trainer.enable_validation:
            raise ConfigurationError(
                "cannot evaluate on command: the module has no validation_step, or there is no data to validate on"
            )
        for name, value in _AT_ONCE.items():
            interval = getattr(trainer, name, None)
            # An unused interval is None; the one of batches is None if evaluations go by time.
            if name not in self._intervals and (interval is not None or name == "val_check_batch"):
                self._intervals[name] = interval
                setattr(trainer, name, value)

    def _restore_intervals(self) -> None:
        vars(self._trainer).update(self._intervals)
        self._intervals.clear()


class AutomaticCallback(OffloopCallback):
    """The callback of ``offloop run``, inactive if a script has attached offloop itself."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if sum(isinstance(one, OffloopCallback) for one in trainer.callbacks) == 1:
            super().on_train_start(trainer, pl_module)


def _save(trainer: Any) -> str:
    folder = getattr(trainer.checkpoint_callback, "dirpath", None)
    if folder is None:
        folder = os.path.join(trainer.default_root_dir, "checkpoints")
    name = f"epoch={trainer.current_epoch}-step={trainer.global_step}-on_command.ckpt"
    path = os.path.join(folder, name)
    trainer.save_checkpoint(path, weights_only=False)
    return path


def _logged(trainer: Any) -> dict[str, Any]:
    """Return the values that the module logged for the finished evaluation.

    ``trainer.callback_metrics`` would include the progress bar's, and so wait for a GPU."""
    results = trainer._results
    return {
        results._forked_name(one, False)[1]: value
        for one in results.values()
        if not one.has_reset and (value := results._get_cache(one, False)) is not None
    }


def _data(trainer: Any) -> dict[str, Any]:
    # With manual optimization the number of steps in an epoch is unknown.
    accumulated = trainer.accumulate_grad_batches
    batches = _finite(trainer.num_training_batches) if trainer.lightning_module.automatic_optimization else None
    return {
        "dataloader": trainer.train_dataloader,
        "batches_per_epoch": None if batches is None else -(-batches // accumulated),
        "microbatches": accumulated,
    }


def _finite(number: float) -> int | None:
    return None if number == float("inf") else int(number)


def _max_duration(trainer: Any) -> str | None:
    steps, epochs, per_epoch = trainer.max_steps, trainer.max_epochs, _data(trainer)["batches_per_epoch"]
    is_counted = steps != -1 and trainer.lightning_module.automatic_optimization
    if is_counted and (epochs == -1 or per_epoch is None or steps <= epochs * per_epoch):
        return f"{steps}ba"
    if epochs != -1:
        return f"{epochs}ep"
    # Lightning makes a Timer from max_time=.
    timers = [one for one in trainer.callbacks if type(one).__name__ == "Timer"]
    seconds = [left for one in timers if (left := one.time_remaining()) is not None]
    return f"{round(min(seconds))}sec" if seconds else None


def _config(trainer: Any, pl_module: Any) -> dict[str, Any]:
    facts = {name: value for name in _TRAINER_FACTS if (value := getattr(trainer, name)) is not None}
    data = getattr(trainer.datamodule, "hparams", None) or {}
    hparams = {**data, **pl_module.hparams}
    return {
        **({"hparams": hparams} if hparams else {}),
        "trainer": {"strategy": type(trainer.strategy).__name__, **facts},
    }
