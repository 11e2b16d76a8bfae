"""When checkpoints are written."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.event import Event
from offloop.bus.types.time import Time
from offloop.bus.types.timestamp import TrainingTime
from offloop.trainer.arguments.durations import Interval
from offloop.trainer.checkpoints.folder import CheckpointFolder
from offloop.trainer.engine.state import State

_EVENTS = (Event.EPOCH_CHECKPOINT, Event.ITERATION_CHECKPOINT, Event.BATCH_CHECKPOINT)


class Announce(Protocol):
    """Marks in the stream where a checkpoint is saved or loaded, as :meth:`offloop.bus.Publisher.mark_checkpoint`
    does."""

    def __call__(self, action: Literal["save", "load"], timestamp: TrainingTime, run: str | None = None) -> object: ...


class TrainingSaver:
    """Writes a checkpoint every so often and when the training ends, once for each batch; none without a folder.

    An evaluation that comes after the last one, at the end of the training, is put into it too. ``join`` is called on
    the other ranks with their trees while the first one saves its own; ``announce`` is called before that. Reference:
    ``composer/callbacks/checkpoint_saver.py``, but for the evaluation.
    """

    def __init__(
        self,
        state: State,
        folder: CheckpointFolder | None,
        interval: Time,
        join: Callable[[Mapping[str, Any]], None],
        weights_only: bool,
        announce: Announce,
    ) -> None:
        self._state = state
        self._folder = folder
        self._interval = interval
        self._join = join
        self._weights_only = weights_only
        self._announce = announce
        self._gather: Callable[[], dict[str, Any]] = dict
        self._planned: Interval | None = None
        # The state that a training resumes from, or begins with, need not be written again.
        self._last_batch = state.timestamp.values.batch
        self._last_evaluation: Any = self._evaluation
        self.watched: frozenset[Event] = frozenset()
        """The events at which a checkpoint may be due."""

    @property
    def intervals(self) -> list[Time]:
        """The interval of checkpoints."""
        return [] if self._folder is None else [self._interval]

    def plan(self, max_duration: Time, gather: Callable[[], dict[str, Any]]) -> None:
        """Plans when checkpoints are due in a training of that length, and how their contents are gathered."""
        if self._folder is None:
            return
        self._gather = gather
        self._planned = Interval(self._interval, max_duration, self._state.dataloader_len, _EVENTS)
        self.watched = frozenset() if self._planned.is_never else frozenset(_EVENTS)

    def save_if_due(self, event: Event) -> None:
        """Writes a checkpoint if one is due at this event, or the training ends here."""
        state = self._state
        assert self._planned is not None  # the loop runs after plan()
        if state.timestamp.values.batch == self._last_batch:
            return
        if self._planned.is_due(event, state.timestamp, state.previous_timestamp) or state.reached_max_duration():
            self.save_now()

    def save_last(self) -> None:
        """Writes the last checkpoint again if the model has been evaluated since."""
        if self._folder is None or self._weights_only:
            return
        if self._last_batch == self._state.timestamp.values.batch and self._last_evaluation is not self._evaluation:
            self._save(self._folder.replace_last)

    def save_now(self) -> Path | None:
        """Writes a checkpoint unless this batch has one; with several ranks all have to call it. Returns its path, on
        the first rank, if this training has written it."""
        if self._folder is None:
            raise ConfigurationError("this training saves no checkpoints: start it with a save_folder")
        if self._last_batch != self._state.timestamp.values.batch:
            self._save(partial(self._folder.save, self._state.timestamp))
        return self._folder.last_path

    def _save(self, write: Callable[[dict[str, Any]], object]) -> None:
        tree = self._gather()
        if self._state.rank == 0:
            self._announce("save", self._state.timestamp.values)
            write(tree)
        else:
            self._join(tree)
        self._last_batch = self._state.timestamp.values.batch
        self._last_evaluation = self._evaluation

    @property
    def _evaluation(self) -> Any:
        # A new object with each evaluation.
        return self._state.eval_metric_values
