"""In which order the algorithms that match an event are applied."""

from collections.abc import Callable, Sequence

from bus.errors import ConfigurationError
from bus.event import Event
from trainer.algorithm import Algorithm
from trainer.algorithms.gradient_clipping import GradientClipping
from trainer.algorithms.selective_backprop import SelectiveBackprop

__all__ = [
    "AlgorithmPass",
    "check_loss_interpolation",
    "default_passes",
    "set_filo_order",
    "sort_gradient_clipping_last",
    "sort_selective_backprop_first",
]

AlgorithmPass = Callable[[Sequence[Algorithm], Event], Sequence[Algorithm]]
"""Takes the algorithms that match an event, and the event, and gives them back in another order, or fewer of them.

The first pass gets the algorithms in the order in which the trainer was given them, each other one what the pass
before it gave, and what the last one gives is applied from front to back. At the events whose name begins with
``after_``, :func:`set_filo_order` turns the order round: what a pass before it puts at the end of the list is applied
first there."""


def sort_selective_backprop_first(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    """Lets :class:`SelectiveBackprop` choose rows before others change them: their losses are to be those of the data,
    and what it throws away need not be changed. Goes before :func:`set_filo_order`."""
    if event is not Event.AFTER_DATALOADER:
        return algorithms
    return sorted(algorithms, key=lambda algorithm: isinstance(algorithm, SelectiveBackprop))


def sort_gradient_clipping_last(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    """Lets :class:`GradientClipping` clip the gradients that the optimizers step along, and not those that another
    algorithm, such as ``SAM``, goes on to replace. Goes before :func:`set_filo_order`."""
    if event is not Event.AFTER_TRAIN_BATCH:
        return algorithms
    return sorted(algorithms, key=lambda algorithm: not isinstance(algorithm, GradientClipping))


def set_filo_order(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    """First in, last out: what is applied first at a ``before_`` event is applied last at the ``after_`` event, so that
    each finds what it left. Events whose names end in ``_start`` and ``_end`` are not concerned."""
    return algorithms[::-1] if event.value.startswith("after_") else algorithms


default_passes: list[AlgorithmPass] = [sort_selective_backprop_first, sort_gradient_clipping_last, set_filo_order]
"""The passes of every engine, in the order in which they are run."""


def check_loss_interpolation(algorithms: Sequence[Algorithm]) -> None:
    """Raises :class:`bus.errors.ConfigurationError` when two algorithms put a mixture of losses in the loss's place, as
    those do whose attribute ``interpolates_loss`` is true: the second one would mix the loss of unmixed targets."""
    names = [type(one).__name__ for one in algorithms if getattr(one, "interpolates_loss", False)]
    if len(names) > 1:
        raise ConfigurationError(
            f"{' and '.join(names)} cannot both interpolate the loss: "
            "set interpolate_loss=False for all but one of them, or leave one out"
        )
