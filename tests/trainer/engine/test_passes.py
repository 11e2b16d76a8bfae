"""In which order algorithms are applied, whatever the order in which they are given."""

from itertools import permutations

import pytest

from offloop.bus.types.event import Event
from offloop.trainer.algorithms import (
    SAM,
    CutOut,
    GradientClipping,
    ProgressiveResizing,
    SelectiveBackprop,
)
from offloop.trainer.engine.engine import in_order

CLIPPING, SELECTION = GradientClipping("norm", 1.0), SelectiveBackprop()
OTHERS = [SAM(), CutOut(), ProgressiveResizing()]


@pytest.mark.parametrize("event", list(Event))
def test_algorithms_run_in_reverse_at_events_after_a_step_of_the_loop(event: Event) -> None:
    expected = OTHERS[::-1] if event.name.startswith("AFTER_") else OTHERS
    assert list(in_order(OTHERS, event)) == expected


def test_gradients_are_clipped_last() -> None:
    for given in permutations([CLIPPING, *OTHERS]):
        applied = list(in_order(given, Event.AFTER_TRAIN_BATCH))
        rest = [one for one in given if one is not CLIPPING]
        assert applied == [*reversed(rest), CLIPPING]


def test_rows_are_selected_first() -> None:
    for given in permutations([SELECTION, *OTHERS]):
        applied = list(in_order(given, Event.AFTER_DATALOADER))
        rest = [one for one in given if one is not SELECTION]
        assert applied == [SELECTION, *reversed(rest)]
