"""The engine that runs the events."""

from collections.abc import Callable, Sequence, Set

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.event import Event
from offloop.trainer.engine.state import Algorithm, AlgorithmLogger, State

_RANKS = {"first": -1, None: 0, "last": 1}
AlgorithmPass = Callable[[Sequence[Algorithm], Event], Sequence[Algorithm]]
"""Returns the algorithms that match an event in another order, or fewer of them.

The first pass gets them in the order in which the trainer was given them, each other pass the result of the last."""


def sort_by_position(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    """Move algorithms to the front or end by :attr:`Algorithm.position`. Runs before :func:`set_filo_order`."""
    if not any(event in one.position for one in algorithms):
        return algorithms
    from_front = -1 if event.value.startswith("after_") else 1
    return sorted(algorithms, key=lambda one: from_front * _RANKS[one.position.get(event)])


def set_filo_order(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    """Reverse the order at ``after_`` events: first in, last out, so that wrappers of the batch are undone in order."""
    return algorithms[::-1] if event.value.startswith("after_") else algorithms


default_passes: list[AlgorithmPass] = [sort_by_position, set_filo_order]
"""The passes of every engine, in the order in which they run."""


class Engine:
    """Runs an event: first the algorithms that match it, then the publication of a snapshot, if it is requested.

    ``match`` is called on all algorithms before the first is applied. The passes determine their order, see
    :data:`AlgorithmPass`. Reference: ``composer/core/engine.py``."""

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
        self.publish = publish
        """Publishes an event that is requested, without the algorithms."""
        self._passes = list(default_passes)
        self._has_own_passes = False

    def register_pass(self, algorithm_pass: AlgorithmPass, index: int = -1) -> None:
        """Add a pass over the matching algorithms at an index, by default after the others."""
        self._passes.insert(len(self._passes) if index == -1 else index, algorithm_pass)
        self._has_own_passes = True

    def run_event(self, event: Event) -> None:
        """Run one event. The training loop calls it; a call by hand reaches algorithms and callbacks too."""
        if self._algorithms:
            self.run_algorithms(event)
        if event in self._requested:
            self.publish(event)

    def run_algorithms(self, event: Event) -> None:
        """Run the algorithms that match an event, without publishing it."""
        state, logger = self._state, self._logger
        matching: Sequence[Algorithm] = [one for one in self._algorithms if one.match(event, state)]
        # A single algorithm needs no order, but a pass may leave it out.
        if len(matching) > 1 or self._has_own_passes:
            for algorithm_pass in self._passes:
                matching = algorithm_pass(matching, event)
        for algorithm in matching:
            algorithm.apply(event, state, logger)


def check_loss_interpolation(algorithms: Sequence[Algorithm]) -> None:
    """Refuse two algorithms that interpolate the loss: the second one would mix the loss of unmixed targets."""
    names = [type(one).__name__ for one in algorithms if getattr(one, "interpolates_loss", False)]
    if len(names) > 1:
        raise ConfigurationError(
            f"{' and '.join(names)} cannot both interpolate the loss: "
            "set interpolate_loss=False for all but one of them, or leave one out"
        )
