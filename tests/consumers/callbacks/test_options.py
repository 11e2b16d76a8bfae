"""Options of callbacks that mean nothing are refused before the run."""

from collections.abc import Callable

import pytest

from offloop.bus.errors import ConfigurationError
from offloop.consumers import Callback, CheckpointSaver, NaNMonitor, SpeedMonitor
from offloop.consumers.callbacks.activation_monitor import ActivationMonitor
from offloop.consumers.callbacks.alert import Alert
from offloop.consumers.callbacks.export import ExportForInferenceCallback
from offloop.consumers.callbacks.image_visualizer import ImageVisualizer
from offloop.consumers.callbacks.memory_monitor import MemoryMonitor
from offloop.consumers.callbacks.optimizer_monitor import OptimizerMonitor
from offloop.consumers.callbacks.stoppers import EarlyStopper

MEANINGLESS: list[Callable[[], Callback]] = [
    lambda: ActivationMonitor("10sp"),
    lambda: Alert([]),
    lambda: Alert(["nan"], webhook="file:///etc/passwd"),
    lambda: Alert(["nan"], command=[__file__]),
    lambda: CheckpointSaver(filename="same.safetensors"),
    lambda: CheckpointSaver(filename="{batches}"),
    lambda: CheckpointSaver(save_interval="-1ep"),
    lambda: CheckpointSaver("s3://bucket"),
    lambda: CheckpointSaver(monitor="grad_norm"),
    lambda: EarlyStopper("a", "b", comp="le"),
    lambda: EarlyStopper("a", "b", patience="1sp"),
    lambda: ExportForInferenceCallback("pickle", "m.pt", model="gold:GoldMLP"),  # type: ignore[arg-type]
    lambda: ExportForInferenceCallback("torchscript", "s3://bucket/m.pt", model="gold:GoldMLP"),
    lambda: ExportForInferenceCallback("torchscript", "m.pt", model="gold:Missing"),
    lambda: ImageVisualizer("10sp"),
    lambda: ImageVisualizer(input_key=2),
    lambda: MemoryMonitor(dist_aggregate_batch_interval=0),
    lambda: NaNMonitor(action="cry"),  # type: ignore[arg-type]
    lambda: NaNMonitor(per_parameter=True, check_gradients=False),
    lambda: OptimizerMonitor(batch_log_interval=0),
    lambda: SpeedMonitor(window_size=0),
    lambda: SpeedMonitor(time_unit="weeks"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("make", MEANINGLESS)
def test_they_are_refused(make: Callable[[], Callback]) -> None:
    with pytest.raises((ConfigurationError, ValueError)):
        make()
