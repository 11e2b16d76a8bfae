"""What happens at an event."""

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.event import Event
from offloop.bus.types.left_out import LeftOut
from offloop.trainer.arguments.values import to_builtin
from offloop.trainer.engine.algorithm import Algorithm
from offloop.trainer.engine.state import State

_RANKS = {"first": -1, None: 0, "last": 1}
AlgorithmPass = Callable[[Sequence[Algorithm], Event], Sequence[Algorithm]]
"""Takes the algorithms that match an event, and the event, and gives them back in another order, or fewer of them.

The first pass gets the algorithms in the order in which the trainer was given them, each other one what the pass
before it gave, and what the last one gives is applied from front to back. At the events whose name begins with
``after_``, :func:`set_filo_order` turns the order round: what a pass before it puts at the end of the list is applied
first there."""


def sort_by_position(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    """Applies those first, or last, that ask for it by :attr:`Algorithm.position`. Goes before
    :func:`set_filo_order`."""
    if not any(event in one.position for one in algorithms):
        return algorithms
    from_front = -1 if event.value.startswith("after_") else 1
    return sorted(algorithms, key=lambda one: from_front * _RANKS[one.position.get(event)])


def set_filo_order(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    """First in, last out: what is applied first at a ``before_`` event is applied last at the ``after_`` event, so that
    each finds what it left. Events whose names end in ``_start`` and ``_end`` are not concerned."""
    return algorithms[::-1] if event.value.startswith("after_") else algorithms


default_passes: list[AlgorithmPass] = [sort_by_position, set_filo_order]
"""The passes of every engine, in the order in which they are run."""


class AlgorithmLogger:
    """Collects what algorithms log; it travels with the next event that is published, as its field ``logged``.

    Reference: ``composer/loggers/logger.py``.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self.entries: list[list[Any]] = []
        """What has been logged and not published yet, as pairs of step and metrics; always the same list."""
        self.left_out = LeftOut(state.run_name)
        """The values that could not be logged."""

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Logs numbers by name at a step, by default the number of batches so far.

        A tensor is read at once, which on a GPU waits for it: log numbers where that matters. What cannot be sent is
        left out, and reported once for each name."""
        if step is None:
            step = self._state.timestamp.values[2]
        values = {}
        for name, value in metrics.items():
            try:
                values[name] = to_builtin(value)
            except Exception as error:  # noqa: BLE001  it is the user's value, whose methods may raise anything
                self.left_out.add(name, error)
        self.entries.append([step, values])

    def take(self) -> list[list[Any]]:
        """Everything logged since the last call, as pairs of step and metrics."""
        entries = list(self.entries)
        # A signal handler or another thread may have logged more by now.
        del self.entries[: len(entries)]
        return entries


class Engine:
    """Runs an event: first the algorithms that match it, then the publication of a snapshot, if it is requested.

    All algorithms are asked before the first is applied. They are applied in order, except at the events whose name
    begins with ``after_``, where the order is reversed: what wraps the batch first unwraps it last. This and some
    other rules of order are passes, see :data:`AlgorithmPass`; :meth:`register_pass` adds one. Reference:
    ``composer/core/engine.py``.
    """

    def __init__(
        self,
        state: State,
        logger: AlgorithmLogger,
        requested: Set[Event] = frozenset(),
        publish: Callable[[Event], None] | None = None,
    ) -> None:
        self._state = state
        self._logger = logger
        # The lists and sets themselves, not copies: they change while training, and looking them up here is all that an
        # unrequested event costs.
        self._algorithms = state.algorithms
        self._requested = requested
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
        if event in self._requested:
            self._publish(event)

    def run_algorithms(self, event: Event) -> None:
        """Runs the algorithms that match an event, which is not published."""
        state, logger = self._state, self._logger
        matching: Sequence[Algorithm] = [one for one in self._algorithms if one.match(event, state)]
        # A single one is in order, unless a pass leaves it out.
        if len(matching) > 1 or self._has_own_passes:
            for algorithm_pass in self._passes:
                matching = algorithm_pass(matching, event)
        for algorithm in matching:
            algorithm.apply(event, state, logger)


def _publish_nothing(event: Event) -> None:
    """For trainers without a stream."""


def check_loss_interpolation(algorithms: Sequence[Algorithm]) -> None:
    """Raises ``ConfigurationError`` when two algorithms put a mixture of losses in the loss's place, as those do whose
    attribute ``interpolates_loss`` is true: the second one would mix the loss of unmixed targets."""
    names = [type(one).__name__ for one in algorithms if getattr(one, "interpolates_loss", False)]
    if len(names) > 1:
        raise ConfigurationError(
            f"{' and '.join(names)} cannot both interpolate the loss: "
            "set interpolate_loss=False for all but one of them, or leave one out"
        )
