"""In which order algorithms are applied, whatever the order in which they are given."""

from collections.abc import Sequence
from itertools import permutations

import pytest

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.event import Event
from offloop.trainer import Algorithm
from offloop.trainer.algorithms import (
    SAM,
    CutMix,
    CutOut,
    GradientClipping,
    MixUp,
    ProgressiveResizing,
    SelectiveBackprop,
)
from offloop.trainer.engine.engine import check_loss_interpolation, default_passes

CLIPPING, SELECTION = GradientClipping("norm", 1.0), SelectiveBackprop()
OTHERS = [SAM(), CutOut(), ProgressiveResizing()]


def order(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    """Return the order in which an engine applies them."""
    for one in default_passes:
        algorithms = one(algorithms, event)
    return algorithms


@pytest.mark.parametrize("event", list(Event))
def test_algorithms_run_in_reverse_at_events_after_a_step_of_the_loop(event: Event) -> None:
    expected = OTHERS[::-1] if event.name.startswith("AFTER_") else OTHERS
    assert list(order(OTHERS, event)) == expected


def test_gradients_are_clipped_last() -> None:
    for given in permutations([CLIPPING, *OTHERS]):
        applied = list(order(given, Event.AFTER_TRAIN_BATCH))
        rest = [one for one in given if one is not CLIPPING]
        assert applied == [*reversed(rest), CLIPPING]


def test_rows_are_selected_first() -> None:
    for given in permutations([SELECTION, *OTHERS]):
        applied = list(order(given, Event.AFTER_DATALOADER))
        rest = [one for one in given if one is not SELECTION]
        assert applied == [SELECTION, *reversed(rest)]


def test_two_mixtures_of_losses_are_refused() -> None:
    check_loss_interpolation([MixUp(interpolate_loss=True), CutMix(), SAM()])
    with pytest.raises(ConfigurationError, match="MixUp and CutMix cannot both interpolate the loss"):
        check_loss_interpolation([MixUp(interpolate_loss=True), SAM(), CutMix(interpolate_loss=True)])
