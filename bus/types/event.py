"""The events of a training run, shared by trainers, recordings and callbacks."""

import re
from collections.abc import Container
from difflib import get_close_matches
from enum import Enum

from offloop.bus.errors import ConfigurationError


class Event(str, Enum):  # noqa: UP042 - str() of a member is its name, as people know it
    """A place in the training loop at which algorithms run and a snapshot can be published.

    Each event, where it is fired::

        INIT                                    # the first event, once per trainer
        BEFORE_LOAD                             # model and optimizers exist
        load a checkpoint if one was requested
        AFTER_LOAD

        FIT_START
        for each iteration:                     # one, unless an iteration length is set
            ITERATION_START                     # not when resuming in the middle; EPOCH_START likewise
            for each epoch of the iteration:
                EPOCH_START
                while True:
                    BEFORE_DATALOADER           # also before the dataloader turns out to be exhausted
                    batch = next(dataloader)    # exhausted: leave this loop
                    AFTER_DATALOADER            # the batch is on its device
                    BATCH_START
                    BEFORE_TRAIN_BATCH
                    for each microbatch:
                        BEFORE_FORWARD
                        outputs = model.forward(microbatch)
                        AFTER_FORWARD
                        BEFORE_LOSS
                        loss = model.loss(outputs, microbatch)
                        AFTER_LOSS
                        BEFORE_BACKWARD
                        loss.backward()
                        AFTER_BACKWARD
                    AFTER_TRAIN_BATCH           # gradients are complete, the weights still old: the place to clip
                    optimizer.step()
                    timestamp advances to the next batch
                    BATCH_END
                    evaluate() if due
                    BATCH_CHECKPOINT            # the place to save a state
                timestamp advances to the next epoch
                EPOCH_END
                evaluate() if due
                EPOCH_CHECKPOINT
            timestamp advances to the next iteration
            ITERATION_END                       # only with an iteration length
            ITERATION_CHECKPOINT                # only with an iteration length
        FIT_END
        evaluate() if the last state of the model has not been evaluated yet

        def evaluate():                         # within fit()
            EVAL_BEFORE_ALL
            for each evaluator:
                evaluate_one()
            EVAL_AFTER_ALL

        def eval():                             # called by the user, outside fit()
            EVAL_STANDALONE_START
            for each evaluator:
                evaluate_one()
            EVAL_STANDALONE_END

        def evaluate_one():
            EVAL_START
            for each batch:
                EVAL_BATCH_START
                EVAL_BEFORE_FORWARD
                outputs = model.eval_forward(batch)
                EVAL_AFTER_FORWARD
                update the metrics
                EVAL_BATCH_END
            EVAL_END                            # its metrics are computed

        def predict():
            PREDICT_START
            for each batch:
                PREDICT_BATCH_START
                PREDICT_BEFORE_FORWARD
                outputs = model.eval_forward(batch)
                PREDICT_AFTER_FORWARD
                PREDICT_BATCH_END               # the outputs of the batch have been collected
            PREDICT_END

    ``Event("batch_end")`` and ``Event("BATCH_END")`` are the same member, which equals both strings in any case. Its
    hash is that of its value, so a look-up in a set or dict is as fast as with a string.

    Further events are a training's own: ``Event("@rollout_end")`` is the custom event ``rollout_end``, and
    ``Event("#completions")`` the addition of rows to the table ``completions``. ``@*`` and ``#*`` stand for all of them
    in a request. Iteration over the members does not yield them.

    Raises ConfigurationError for an unknown name, with similar names. Reference: ``composer/core/event.py``."""

    INIT = "init"
    BEFORE_LOAD = "before_load"
    AFTER_LOAD = "after_load"
    FIT_START = "fit_start"
    ITERATION_START = "iteration_start"
    EPOCH_START = "epoch_start"
    BEFORE_DATALOADER = "before_dataloader"
    AFTER_DATALOADER = "after_dataloader"
    BATCH_START = "batch_start"
    BEFORE_TRAIN_BATCH = "before_train_batch"
    BEFORE_FORWARD = "before_forward"
    AFTER_FORWARD = "after_forward"
    BEFORE_LOSS = "before_loss"
    AFTER_LOSS = "after_loss"
    BEFORE_BACKWARD = "before_backward"
    AFTER_BACKWARD = "after_backward"
    AFTER_TRAIN_BATCH = "after_train_batch"
    BATCH_END = "batch_end"
    BATCH_CHECKPOINT = "batch_checkpoint"
    EPOCH_END = "epoch_end"
    EPOCH_CHECKPOINT = "epoch_checkpoint"
    ITERATION_END = "iteration_end"
    ITERATION_CHECKPOINT = "iteration_checkpoint"
    FIT_END = "fit_end"
    EVAL_BEFORE_ALL = "eval_before_all"
    EVAL_START = "eval_start"
    EVAL_BATCH_START = "eval_batch_start"
    EVAL_BEFORE_FORWARD = "eval_before_forward"
    EVAL_AFTER_FORWARD = "eval_after_forward"
    EVAL_BATCH_END = "eval_batch_end"
    EVAL_END = "eval_end"
    EVAL_AFTER_ALL = "eval_after_all"
    EVAL_STANDALONE_START = "eval_standalone_start"
    EVAL_STANDALONE_END = "eval_standalone_end"
    PREDICT_START = "predict_start"
    PREDICT_BATCH_START = "predict_batch_start"
    PREDICT_BEFORE_FORWARD = "predict_before_forward"
    PREDICT_AFTER_FORWARD = "predict_after_forward"
    PREDICT_BATCH_END = "predict_batch_end"
    PREDICT_END = "predict_end"

    # Taken from str and not from Enum, whose hash is a Python function: `event in requested_events` is asked for every
    # event of every batch.
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Event):
            return self is other
        if isinstance(other, str):
            return _BY_NAME.get(other.lower()) is self or self._value_ == other
        return NotImplemented

    def __ne__(self, other: object) -> bool:
        # str has its own `!=`, which ignores names and case.
        equal = self.__eq__(other)
        return equal if equal is NotImplemented else not equal

    @classmethod
    def _missing_(cls, value: object) -> "Event":
        if isinstance(value, str) and value[:1] in OWN:
            return _own_event(value)
        name = value.lower() if isinstance(value, str) else ""
        if name not in _BY_NAME:
            close = get_close_matches(name, _BY_NAME, n=3)
            hint = f"did you mean {' or '.join(close)}?" if close else "names look like batch_end or epoch_start"
            raise ConfigurationError(
                f"{value!r} is not an event: {hint}; your own events begin with '@', tables with '#'"
            )
        return _BY_NAME[name]

    @property
    def is_custom(self) -> bool:
        """True for a custom event or a span."""
        return self.value[0] == CUSTOM

    @property
    def is_table(self) -> bool:
        """True for the addition of rows to a table."""
        return self.value[0] == TABLE

    @property
    def is_own(self) -> bool:
        """True for a custom event or the rows of a table: it belongs to no place in the training loop."""
        return self.value[0] in OWN

    def is_in(self, events: Container["Event"]) -> bool:
        """Return whether events include this one, by itself or by ``@*`` or ``#*``."""
        return self in events or (self.is_own and self.wildcard in events)

    @property
    def wildcard(self) -> "Event":
        """``@*`` or ``#*``, for an event of one's own."""
        return _WILDCARDS[self.value[0]]

    @property
    def is_eval(self) -> bool:
        """True if it belongs to an evaluation, within ``fit()`` or alone."""
        return self.value.startswith("eval_")

    @property
    def is_predict(self) -> bool:
        """True if it belongs to ``predict()``."""
        return self.value.startswith("predict_")


CUSTOM = "@"
TABLE = "#"
OWN = (CUSTOM, TABLE)
_OWN_NAME = re.compile(r"[@#](\*|[A-Za-z_][A-Za-z0-9_.-]{0,99})\Z")
_own_events: dict[str, Event] = {}


def _own_event(value: str) -> Event:
    event = _own_events.get(value)
    if event is None:
        if not _OWN_NAME.match(value):
            raise ConfigurationError(
                f"{value[1:101]!r} cannot name an event or a table: use 1 to 100 letters, digits, '_', '.' or '-', "
                "beginning with a letter or '_'"
            )
        event = str.__new__(Event, value)
        event._name_ = event._value_ = value
        _own_events[value] = event
    return event


ANY_CUSTOM = Event(f"{CUSTOM}*")
"""All custom events and spans, in a request."""
ANY_TABLE = Event(f"{TABLE}*")
"""All tables, in a request."""
_WILDCARDS = {CUSTOM: ANY_CUSTOM, TABLE: ANY_TABLE}

_BY_NAME = {name.lower(): event for name, event in Event.__members__.items()}
