"""The base class of everything that looks at a run."""

from collections.abc import Awaitable, Collection
from typing import Any, ClassVar, TypeAlias

from bus.event import Event
from bus.snapshot import Snapshot
from consumers.logger import Logger

__all__ = ["Callback", "MaybeAwaitable"]

MaybeAwaitable: TypeAlias = Awaitable[None] | None
"""What a callback's method returns: nothing, or, for an ``async`` method, what is to be awaited."""


class Callback:
    """Looks at a run: override the method of each event that you want to see, and log through ``logger``.

    ``state`` is the read-only snapshot of that event. The methods that a class overrides are the events that it is
    sent. Any method may be ``async``. Take time from ``state`` and never from a clock of your own: then a replay logs
    what the live run logged.

    Of a training with several ranks a callback sees the first one, whose times, losses and metrics are those of all of
    them together. With :attr:`all_ranks` it sees the events of every rank; ``state.rank`` tells them apart.

    Reference: ``composer/core/callback.py``.
    """

    all_ranks: ClassVar[bool] = False
    """Whether the callback is sent the events of every rank, or only those of the first one."""

    events: ClassVar[Collection[Event | str] | None] = None
    """Which events :meth:`run_event` wants, for a class that overrides it; ``None`` for all of them."""

    def wanted_events(self) -> set[Event]:
        """The events that this callback is to be sent: those whose methods it overrides, or, where :meth:`run_event` is
        overridden, :attr:`events`."""
        if self._overrides("run_event"):
            return set(Event) if self.events is None else {Event(event) for event in self.events}
        return {event for event in Event if self._overrides(event.value)}

    def run_event(self, event: Event, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        """Called for every wanted event; calls the event's method. An override replaces those methods."""
        result: MaybeAwaitable = getattr(self, event.value)(state, logger)
        return result

    def close(self, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        """The stream is over: the last chance to log. ``state`` is the last snapshot that the consumer handled."""

    def post_close(self) -> MaybeAwaitable:
        """Every callback is closed: give back what is held. Not called when this callback's :meth:`close` raised."""

    def state_dict(self) -> dict[str, Any]:
        """What :meth:`load_state_dict` needs to go on from here; plain values only."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up what :meth:`state_dict` gave."""

    def _overrides(self, name: str) -> bool:
        return name in vars(self) or getattr(type(self), name) is not getattr(Callback, name)

    def init(self, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        """The run's first event: training is about to be set up."""

    def before_load(self, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        """Model and optimizers are there; a checkpoint has not been loaded yet."""

    def after_load(self, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        """A checkpoint, if there was one, is loaded."""

    def fit_start(self, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        """``fit()`` begins."""

    def iteration_start(self, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        """The first batch of an iteration comes next."""

    def epoch_start(self, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        """The first batch of an epoch comes next."""

    def before_dataloader(self, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        """The next batch is about to be fetched, or turns out not to exist."""

    def after_dataloader(self, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        """A batch has been fetched."""

    def batch_start(self, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        """Work on a batch begins."""

    def before_train_batch(self, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        """Before all forward and backward passes of a batch."""

    def before_forward(self, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        """Before the forward pass of a microbatch."""

    def after_forward(self, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        """After the forward pass of a microbatch."""

    def before_loss(self, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        """Before the loss of a microbatch is computed."""

    def after_loss(self, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        """The loss of a microbatch is computed."""

    def before_backward(self, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        """Before the backward pass of a microbatch."""

    def after_backward(self, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        """After the backward pass of a microbatch."""

    def after_train_batch(self, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        """The batch's gradients are complete, the weights still old."""

    def batch_end(self, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        """The batch is trained on; ``state.timestamp`` already counts it and ``state.loss`` is its loss."""

    def batch_checkpoint(self, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        """After ``batch_end`` and the evaluation that it may cause."""

    def epoch_end(self, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        """The epoch is over; ``state.timestamp`` already shows the next one."""

    def epoch_checkpoint(self, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        """After ``epoch_end`` and the evaluation that it may cause."""

    def iteration_end(self, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        """An iteration is over."""

    def iteration_checkpoint(self, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        """After ``iteration_end``."""

    def fit_end(self, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        """``fit()`` is through with its training; a last evaluation may follow."""

    def eval_before_all(self, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        """Before the first evaluator of an evaluation within ``fit()``."""

    def eval_start(self, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        """An evaluator begins; ``state.dataloader_label`` names it."""

    def eval_batch_start(self, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        """A batch of an evaluator has been fetched."""

    def eval_before_forward(self, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        """Before the forward pass of an evaluation batch."""

    def eval_after_forward(self, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        """After the forward pass of an evaluation batch."""

    def eval_batch_end(self, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        """The metrics have taken in an evaluation batch."""

    def eval_end(self, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        """An evaluator is through; ``state.eval_metrics[state.dataloader_label]`` holds its metrics."""

    def eval_after_all(self, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        """After the last evaluator of an evaluation within ``fit()``."""

    def eval_standalone_start(self, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        """``eval()``, called outside ``fit()``, begins."""

    def eval_standalone_end(self, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        """``eval()``, called outside ``fit()``, is through."""

    def predict_start(self, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        """``predict()`` begins."""

    def predict_batch_start(self, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        """A batch to predict has been fetched."""

    def predict_before_forward(self, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        """Before the forward pass of a prediction batch."""

    def predict_after_forward(self, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        """After the forward pass of a prediction batch."""

    def predict_batch_end(self, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        """The outputs of a prediction batch are there."""

    def predict_end(self, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        """``predict()`` is through."""
