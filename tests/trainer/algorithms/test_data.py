"""What holds for every algorithm that changes batches: it is repeatable, spares the data, and names mistakes early."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from algorithm_runs import Image, image_batches, note, train
from torch import Tensor

from offloop.bus.errors import ConfigurationError, InvalidTimeError
from offloop.bus.types.event import Event
from offloop.trainer import Algorithm
from offloop.trainer.algorithms import (
    EMA,
    SAM,
    SWA,
    BlurPool,
    CutMix,
    CutOut,
    GradientClipping,
    LabelSmoothing,
    LayerFreezing,
    MixUp,
    ProgressiveResizing,
    SelectiveBackprop,
    SequenceLengthWarmup,
    StochasticDepth,
)

DRAWING: dict[str, Callable[[], Algorithm]] = {
    "mixup": MixUp,
    "mixup_of_losses": lambda: MixUp(interpolate_loss=True),
    "cutmix": CutMix,
    "cutmix_of_losses": lambda: CutMix(interpolate_loss=True),
    "cutout": CutOut,
    "crop": lambda: ProgressiveResizing("crop", size_increment=2),
    "selective_backprop": lambda: SelectiveBackprop(start=0.0, end=1.0, interrupt=0),
}
ALL = DRAWING | {"label_smoothing": LabelSmoothing, "resize": lambda: ProgressiveResizing(size_increment=2)}


def weights(algorithms: list[Algorithm], **settings: Any) -> list[Tensor]:
    state = train(image_batches(), algorithms, Image, **settings)
    return [parameter.detach() for parameter in state.model.parameters()]


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(first, second, strict=True))


@pytest.mark.parametrize("name", ALL)
def test_the_same_seed_gives_the_same_weights_and_they_are_not_those_of_a_plain_training(name: str) -> None:
    first = weights([ALL[name]()])
    assert equal(first, weights([ALL[name]()]))
    assert not equal(first, weights([]))


@pytest.mark.parametrize("name", ALL)
def test_batches_of_the_dataloader_are_not_changed(name: str) -> None:
    batches = [[images, targets] for images, targets in image_batches(rows=7)]
    before = deepcopy(batches)
    state = train(batches, ALL[name](), Image, device_train_microbatch_size=2)
    assert state.batch_loss is not None
    assert state.batch_loss.isfinite()
    for batch, original in zip(batches, before, strict=True):
        assert equal(batch, original)


@pytest.mark.parametrize("name", ["mixup", "mixup_of_losses", "cutmix", "cutmix_of_losses", "label_smoothing"])
def test_metrics_and_the_end_of_the_batch_see_the_original_targets(name: str) -> None:
    batches = image_batches()
    after_loss: list[Tensor] = []
    batch_end: list[tuple[Tensor, Tensor]] = []
    look = [
        note(after_loss, lambda state: state.batch[1], Event.BEFORE_BACKWARD),
        note(batch_end, lambda state: state.batch, Event.BATCH_END),
    ]
    train(batches, [ALL[name](), *look], Image)
    assert equal(after_loss, [targets for _, targets in batches])
    for seen, original in zip(batch_end, batches, strict=True):
        assert equal([*seen], [*original])


MISTAKES: list[tuple[type[Algorithm], dict[str, Any]]] = [
    (LabelSmoothing, {"smoothing": float("nan")}),
    (MixUp, {"alpha": -0.1}),
    (CutMix, {"input_key": []}),
    (CutOut, {"num_holes": True}),
    (ProgressiveResizing, {"mode": "shrink"}),
    (SequenceLengthWarmup, {"max_seq_length": 7}),
    (SelectiveBackprop, {"start": 0.9, "end": 0.9}),
    (EMA, {"half_life": "5"}),
    (SWA, {"swa_start": "0.9dur", "swa_end": "0.8dur"}),
    (GradientClipping, {"clipping_type": "all", "clipping_threshold": 1.0}),
    (SAM, {"interval": 0}),
    (BlurPool, {"replace_convs": False, "replace_maxpools": False}),
    (StochasticDepth, {"target_layer_name": "Layer", "drop_rate": 1}),
    (LayerFreezing, {"freeze_start": 2}),
]


@pytest.mark.parametrize(("algorithm", "arguments"), MISTAKES)
def test_a_mistake_is_refused_before_training(algorithm: type[Algorithm], arguments: dict[str, Any]) -> None:
    with pytest.raises((ConfigurationError, InvalidTimeError)):
        algorithm(**arguments)
