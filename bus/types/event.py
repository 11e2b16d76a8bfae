"""The events of a training run: the one vocabulary that trainers, recordings and callbacks share."""

from difflib import get_close_matches
from enum import Enum

from offloop.bus.errors import ConfigurationError


class Event(str, Enum):  # noqa: UP042 - str() of a member is its name, as people know it
    """A place in the training loop at which algorithms run and a snapshot can be published.

    Every event, where it is fired::

        INIT
        BEFORE_LOAD
        load a checkpoint if one was asked for
        AFTER_LOAD

        FIT_START
        for each iteration:                     # one, unless an iteration length is set
            ITERATION_START
            for each epoch of the iteration:
                EPOCH_START
                while True:
                    BEFORE_DATALOADER
                    batch = next(dataloader)    # exhausted: leave this loop
                    AFTER_DATALOADER
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
                    AFTER_TRAIN_BATCH           # gradients are complete, the weights still old
                    optimizer.step()
                    timestamp goes to the next batch
                    BATCH_END
                    evaluate() if due
                    BATCH_CHECKPOINT
                timestamp goes to the next epoch
                EPOCH_END
                evaluate() if due
                EPOCH_CHECKPOINT
            timestamp goes to the next iteration
            ITERATION_END                       # these two only with an iteration length
            ITERATION_CHECKPOINT
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
            EVAL_END

        def predict():
            PREDICT_START
            for each batch:
                PREDICT_BATCH_START
                PREDICT_BEFORE_FORWARD
                outputs = model.eval_forward(batch)
                PREDICT_AFTER_FORWARD
                PREDICT_BATCH_END
            PREDICT_END

    ``Event("batch_end")`` and ``Event("BATCH_END")`` are the same member, and it equals both strings in any case. The
    hash is that of the value, so that a look-up in a set or dict costs what it costs for a plain string.

    Raises :class:`offloop.bus.errors.ConfigurationError`, with the names that come close, for an unknown name.
    Reference: ``composer/core/event.py``.
    """

    INIT = "init"
    """The trainer is about to be ready: the first event of all, once per trainer."""
    BEFORE_LOAD = "before_load"
    """Model and optimizers are there; a checkpoint has not been loaded yet."""
    AFTER_LOAD = "after_load"
    """A checkpoint, if there was one to load, is loaded."""
    FIT_START = "fit_start"
    """``fit()`` begins."""
    ITERATION_START = "iteration_start"
    """The first batch of an iteration comes next; not fired when resuming in its middle."""
    EPOCH_START = "epoch_start"
    """The first batch of an epoch comes next; not fired when resuming in its middle."""
    BEFORE_DATALOADER = "before_dataloader"
    """The next batch is about to be fetched; also fired when it turns out that there is none."""
    AFTER_DATALOADER = "after_dataloader"
    """A batch has been fetched and is on its device."""
    BATCH_START = "batch_start"
    """Work on a batch begins."""
    BEFORE_TRAIN_BATCH = "before_train_batch"
    """Just before the forward and backward passes of a batch, once however many microbatches it has."""
    BEFORE_FORWARD = "before_forward"
    """Before the forward pass of a microbatch."""
    AFTER_FORWARD = "after_forward"
    """After the forward pass of a microbatch: its outputs are there."""
    BEFORE_LOSS = "before_loss"
    """Before the loss of a microbatch is computed."""
    AFTER_LOSS = "after_loss"
    """The loss of a microbatch is there."""
    BEFORE_BACKWARD = "before_backward"
    """Before the backward pass of a microbatch."""
    AFTER_BACKWARD = "after_backward"
    """After the backward pass of a microbatch."""
    AFTER_TRAIN_BATCH = "after_train_batch"
    """The gradients of the whole batch are there and the optimizers have not stepped yet: the place to clip."""
    BATCH_END = "batch_end"
    """The batch is trained on; the timestamp already counts it."""
    BATCH_CHECKPOINT = "batch_checkpoint"
    """After ``BATCH_END`` and the evaluation that it may cause: the place to save a state."""
    EPOCH_END = "epoch_end"
    """The dataloader is exhausted; the timestamp already shows the next epoch, with no batch in it."""
    EPOCH_CHECKPOINT = "epoch_checkpoint"
    """After ``EPOCH_END`` and the evaluation that it may cause: the place to save a state."""
    ITERATION_END = "iteration_end"
    """An iteration is complete; fired only when an iteration length is set."""
    ITERATION_CHECKPOINT = "iteration_checkpoint"
    """After ``ITERATION_END``: the place to save a state."""
    FIT_END = "fit_end"
    """``fit()`` is through with its training; a last evaluation may follow."""
    EVAL_BEFORE_ALL = "eval_before_all"
    """Before the first evaluator of an evaluation within ``fit()``."""
    EVAL_START = "eval_start"
    """An evaluator begins."""
    EVAL_BATCH_START = "eval_batch_start"
    """A batch of an evaluator has been fetched."""
    EVAL_BEFORE_FORWARD = "eval_before_forward"
    """Before the forward pass of an evaluation batch."""
    EVAL_AFTER_FORWARD = "eval_after_forward"
    """After the forward pass of an evaluation batch."""
    EVAL_BATCH_END = "eval_batch_end"
    """The metrics have taken in the batch."""
    EVAL_END = "eval_end"
    """An evaluator is through and its metrics are computed."""
    EVAL_AFTER_ALL = "eval_after_all"
    """After the last evaluator of an evaluation within ``fit()``."""
    EVAL_STANDALONE_START = "eval_standalone_start"
    """``eval()``, called outside ``fit()``, begins."""
    EVAL_STANDALONE_END = "eval_standalone_end"
    """``eval()``, called outside ``fit()``, is through."""
    PREDICT_START = "predict_start"
    """``predict()`` begins."""
    PREDICT_BATCH_START = "predict_batch_start"
    """A batch to predict has been fetched."""
    PREDICT_BEFORE_FORWARD = "predict_before_forward"
    """Before the forward pass of a prediction batch."""
    PREDICT_AFTER_FORWARD = "predict_after_forward"
    """After the forward pass of a prediction batch."""
    PREDICT_BATCH_END = "predict_batch_end"
    """The outputs of the batch have been collected."""
    PREDICT_END = "predict_end"
    """``predict()`` is through."""

    TRAINING_START = "fit_start"  # noqa: PIE796
    """Older name of ``FIT_START``: the same member."""
    TRAINING_END = "fit_end"  # noqa: PIE796
    """Older name of ``FIT_END``: the same member."""

    # Taken from str and not from Enum, whose hash is a Python function: `event in requested_events` is asked for every
    # event of every batch.
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Event):
            return self is other
        if isinstance(other, str):
            return _BY_NAME.get(other.lower()) is self
        return NotImplemented

    def __ne__(self, other: object) -> bool:
        # str brings a `!=` of its own, which knows nothing of names and case.
        equal = self.__eq__(other)
        return equal if equal is NotImplemented else not equal

    @classmethod
    def _missing_(cls, value: object) -> "Event":
        name = value.lower() if isinstance(value, str) else ""
        if name not in _BY_NAME:
            close = get_close_matches(name, _BY_NAME, n=3)
            hint = f"did you mean {' or '.join(close)}?" if close else "names look like batch_end or epoch_start"
            raise ConfigurationError(f"{value!r} is not an event: {hint}")
        return _BY_NAME[name]

    @property
    def is_before_event(self) -> bool:
        """Whether it opens something, such as ``BATCH_START`` or ``BEFORE_LOSS``."""
        return "before" in self._words or self._words[-1] == "start"

    @property
    def is_after_event(self) -> bool:
        """Whether it closes something, such as ``BATCH_END`` or ``AFTER_LOSS``."""
        return "after" in self._words or self._words[-1] == "end"

    @property
    def is_eval(self) -> bool:
        """Whether it belongs to an evaluation, within ``fit()`` or alone."""
        return self._words[0] == "eval"

    @property
    def is_predict(self) -> bool:
        """Whether it belongs to ``predict()``."""
        return self._words[0] == "predict"

    @property
    def canonical_name(self) -> str:
        """What a before event and its after event have in common: ``batch`` for ``BATCH_START`` and ``BATCH_END``."""
        return "_".join(word for word in self._words if word not in _SIDES)

    @property
    def _words(self) -> list[str]:
        return self.value.split("_")


_SIDES = {"before", "after", "start", "end"}
_BY_NAME = {name.lower(): event for name, event in Event.__members__.items()}
