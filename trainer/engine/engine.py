"""The engine that runs the events."""

from collections.abc import Callable, Sequence, Set

from offloop.bus.types.event import Event
from offloop.trainer.engine.state import Algorithm, AlgorithmLogger, State

_RANKS = {"first": -1, None: 0, "last": 1}


def in_order(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    """Sort algorithms by :attr:`Algorithm.position`, otherwise as given.

    The order is reversed at ``after_`` events, so that wrappers of the batch are undone in order."""
    given = algorithms[::-1] if event.value.startswith("after_") else algorithms
    if not any(event in one.position for one in given):
        return given
    return sorted(given, key=lambda one: _RANKS[one.position.get(event)])


class Engine:
    """Runs an event: first the algorithms that match it, then the publication of a snapshot, if it is requested.

    ``match`` is called on all algorithms before the first is applied. Reference: ``composer/core/engine.py``."""

    def __init__(
        self,
        state: State,
        logger: AlgorithmLogger,
        requested: Set[Event] = frozenset(),
        publish: Callable[[Event], object] = lambda event: None,
    ) -> None:
        self._state = state
        self._logger = logger
        # The lists and sets themselves, not copies: they change while training, and an unrequested event costs only
        # these look-ups.
        self._algorithms = state.algorithms
        self._requested = requested
        self._publish = publish

    def run_event(self, event: Event) -> None:
        """Run one event. The training loop calls it; a call by hand reaches algorithms and callbacks too."""
        if self._algorithms:
            self.run_algorithms(event)
        if event in self._requested:
            self._publish(event)

    def run_algorithms(self, event: Event) -> None:
        """Run the algorithms that match an event, without publishing it."""
        state, logger = self._state, self._logger
        matching: Sequence[Algorithm] = [one for one in self._algorithms if one.match(event, state)]
        if len(matching) > 1:
            matching = in_order(matching, event)
        for algorithm in matching:
            algorithm.apply(event, state, logger)
