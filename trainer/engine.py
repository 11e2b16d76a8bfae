"""What happens at an event."""

from collections.abc import Callable, Set

from bus.event import Event
from trainer.logger import Logger
from trainer.state import State

__all__ = ["Engine"]


class Engine:
    """Runs an event: first the algorithms that match it, then the publication of a snapshot, if anybody wants one.

    All algorithms are asked before the first is applied. They are applied in order, except at the events whose name
    begins with ``after_``, where the order is reversed: what wraps the batch first unwraps it last. Reference:
    ``composer/core/engine.py``.
    """

    def __init__(
        self,
        state: State,
        logger: Logger,
        wanted: Set[Event] = frozenset(),
        publish: Callable[[Event], None] | None = None,
    ) -> None:
        self._state = state
        self._logger = logger
        # The lists and sets themselves, not copies: they change while training, and looking them up here is all that an
        # event costs that nobody wants.
        self._algorithms = state.algorithms
        self._wanted = wanted
        self._publish = publish or _publish_nothing

    def run_event(self, event: Event) -> None:
        """Runs one event. Called by the training loop; by hand it reaches algorithms and callbacks as well."""
        if self._algorithms:
            self.run_algorithms(event)
        if event in self._wanted:
            self._publish(event)

    def run_algorithms(self, event: Event) -> None:
        """Runs the algorithms that match an event, which is not published."""
        state, logger = self._state, self._logger
        matching = [algorithm for algorithm in self._algorithms if algorithm.match(event, state)]
        if event.value.startswith("after_"):
            matching.reverse()
        for algorithm in matching:
            algorithm.apply(event, state, logger)


def _publish_nothing(event: Event) -> None:
    """For trainers without a stream."""
