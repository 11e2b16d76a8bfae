"""Callbacks that tests give to trainers. They have a module of their own because the process in which they run imports
it: one that imports a framework takes seconds."""

from typing import Any

from offloop.consumers import Callback


class Requests(Callback):
    """Requests fields at every batch, which are recorded with its end then."""

    def __init__(self, *fields: str) -> None:
        self.fields = fields  # one class for all tests

    def batch_end(self, state: object, logger: object) -> None:
        """They are in the recording then."""


class StopsAt(Callback):
    """Stops at the first such event from the fourth batch on."""

    def __init__(self, event: str) -> None:
        self.barrier_events = (event,)

    def stop(self, state: Any, logger: Any) -> None:
        if state.timestamp.batch >= 4:
            state.stop_training()


class StopsAtBatches(StopsAt):
    """After the fourth batch."""

    batch_end = StopsAt.stop


class StopsAtEvaluations(StopsAt):
    """After an evaluation, which comes before the epoch ends."""

    eval_end = StopsAt.stop


class Impatient(Callback):
    """Stops at the first batch, and gives no reason."""

    def batch_end(self, state: Any, logger: Any) -> None:
        state.stop_training()


class Quick(Callback):
    """Logs each batch at once."""

    def batch_end(self, state: Any, logger: Any) -> None:
        logger.log_metrics({"quick": int(state.timestamp.batch)})
