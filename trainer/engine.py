"""What happens at an event."""

from collections.abc import Callable, Sequence, Set

from bus.event import Event
from trainer.algorithm import Algorithm
from trainer.logger import Logger
from trainer.passes import AlgorithmPass, default_passes
from trainer.state import State

__all__ = ["Engine"]


class Engine:
    """Runs an event: first the algorithms that match it, then the publication of a snapshot, if anybody wants one.

    All algorithms are asked before the first is applied. They are applied in order, except at the events whose name
    begins with ``after_``, where the order is reversed: what wraps the batch first unwraps it last. This and some
    other rules of order are passes, see :mod:`trainer.passes`; :meth:`register_pass` adds one. Reference:
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
        self._passes = list(default_passes)
        self._has_own_passes = False

    def register_pass(self, algorithm_pass: AlgorithmPass, index: int = -1) -> None:
        """Adds a pass over the algorithms that match an event: at a place among those that there are, or after them."""
        self._passes.insert(len(self._passes) if index == -1 else index, algorithm_pass)
        self._has_own_passes = True

    def run_event(self, event: Event) -> None:
        """Runs one event. Called by the training loop; by hand it reaches algorithms and callbacks as well."""
        if self._algorithms:
            self.run_algorithms(event)
        if event in self._wanted:
            self._publish(event)

    def run_algorithms(self, event: Event) -> None:
        """Runs the algorithms that match an event, which is not published."""
        state, logger = self._state, self._logger
        matching: Sequence[Algorithm] = [one for one in self._algorithms if one.match(event, state)]
        # A single one is in order, unless somebody wants to leave it out.
        if len(matching) > 1 or self._has_own_passes:
            for algorithm_pass in self._passes:
                matching = algorithm_pass(matching, event)
        for algorithm in matching:
            algorithm.apply(event, state, logger)


def _publish_nothing(event: Event) -> None:
    """For trainers without a stream."""
