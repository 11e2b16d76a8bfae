"""Attaching to MosaicML Composer: ``Trainer(..., callbacks=[OffloopCallback()])``."""

import datetime
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, Unpack

from offloop.attached import (
    AttachedTraining,
    ConfigurationError,
    Event,
    Framework,
    Options,
    Timestamp,
    TrainingTime,
    check_options,
    contain,
    is_enabled,
    missing,
    unwrapped,
)

try:
    import composer
    import torch
except ModuleNotFoundError as error:
    # The distribution has another name than the package, and pip finds old versions first.
    raise missing(error, "offloop.composer", "'mosaicml>=0.32'", ("composer",)) from None

_FRAMEWORK = Framework("Composer", "mosaicml", frozenset(Event))
_COUNTS, _DURATIONS = TrainingTime._fields[:-4], TrainingTime._fields[-4:]
_MICROSECOND = datetime.timedelta(microseconds=1)
_TOTAL = "loss/train/total"
_OURS = {event: Event(event.value) for event in composer.Event}
_NOT_IN_NAMES = re.compile("[^A-Za-z0-9._-]+")


@contain("run_event", "close", "load_state_dict", "_mark_checkpoint")
class OffloopCallback(composer.Callback):  # type: ignore[misc]
    """Publishes what a trainer of Composer does, as a run: all of its events, at its own training time.

    With several ranks each of them has it.

    Args:
        options: what :class:`offloop.trainer.Trainer` knows by the same names, see
            :class:`offloop.attached.options.Options`. Without ``run_name`` the run has Composer's name.

    Raises :class:`offloop.bus.errors.ConfigurationError` for arguments that are not allowed."""

    def __init__(self, **options: Unpack[Options]) -> None:
        super().__init__()
        check_options(options)
        self.detached = not is_enabled(options)
        """Whether there is no run: it is disabled, or an error of ours has ended it; the training continues."""
        self._options = options
        self._training: AttachedTraining | None = None
        self._resumed: Mapping[str, Any] | None = None
        self._restored: list[tuple[Any, str, Any]] = []

    def run_event(self, event: Any, state: Any, logger: Any) -> None:
        """Publishes an event."""
        training, ours = self._training, _OURS[event]
        if training is None:
            if ours is Event.INIT:
                self._start(state)
        elif ours in _HANDLERS:
            _HANDLERS[ours](self, training, state)
        elif ours in training.requested_events:
            self._look(training, state)
            training.state.timestamp = _time(state.timestamp)
            training.fire(ours)

    def close(self, state: Any, logger: Any) -> None:
        """Ends the run, with the trainer or with the program."""
        training, self._training = self._training, None
        if training is not None:
            training.close(getattr(sys, "last_value", None) if training.state.fitting else None)

    def state_dict(self) -> dict[str, Any]:
        """What goes into Composer's checkpoints; asked for when one is written."""
        self._mark_checkpoint()
        return {} if self._training is None else self._training.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what a checkpoint says."""
        self._resumed = state or None

    def detach(self, error: BaseException) -> None:
        """Ends the run because of an error of ours."""
        self._restore()
        training, self._training = self._training, None
        if training is not None:
            training.detach(error)

    def _start(self, state: Any) -> None:
        name = self._options.get("run_name") or _NOT_IN_NAMES.sub("-", state.run_name or "").strip("-._")[:100]
        self._composer = state
        self._training = AttachedTraining(
            _FRAMEWORK,
            {**self._options, "run_name": name or None},
            state.model,
            state.optimizers or (),
            max_duration=_text(state.max_duration),
            precision=state.precision.value,
            config={"algorithms": [type(one).__name__ for one in state.algorithms]},
            evaluate=self._evaluate,
            checkpoint=self._save,
        )

    def _mark_checkpoint(self) -> None:
        if self._training is not None:
            self._training.checkpoint_saved()

    def _look(self, training: AttachedTraining, state: Any) -> None:
        """Takes over what consumers may ask for of the state."""
        ours = training.state
        ours.batch, ours.outputs, ours.loss = state.batch, state.outputs, state.loss

    def _before_load(self, training: AttachedTraining, state: Any) -> None:
        """Published with the next event, which knows whether a checkpoint is loaded."""

    def _after_load(self, training: AttachedTraining, state: Any) -> None:
        training.open(self._resumed, continues=int(state.timestamp.batch) > 0)
        for event in (Event.BEFORE_LOAD, Event.AFTER_LOAD):
            if event in training.requested_events:
                training.fire(event)

    def _begin_fit(self, training: AttachedTraining, state: Any) -> None:
        ours = training.state
        ours.model = unwrapped(state.model)
        ours.optimizers, ours.schedulers = list(state.optimizers), list(state.schedulers)
        ours.max_duration = _text(state.max_duration)
        ours.device_train_microbatch_size = state.device_train_microbatch_size
        length = state.dataloader_len
        training.fit_start(
            dataloader=state.dataloader,
            batches_per_epoch=None if length is None else int(length),
            resumed=self._resumed,
            timestamp=_time(state.timestamp),
        )
        self._resumed = None

    def _begin_epoch(self, training: AttachedTraining, state: Any) -> None:
        self._look(training, state)
        training.epoch_start()

    def _begin_batch(self, training: AttachedTraining, state: Any) -> None:
        self._look(training, state)
        training.batch_start(state.batch)

    def _end_batch(self, training: AttachedTraining, state: Any) -> None:
        losses = state.total_loss_dict or {}
        if _TOTAL in losses:
            # Composer has read them, and reduced them over the ranks.
            training.add_loss(torch.tensor(losses[_TOTAL], dtype=torch.float64))
        more = {name: value for name, value in losses.items() if name != _TOTAL}
        training.log(more | {f"metrics/train/{name}": value for name, value in state.train_metric_values.items()})
        training.batch_end(timestamp=_time(state.timestamp))
        self._stop_if_asked(training, state)

    def _checkpoint_place(self, training: AttachedTraining, state: Any) -> None:
        training.save_place()

    def _begin_fetching(self, training: AttachedTraining, state: Any) -> None:
        self._restore()
        training.fire(Event.BEFORE_DATALOADER)

    def _end_epoch(self, training: AttachedTraining, state: Any) -> None:
        self._restore()
        training.epoch_end(timestamp=_time(state.timestamp))
        self._stop_if_asked(training, state)

    def _begin_evaluation(self, training: AttachedTraining, state: Any) -> None:
        length = state.dataloader_len
        training.eval_start(state.dataloader_label, batches=None if length is None else int(length), alone=False)

    def _begin_evaluation_batch(self, training: AttachedTraining, state: Any) -> None:
        training.eval_batch_start(state.batch)

    def _end_evaluation_batch(self, training: AttachedTraining, state: Any) -> None:
        training.state.outputs = state.outputs
        training.eval_batch_end()

    def _end_evaluation(self, training: AttachedTraining, state: Any) -> None:
        names = state.eval_metrics.get(state.dataloader_label, ())
        found = {name: state.eval_metric_values[name] for name in names if name in state.eval_metric_values}
        training.eval_end(found, alone=False)

    def _begin_prediction(self, training: AttachedTraining, state: Any) -> None:
        length = state.dataloader_len
        training.predict_start(batches=None if length is None else int(length))

    def _begin_prediction_batch(self, training: AttachedTraining, state: Any) -> None:
        training.predict_batch_start(state.batch)

    def _end_prediction_batch(self, training: AttachedTraining, state: Any) -> None:
        training.state.outputs = state.outputs
        training.predict_batch_end()

    def _end_prediction(self, training: AttachedTraining, state: Any) -> None:
        training.predict_end()

    def _end_fit(self, training: AttachedTraining, state: Any) -> None:
        self._restore()
        training.fit_end()

    def _stop_if_asked(self, training: AttachedTraining, state: Any) -> None:
        if training.is_stopped:
            state.stop_training()

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
        """Makes due, until the next batch is fetched, what Composer asks an interval for."""
        self._restored.append((owner, interval, getattr(owner, interval)))
        setattr(owner, interval, lambda *_: True)

    def _restore(self) -> None:
        while self._restored:
            setattr(*self._restored.pop())


_HANDLERS: dict[Event, Callable[[OffloopCallback, AttachedTraining, Any], None]] = {
    Event.BEFORE_LOAD: OffloopCallback._before_load,
    Event.AFTER_LOAD: OffloopCallback._after_load,
    Event.FIT_START: OffloopCallback._begin_fit,
    Event.EPOCH_START: OffloopCallback._begin_epoch,
    Event.BEFORE_DATALOADER: OffloopCallback._begin_fetching,
    Event.BATCH_START: OffloopCallback._begin_batch,
    Event.BATCH_END: OffloopCallback._end_batch,
    Event.BATCH_CHECKPOINT: OffloopCallback._checkpoint_place,
    Event.EPOCH_END: OffloopCallback._end_epoch,
    Event.EPOCH_CHECKPOINT: OffloopCallback._checkpoint_place,
    Event.EVAL_START: OffloopCallback._begin_evaluation,
    Event.EVAL_BATCH_START: OffloopCallback._begin_evaluation_batch,
    Event.EVAL_BATCH_END: OffloopCallback._end_evaluation_batch,
    Event.EVAL_END: OffloopCallback._end_evaluation,
    Event.PREDICT_START: OffloopCallback._begin_prediction,
    Event.PREDICT_BATCH_START: OffloopCallback._begin_prediction_batch,
    Event.PREDICT_BATCH_END: OffloopCallback._end_prediction_batch,
    Event.PREDICT_END: OffloopCallback._end_prediction,
    Event.FIT_END: OffloopCallback._end_fit,
}


def _text(duration: Any) -> str | None:
    return None if duration is None else duration.to_timestring()


def _time(timestamp: Any) -> Timestamp:
    """Composer's training time as one of ours."""
    counts = [getattr(timestamp, name).value for name in _COUNTS]
    return Timestamp.from_values(counts + [getattr(timestamp, name) // _MICROSECOND for name in _DURATIONS])
