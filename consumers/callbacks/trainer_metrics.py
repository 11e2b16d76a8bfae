"""Metrics of the trainer itself: losses, metrics, progress."""

from collections.abc import Mapping
from typing import Any

from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.actor import is_actor
from offloop.bus.types.demand import BASE_EVENTS
from offloop.bus.types.event import Event
from offloop.bus.types.metrics import flatten, logged_in, with_logged_names
from offloop.bus.types.timestamp import Timestamp
from offloop.consumers.api.callback import Callback
from offloop.consumers.api.logger import Logger


class TrainerMetrics(Callback):
    """Training loss, metrics of training and evaluation, progress, and values logged by algorithms or a custom loop.

    Names, values and steps are those of a trainer that logs by itself (reference: ``composer/trainer/trainer.py``):

    - ``time/epoch`` at ``EPOCH_START``;
    - ``time/batch``, ``time/sample``, ``time/batch_in_epoch``, ``time/sample_in_epoch`` (and ``time/token``,
    ``time/token_in_epoch`` where tokens are counted), ``loss/train/total``, ``loss/train/PART`` for each part of a loss
    that is a map or a list, and ``metrics/train/NAME`` of each batch, for the step at which it began: the first batch
    is step 0;
    - ``metrics/train/NAME`` once more at ``EPOCH_END``, for the number of batches trained;
    - ``metrics/LABEL/NAME`` at ``EVAL_END``;
    - all of ``time/...`` at ``FIT_END``.

    A value that is a list or a map is logged in numbers, as ``NAME/0`` or ``NAME/KEY``; ``None`` is left out.

    Differences: the ``time/...`` of a batch are logged together with its loss at ``BATCH_END`` and not when it begins,
    the microbatch size and the hyperparameters of the trainer are not logged (the run reports them itself), and values
    of algorithms and ``Publisher.log`` arrive with the next event, under their own steps."""

    events: frozenset[Event] = BASE_EVENTS  # any event may bring values that algorithms logged
    sees_actors = True

    def run_event(self, event: Event, state: Snapshot, logger: Logger) -> None:
        for step, metrics in logged_in(state.fields):
            logger.log_metrics(with_logged_names(flatten(metrics)), step)
        if not is_actor(state.rank):
            self.log_own(event, state, logger)

    def log_own(self, event: Event, state: Snapshot, logger: Logger) -> None:
        super().run_event(event, state, logger)

    def epoch_start(self, state: Snapshot, logger: Logger) -> None:
        logger.log_metrics({"time/epoch": state.timestamp.epoch.value})

    def batch_end(self, state: Snapshot, logger: Logger) -> None:
        # Without the start of the batch, the loss is logged under the current step.
        began = state.previous_timestamp or state.timestamp
        step = began.values.batch
        logger.log_metrics(_times(began, counts_tokens=state.timestamp.token > 0), step)
        if state.loss is not None:
            losses = {"total": state.loss, **flatten(state.losses)}
            logger.log_metrics({f"loss/train/{name}": value for name, value in losses.items()}, step)
        _log_metrics_of("train", state.train_metrics, step, logger)

    def epoch_end(self, state: Snapshot, logger: Logger) -> None:
        _log_metrics_of("train", state.train_metrics, state.timestamp.values.batch, logger)

    def eval_end(self, state: Snapshot, logger: Logger) -> None:
        label = state.dataloader_label
        if label is not None:
            _log_metrics_of(label, state.eval_metrics.get(label, {}), state.timestamp.values.batch, logger)

    def fit_end(self, state: Snapshot, logger: Logger) -> None:
        timestamp = state.timestamp
        logger.log_metrics(
            {"time/epoch": timestamp.epoch.value, **_times(timestamp, counts_tokens=timestamp.token > 0)}
        )


def _times(timestamp: Timestamp, counts_tokens: bool) -> dict[str, int]:
    _, _, batch, sample, token, _, _, batch_in_epoch, sample_in_epoch, token_in_epoch = timestamp.values[:10]
    times = {
        "time/batch": batch,
        "time/sample": sample,
        "time/batch_in_epoch": batch_in_epoch,
        "time/sample_in_epoch": sample_in_epoch,
    }
    return times | {"time/token": token, "time/token_in_epoch": token_in_epoch} if counts_tokens else times


def _log_metrics_of(label: str, metrics: Mapping[str, Any], step: int, logger: Logger) -> None:
    logger.log_metrics({f"metrics/{label}/{name}": value for name, value in flatten(metrics).items()}, step)
