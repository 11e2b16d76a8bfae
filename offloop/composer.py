"""The adapter for MosaicML Composer: ``Trainer(..., callbacks=[OffloopCallback()])``."""

import datetime
import operator
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any, Unpack

from offloop.attached.adapter import Adapter, contain, missing
from offloop.attached.options import Options, as_run_name, is_enabled
from offloop.attached.training import AttachedTraining, Framework, unwrapped
from offloop.bus.errors import ConfigurationError
from offloop.bus.types.event import Event
from offloop.bus.types.timestamp import Timestamp, TrainingTime

try:
    import composer
except ModuleNotFoundError as _error:
    # The distribution has another name than the package, and pip finds old versions first.
    raise missing(_error, "offloop.composer", "'mosaicml>=0.32'", ("composer",)) from None

_FRAMEWORK = Framework("Composer", "mosaicml", frozenset(Event))
_counts_of = operator.attrgetter(*(f"{name}.value" for name in TrainingTime._fields[:-4]))
_durations_of = operator.attrgetter(*TrainingTime._fields[-4:])
_MICROSECOND = datetime.timedelta(microseconds=1)
_TOTAL = "loss/train/total"
_OURS = {event.value: Event(event.value) for event in composer.Event}


@contain("_start", "_take", "close", "load_state_dict", "_mark_checkpoint")
class OffloopCallback(Adapter, composer.Callback):  # type: ignore[misc]
    """Publishes all events of a Composer trainer as a run, at Composer's own training time. All ranks have one.

    Args:
        options: as in :class:`offloop.trainer.Trainer`, see :class:`offloop.attached.options.Options`. ``run_name``
            defaults to Composer's name.

    Raises :class:`offloop.bus.errors.ConfigurationError` for invalid arguments."""

    def __init__(self, **options: Unpack[Options]) -> None:
        super().__init__(options)
        self._resumed: Mapping[str, Any] | None = None
        self._restored: list[tuple[Any, str, Any]] = []
        handlers = {event: getattr(self, f"_on_{event.value}", None) for event in Event}
        self._handlers = {event: handler for event, handler in handlers.items() if handler is not None}
        self._always = self._handlers.keys() - {Event.BATCH_CHECKPOINT}

    def run_event(self, event: Any, state: Any, logger: Any) -> None:
        # Most events of a batch end here: an enum's hash and value are functions of Python's.
        ours = _OURS[event._value_]
        if ours is Event.INIT:
            # Each trainer has its own run, also after an error of offloop in another one.
            self.detached: bool = not is_enabled(self._options)
            self._start(state)
        elif not self.detached and (ours in self._always or ours in self._training.requested_events):
            self._take(ours, state)

    def _take(self, ours: Event, state: Any) -> None:
        training = self._training
        if ours in self._handlers:
            self._handlers[ours](training, state)
        else:
            self._copy_state(training, state)
            training.publish_kept()
            training.state.timestamp = _time(state.timestamp)
            training.fire(ours)

    def close(self, state: Any, logger: Any) -> None:
        if hasattr(self, "_training"):
            self._end(getattr(sys, "last_value", None) if self._training.state.fitting else None)

    def state_dict(self) -> dict[str, Any]:
        # Called when a checkpoint is written.
        self._mark_checkpoint()
        return self._training.state_dict() if hasattr(self, "_training") else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._resumed = state or None

    def detach(self, error: BaseException) -> None:
        """End the run because of an error of offloop."""
        self._restore()
        super().detach(error)

    def _start(self, state: Any) -> None:
        self._composer = state
        self._training = AttachedTraining(
            _FRAMEWORK,
            {**self._options, "run_name": self._options.get("run_name") or as_run_name(state.run_name)},
            state.model,
            state.optimizers or (),
            max_duration=_text(state.max_duration),
            precision=state.precision.value,
            config={"algorithms": [type(one).__name__ for one in state.algorithms]},
            evaluate=self._evaluate,
            checkpoint=self._save,
        )

    def _mark_checkpoint(self) -> None:
        if hasattr(self, "_training"):
            self._training.checkpoint_saved()

    def _copy_state(self, training: AttachedTraining, state: Any) -> None:
        ours = training.state
        ours.batch, ours.outputs, ours.loss = state.batch, state.outputs, state.loss

    def _on_before_load(self, training: AttachedTraining, state: Any) -> None:
        """Do nothing: :meth:`_on_after_load` publishes it, once the checkpoint is known."""

    def _on_after_load(self, training: AttachedTraining, state: Any) -> None:
        training.open(self._resumed, continues=int(state.timestamp.batch) > 0)
        for event in (Event.BEFORE_LOAD, Event.AFTER_LOAD):
            if event in training.requested_events:
                training.fire(event)

    def _on_fit_start(self, training: AttachedTraining, state: Any) -> None:
        ours = training.state
        ours.model = unwrapped(state.model)
        ours.optimizers, ours.schedulers = list(state.optimizers), list(state.schedulers)
        ours.max_duration = _text(state.max_duration)
        ours.device_train_microbatch_size = state.device_train_microbatch_size
        training.fit_start(
            dataloader=state.dataloader,
            batches_per_epoch=_length(state),
            resumed=self._resumed,
            timestamp=_time(state.timestamp),
        )
        self._resumed = None

    def _on_epoch_start(self, training: AttachedTraining, state: Any) -> None:
        self._copy_state(training, state)
        training.epoch_start()

    def _on_batch_start(self, training: AttachedTraining, state: Any) -> None:
        self._restore()
        if Event.BATCH_START in training.requested_events:
            self._copy_state(training, state)
        else:
            # Held longer, they would be in memory together with the next ones.
            training.state.outputs = training.state.loss = None
        training.batch_start(state.batch)

    def _on_batch_end(self, training: AttachedTraining, state: Any) -> None:
        self._copy_state(training, state)
        losses = state.total_loss_dict or {}
        if _TOTAL in losses:
            # Composer has already read them and reduced them over the ranks.
            training.add_loss(losses[_TOTAL])
        if len(losses) > 1:
            training.log({name: value for name, value in losses.items() if name != _TOTAL})
        if state.train_metric_values:
            training.log_metrics(state.train_metric_values)
        # Composer does not change a timestamp.
        training.batch_end(reached=partial(_time, state.timestamp))
        if training.state.stopped:
            state.stop_training()

    def _on_batch_checkpoint(self, training: AttachedTraining, state: Any) -> None:
        training.save_place()

    _on_epoch_checkpoint = _on_batch_checkpoint

    def _on_epoch_end(self, training: AttachedTraining, state: Any) -> None:
        self._restore()
        training.epoch_end(timestamp=_time(state.timestamp))
        if training.state.stopped:
            state.stop_training()

    def _on_eval_start(self, training: AttachedTraining, state: Any) -> None:
        training.eval_start(state.dataloader_label, batches=_length(state), alone=False)

    def _on_eval_batch_start(self, training: AttachedTraining, state: Any) -> None:
        training.eval_batch_start(state.batch)

    def _on_eval_batch_end(self, training: AttachedTraining, state: Any) -> None:
        training.state.outputs = state.outputs
        training.eval_batch_end()

    def _on_eval_end(self, training: AttachedTraining, state: Any) -> None:
        names = state.eval_metrics.get(state.dataloader_label, ())
        found = {name: state.eval_metric_values[name] for name in names if name in state.eval_metric_values}
        training.eval_end(found, alone=False)

    def _on_predict_start(self, training: AttachedTraining, state: Any) -> None:
        training.predict_start(batches=_length(state))

    def _on_predict_batch_start(self, training: AttachedTraining, state: Any) -> None:
        training.predict_batch_start(state.batch)

    def _on_predict_batch_end(self, training: AttachedTraining, state: Any) -> None:
        training.state.outputs = state.outputs
        training.predict_batch_end()

    def _on_predict_end(self, training: AttachedTraining, state: Any) -> None:
        training.predict_end()

    def _on_fit_end(self, training: AttachedTraining, state: Any) -> None:
        self._restore()
        training.fit_end()

    def _evaluate(self) -> None:
        if not self._composer.evaluators:
            raise ConfigurationError("cannot evaluate on command: the Trainer has no eval_dataloader")
        for one in self._composer.evaluators:
            self._make_due(one, "eval_interval")

    def _save(self) -> None:
        savers = [one for one in self._composer.callbacks if isinstance(one, composer.callbacks.CheckpointSaver)]
        if not savers:
            raise ConfigurationError("cannot save a checkpoint on command: give the Trainer a save_folder")
        for one in savers:
            self._make_due(one, "save_interval")

    def _make_due(self, owner: Any, interval: str) -> None:
        # Composer asks the interval whether it is due; it is restored when the next batch is fetched.
        self._restored.append((owner, interval, getattr(owner, interval)))
        setattr(owner, interval, lambda *_: True)

    def _restore(self) -> None:
        while self._restored:
            setattr(*self._restored.pop())


def _length(state: Any) -> int | None:
    return None if state.dataloader_len is None else int(state.dataloader_len)


def _text(duration: Any) -> str | None:
    return None if duration is None else duration.to_timestring()


def _time(timestamp: Any) -> Timestamp:
    durations = [one // _MICROSECOND for one in _durations_of(timestamp)]
    return Timestamp.from_values(TrainingTime(*_counts_of(timestamp), *durations))
