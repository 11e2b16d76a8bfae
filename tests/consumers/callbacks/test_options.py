"""Options of callbacks that mean nothing are refused before the run."""

from collections.abc import Callable

import pytest

from offloop.bus.errors import ConfigurationError
from offloop.consumers import Callback, CheckpointSaver, NaNMonitor, SpeedMonitor
from offloop.consumers.callbacks.export import ExportForInferenceCallback
from offloop.consumers.callbacks.image_visualizer import ImageVisualizer
from offloop.consumers.callbacks.stoppers import EarlyStopper

MEANINGLESS: list[Callable[[], Callback]] = [
    lambda: CheckpointSaver(filename="{batches}"),
    lambda: CheckpointSaver("s3://bucket"),
    lambda: CheckpointSaver(monitor="grad_norm"),
    lambda: EarlyStopper("a", "b", comp="le"),
    lambda: EarlyStopper("a", "b", patience="1sp"),
    lambda: ExportForInferenceCallback("pickle", "m.pt", model="gold:GoldMLP"),  # type: ignore[arg-type]
    lambda: ExportForInferenceCallback("torchscript", "m.pt", model="gold:Missing"),
    lambda: ImageVisualizer("10sp"),
    lambda: NaNMonitor(per_parameter=True, check_gradients=False),
    lambda: SpeedMonitor(window_size=0),
]


@pytest.mark.parametrize("make", MEANINGLESS)
def test_they_are_refused(make: Callable[[], Callback]) -> None:
    with pytest.raises((ConfigurationError, ValueError)):
        make()
