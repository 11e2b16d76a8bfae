"""When checkpoints are written."""

from collections.abc import Callable, Mapping
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


class NoSaver:
    """Writes no checkpoints."""

    watched: frozenset[Event] = frozenset()
    intervals: Mapping[str, Time] = {}

    def save_if_due(self, event: Event) -> None:
        """Does nothing."""

    def save_last(self) -> None:
        """Does nothing."""

    def save_now(self) -> Path | None:
        """Raises ``ConfigurationError``."""
        raise ConfigurationError("this training saves no checkpoints: start it with a save_folder")


class IntervalSaver:
    """Writes a checkpoint every so often and when the training ends, once for each batch.

    An evaluation that comes after the last one, at the end of the training, is put into it too. ``join`` is what the
    other ranks do with their trees while the first one saves its own; ``announce`` is called before that. Reference:
    ``composer/callbacks/checkpoint_saver.py``, but for the evaluation.
    """

    def __init__(
        self,
        state: State,
        folder: CheckpointFolder,
        interval: Time,
        join: Callable[[Mapping[str, Any]], None],
        weights_only: bool,
        announce: Announce,
    ) -> None:
        self._state = state
        self._folder = folder
        self.intervals = {f"save_interval {str(interval)!r}": interval}
        """How often checkpoints are due, as people would call it."""
        self._interval = interval
        self._join = join
        self._weights_only = weights_only
        self._announce = announce
        self._gather: Callable[[], dict[str, Any]] = dict
        self._planned: Interval | None = None
        # What a training resumes from, or begins with, need not be written again.
        self._last_batch = state.timestamp.values.batch
        self._last_evaluation: Any = self._evaluation
        self.watched: frozenset[Event] = frozenset()

    def plan(self, max_duration: Time, gather: Callable[[], dict[str, Any]]) -> None:
        """Settles when checkpoints are due in a training of that length, and what is written then."""
        self._gather = gather
        self._planned = Interval(self._interval, max_duration, self._state.dataloader_len, _EVENTS)
        self.watched = frozenset() if self._planned.is_never else frozenset(_EVENTS)

    def save_if_due(self, event: Event) -> None:
        """Writes a checkpoint if one is due at this event, or the training is over here."""
        state = self._state
        assert self._planned is not None  # the loop runs after plan()
        if state.timestamp.values.batch == self._last_batch:
            return
        if self._planned.is_due(event, state.timestamp, state.previous_timestamp) or state.reached_max_duration():
            self.save()

    def save_last(self) -> None:
        """Writes the last checkpoint again if the model has been evaluated since."""
        if self._weights_only:
            return
        if self._last_batch == self._state.timestamp.values.batch and self._last_evaluation is not self._evaluation:
            tree = self._gather()
            if self._state.rank == 0:
                self._announce("save", self._state.timestamp.values)
                self._folder.replace_last(tree)
            else:
                self._join(tree)
            self._last_evaluation = self._evaluation

    def save(self) -> None:
        """Writes a checkpoint now; the first rank does, for which all of them have to come here."""
        tree = self._gather()
        if self._state.rank == 0:
            self._announce("save", self._state.timestamp.values)
            self._folder.save(self._state.timestamp, tree)
        else:
            self._join(tree)
        self._last_batch = self._state.timestamp.values.batch
        self._last_evaluation = self._evaluation

    def save_now(self) -> Path | None:
        """Writes a checkpoint unless this batch has one; with several ranks all have to come here. Returns where it is,
        on the first rank, if this training has written it."""
        if self._last_batch != self._state.timestamp.values.batch:
            self.save()
        return self._folder.last_path

    @property
    def _evaluation(self) -> Any:
        # A new object with each evaluation.
        return self._state.eval_metric_values
