"""The training loop."""

import datetime
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any

from offloop.bus.errors import CheckpointError, ConfigurationError
from offloop.bus.types.event import Event
from offloop.bus.types.time import TimeUnit
from offloop.trainer.checkpoints.checkpoints import Checkpoints
from offloop.trainer.control.interrupts import Interruption
from offloop.trainer.control.remote_control import RemoteControl
from offloop.trainer.distributed.ranks import Ranks
from offloop.trainer.engine.engine import Engine
from offloop.trainer.engine.state import State
from offloop.trainer.evaluation.evaluation import Evaluation
from offloop.trainer.loop.progress import ProgressDisplay
from offloop.trainer.loop.step import TrainStep
from offloop.trainer.schedulers import TimeAwareScheduler

# Looked up once: in Python 3.11 finding a member of an enum takes longer than running an unrequested event.
FIT_START, FIT_END = Event.FIT_START, Event.FIT_END
ITERATION_START = Event.ITERATION_START
ITERATION_END, ITERATION_CHECKPOINT = Event.ITERATION_END, Event.ITERATION_CHECKPOINT
EPOCH_START, EPOCH_END, EPOCH_CHECKPOINT = Event.EPOCH_START, Event.EPOCH_END, Event.EPOCH_CHECKPOINT
BEFORE_DATALOADER, AFTER_DATALOADER = Event.BEFORE_DATALOADER, Event.AFTER_DATALOADER
BATCH_START, BATCH_END, BATCH_CHECKPOINT = Event.BATCH_START, Event.BATCH_END, Event.BATCH_CHECKPOINT


class TrainingLoop:
    """Trains until ``state.max_duration`` is reached.

    :class:`offloop.bus.types.event.Event` shows the same loop with its events. Reference:
    ``composer/trainer/trainer.py``, ``_train_loop``."""

    def __init__(
        self,
        state: State,
        engine: Engine,
        step: TrainStep,
        evaluation: Evaluation,
        checkpoints: Checkpoints,
        progress: ProgressDisplay,
        control: RemoteControl,
        clock: Callable[[], int],
        ranks: Ranks | None,
        *,
        step_schedulers_every_batch: bool | None = None,
    ) -> None:
        data, _, self._subset_num_batches = state.dataloader_in_use
        assert data is not None  # the trainer has set it
        self._data = data
        self._state = state
        self._engine = engine
        self._step = step
        self._evaluation = evaluation
        self._checkpoints = checkpoints
        self._loader_resume = checkpoints.loader_resume
        self._progress = progress
        self._clock = clock
        self._control = control
        self._ranks = ranks
        every_batch = [
            isinstance(one, TimeAwareScheduler) if step_schedulers_every_batch is None else step_schedulers_every_batch
            for one in state.schedulers
        ]
        self._batch_schedulers = list(itertools.compress(state.schedulers, every_batch))
        self._epoch_schedulers = list(itertools.compress(state.schedulers, map(operator.not_, every_batch)))
        self._tokens = 0
        self._batch_began = 0
        # Whether any rank has commands, as agreed at the last batch.
        self._has_commands = False

    def run(self, interruption: Interruption) -> None:
        """Run from ``FIT_START`` to ``FIT_END``, and a last evaluation unless interrupted."""
        state = self._state
        state.recompute_gradients = self._step.recompute_gradients
        state.evaluate_now = self._evaluation.run_now
        state.gather_checkpoint = self._checkpoints.gather
        self._control.checkpoint = self._checkpoints.save_now
        try:
            self._run(interruption)
        finally:
            # No reference cycle through the state: a dropped trainer is freed at once.
            del state.recompute_gradients, state.evaluate_now
            state.gather_checkpoint = None
            self._control.checkpoint = None
            # A late request for this training is not meant for the next one.
            state.fitting = False
            state.withdraw_stop()
            self._control.reject_pending()

    def _run(self, interruption: Interruption) -> None:
        state, fire = self._state, self._engine.run_event
        state.model.train()
        self._progress.begin()
        self._batch_began = self._clock() // 1000
        state.fitting = True
        fire(FIT_START)
        if state.timestamp.values.batch_in_epoch == 0:
            self._loader_resume.restored(self._data.dataloader)
        if not self._has_epoch_to_end():
            # An iteration that was complete in the loaded checkpoint.
            self._end_iteration_if_due()
        while not state.reached_max_duration() or self._has_epoch_to_end():
            if state.timestamp.values.batch_in_epoch == 0:
                if state.timestamp.values.epoch_in_iteration == 0:
                    fire(ITERATION_START)
                fire(EPOCH_START)
            try:
                if self._run_epoch():
                    self._end_epoch()
            except RuntimeError as error:
                if self._ranks is not None or not interruption.explains(error):
                    raise
                self._stop_between_batches()
                break
        # After a stop at an event that comes after the checkpoint of its batch.
        self._checkpoints.save_if_due(BATCH_CHECKPOINT)
        state.fitting = False
        fire(FIT_END)
        if self._ranks is not None:
            interruption.requested = self._ranks.agree(0, interruption.requested)[1]
        if not interruption.requested:
            self._evaluation.run_last()
            self._checkpoints.save_last()

    def _run_epoch(self) -> bool:
        """Train on the batches of an epoch; returns whether it is complete."""
        state, fire, progress = self._state, self._engine.run_event, self._progress
        train, checkpoints = self._step.run, self._checkpoints
        saves = BATCH_CHECKPOINT in checkpoints.watched
        # Ranks follow the last agreement: later commands are not known on every rank.
        commands = self._control.waiting if self._ranks is None else ()
        length = state.iteration_length
        ends_iterations = length is not None and length.unit is TimeUnit.TOKEN
        for state.batch in self._fetch_batches():
            fire(AFTER_DATALOADER)
            fire(BATCH_START)
            train()
            for scheduler in self._batch_schedulers:
                scheduler.step()
            now = self._advance_batch()
            fire(BATCH_END)
            self._evaluate_if_due(BATCH_END)
            fire(BATCH_CHECKPOINT)
            if saves:
                checkpoints.save_if_due(BATCH_CHECKPOINT)
            if commands or self._has_commands:
                self._apply_commands(BATCH_CHECKPOINT)
            if ends_iterations and state.timestamp.values.batch_in_epoch != state.dataloader_len:
                self._end_iteration_if_due()
            if now >= progress.next_draw:
                progress.draw()
            if state.reached_max_duration():
                if state.timestamp.values.batch_in_epoch == state.dataloader_len:
                    return True
                self._loader_resume.suspend(self._data.dataloader)
                return False
        return True

    def _fetch_batches(self) -> Iterator[Any]:
        state, data, fire = self._state, self._data, self._engine.run_event
        epoch, done = state.timestamp.values.epoch, state.timestamp.values.batch_in_epoch
        skip = self._loader_resume.begin_epoch(data.dataloader, epoch, done)
        batches = iter(data.dataloader)
        if done and not skip:
            self._loader_resume.restored(data.dataloader)
        if self._subset_num_batches >= 0:
            batches = itertools.islice(batches, max(0, self._subset_num_batches - done + skip))
        fire(BEFORE_DATALOADER)
        for batch in batches:
            if skip:
                skip -= 1
                state.batch = batch
                if not skip:
                    self._loader_resume.restored(data.dataloader)
            else:
                batch = data.prepare(batch, state.device)
                state.batch_size = data.get_num_samples_in_batch(batch)
                self._tokens = data.get_num_tokens_in_batch(batch)
                if self._ranks is not None:
                    self._ranks.begin_count(state.batch_size, self._tokens)
                yield batch
            fire(BEFORE_DATALOADER)
        if skip:
            raise CheckpointError(
                f"train_dataloader gave {done - skip} batches, but {done} of this epoch were trained on: "
                "resume with the same data"
            )
        if self._ranks is not None:
            self._ranks.end_data()
        if state.timestamp.values.batch_in_epoch == 0:
            raise ConfigurationError("train_dataloader gave no batch: it is empty, or can be iterated over only once")

    def _has_epoch_to_end(self) -> bool:
        batches = self._state.timestamp.values.batch_in_epoch
        return batches > 0 and batches == self._state.dataloader_len

    def _end_epoch(self) -> None:
        state, fire = self._state, self._engine.run_event
        for scheduler in self._epoch_schedulers:
            scheduler.step()
        state.previous_timestamp = state.timestamp
        state.timestamp = state.timestamp.to_next_epoch()
        self._check_tokens()
        fire(EPOCH_END)
        self._evaluate_if_due(EPOCH_END)
        fire(EPOCH_CHECKPOINT)
        self._checkpoints.save_if_due(EPOCH_CHECKPOINT)
        self._progress.epoch_end()
        self._end_iteration_if_due()
        self._apply_pending_requests(EPOCH_CHECKPOINT)

    def _check_tokens(self) -> None:
        state = self._state
        if state.timestamp.values.token or state.stopped:
            return
        for time in (state.max_duration, state.iteration_length):
            if time is not None and time.unit is TimeUnit.TOKEN:
                raise ConfigurationError(
                    f"an epoch had no tokens, so {str(time)!r} would never be reached: wrap the dataloader in "
                    "offloop.trainer.DataSpec(dataloader, get_num_tokens_in_batch=...), or use another unit"
                )

    def _end_iteration_if_due(self) -> None:
        state, fire = self._state, self._engine.run_event
        length = state.iteration_length
        if length is None:
            return
        now = state.timestamp.values
        in_iteration = now.token_in_iteration if length.unit is TimeUnit.TOKEN else now.epoch_in_iteration
        if in_iteration < length.value:
            return
        state.previous_timestamp = state.timestamp
        in_epoch = state.timestamp.values.batch_in_epoch > 0
        if in_epoch:
            # The position in the epoch stays.
            state.timestamp = state.timestamp.copy(
                iteration=state.timestamp.values.iteration + 1,
                epoch_in_iteration=0,
                token_in_iteration=0,
                iteration_wct=datetime.timedelta(),
            )
        else:
            state.timestamp = state.timestamp.to_next_iteration()
        fire(ITERATION_END)
        self._evaluate_if_due(ITERATION_END)
        fire(ITERATION_CHECKPOINT)
        self._checkpoints.save_if_due(ITERATION_CHECKPOINT)
        if in_epoch and not state.reached_max_duration():
            fire(ITERATION_START)

    def _advance_batch(self) -> int:
        state, now = self._state, self._clock()
        microseconds = now // 1000
        samples, tokens, elapsed = state.batch_size or 0, self._tokens, microseconds - self._batch_began
        if self._ranks is not None:
            samples, tokens = self._ranks.end_count()
            elapsed, stop, self._has_commands = self._ranks.agree(
                elapsed, state.stop_requested, bool(self._control.waiting)
            )
        else:
            stop = state.stop_requested
        if stop:
            self._stop()
        state.previous_timestamp = state.timestamp
        state.timestamp = state.timestamp.advance_batch(samples, tokens, elapsed)
        self._batch_began = microseconds
        return now

    def _evaluate_if_due(self, event: Event) -> None:
        if event in self._evaluation.watched:
            # Training time excludes evaluations.
            before = self._state.eval_metric_values
            self._batch_began += self._evaluation.run_if_due(event) // 1000
            if self._state.eval_metric_values is not before:
                self._apply_pending_requests(event)

    def _apply_pending_requests(self, event: Event) -> None:
        stop, has_commands = self._state.stop_requested, bool(self._control.waiting)
        if self._ranks is not None:
            _, stop, has_commands = self._ranks.agree(0, stop, has_commands)
        if stop:
            self._stop()
        if has_commands:
            self._apply_commands(event)

    def _stop(self) -> None:
        reason = self._state.requested_reason
        if self._ranks is not None:
            reason = next(filter(None, self._ranks.each(lambda: self._state.requested_reason)), None)
        self._state.stop_now(reason)

    def _apply_commands(self, event: Event) -> None:
        began = self._clock()
        self._has_commands = False
        self._control.apply(event)
        self._batch_began += (self._clock() - began) // 1000

    def _stop_between_batches(self) -> None:
        state = self._state
        if state.dataloader_in_use[0] is not self._data:
            state.set_dataloader(self._data, "train", self._subset_num_batches)
        elif state.timestamp.values.batch_in_epoch == 0:
            # No batch of this epoch was used: it will be entered again.
            self._loader_resume.rollback()
        state.stop_now()
