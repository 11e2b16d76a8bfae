"""What holds for every algorithm that changes batches: it is repeatable, spares the data, and names mistakes early."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from algorithm_runs import Image, image_batches, note, train
from torch import Tensor

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.event import Event
from offloop.trainer import Algorithm
from offloop.trainer.algorithms.cutmix import CutMix
from offloop.trainer.algorithms.cutout import CutOut
from offloop.trainer.algorithms.label_smoothing import LabelSmoothing
from offloop.trainer.algorithms.mixup import MixUp
from offloop.trainer.algorithms.progressive_resizing import ProgressiveResizing
from offloop.trainer.algorithms.selective_backprop import SelectiveBackprop
from offloop.trainer.algorithms.sequence_length_warmup import SequenceLengthWarmup

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


@pytest.mark.parametrize("name", DRAWING)
def test_another_seed_draws_other_numbers(name: str) -> None:
    assert not equal(weights([DRAWING[name]()]), weights([DRAWING[name]()], seed=12))


@pytest.mark.parametrize("name", ALL)
def test_it_works_with_microbatches(name: str) -> None:
    state = train(image_batches(rows=7), ALL[name](), Image, device_train_microbatch_size=2)
    assert state.batch_loss is not None
    assert state.batch_loss.isfinite()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("microbatch_size", [None, 3])
def test_what_the_dataloader_gave_is_not_changed(name: str, microbatch_size: int | None) -> None:
    batches = [[images, targets] for images, targets in image_batches()]
    before = deepcopy(batches)
    train(batches, ALL[name](), Image, device_train_microbatch_size=microbatch_size)
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


MISTAKES: list[tuple[Callable[[], Algorithm], str]] = [
    (lambda: LabelSmoothing(1.5), "smoothing 1.5 is not allowed: use a finite number from 0 to 1"),
    (lambda: LabelSmoothing("0.1"), "smoothing '0.1' is not allowed"),
    (lambda: LabelSmoothing(float("nan")), "smoothing nan is not allowed"),
    (lambda: LabelSmoothing(target_key=None), "target_key None names no part of a batch: use an index, a name"),
    (lambda: LabelSmoothing(target_key=(0, 1)), r"target_key \(0, 1\) names no part"),
    (lambda: LabelSmoothing(target_key=[]), r"target_key \[\] names no part"),
    (lambda: MixUp(alpha=-0.1), "alpha -0.1 is not allowed: use a finite number from 0"),
    (lambda: MixUp(alpha=float("inf")), "alpha inf is not allowed"),
    (lambda: MixUp(input_key=1.0), "input_key 1.0 names no part"),
    (lambda: CutMix(alpha=True), "alpha True is not allowed"),
    (lambda: CutMix(target_key=2.5), "target_key 2.5 names no part"),
    (lambda: CutOut(num_holes=0), "num_holes 0 is not allowed: use a whole number from 1"),
    (lambda: CutOut(num_holes=True), "num_holes True is not allowed"),
    (lambda: CutOut(length=0), "length 0 is not allowed: use a finite number above 0 to 1"),
    (lambda: CutOut(length=1.5), "length 1.5 is not allowed"),
    (lambda: CutOut(input_key=None), "input_key None names no part"),
    (lambda: ProgressiveResizing("shrink"), "mode 'shrink' is not allowed: use resize or crop"),
    (lambda: ProgressiveResizing(initial_scale=0), "initial_scale 0 is not allowed"),
    (lambda: ProgressiveResizing(finetune_fraction=-0.1), "finetune_fraction -0.1 is not allowed"),
    (lambda: ProgressiveResizing(delay_fraction=2), "delay_fraction 2 is not allowed"),
    (lambda: ProgressiveResizing(finetune_fraction=0.6), "0.5 and finetune_fraction 0.6 are more than the whole"),
    (lambda: ProgressiveResizing(size_increment=0), "size_increment 0 is not allowed"),
    (lambda: SequenceLengthWarmup(duration=1.1), "duration 1.1 is not allowed"),
    (lambda: SequenceLengthWarmup(min_seq_length=0), "min_seq_length 0 is not allowed"),
    (
        lambda: SequenceLengthWarmup(max_seq_length=7),
        "max_seq_length 7 is not allowed: use a whole number from 8",
    ),
    (lambda: SequenceLengthWarmup(step_size=0), "step_size 0 is not allowed"),
    (lambda: SelectiveBackprop(start=-1), "start -1 is not allowed"),
    (lambda: SelectiveBackprop(end=1.2), "end 1.2 is not allowed"),
    (lambda: SelectiveBackprop(start=0.9, end=0.9), "start 0.9 is not before end 0.9"),
    (lambda: SelectiveBackprop(keep=0), "keep 0 is not allowed"),
    (lambda: SelectiveBackprop(scale_factor=2), "scale_factor 2 is not allowed"),
    (lambda: SelectiveBackprop(interrupt=1), "interrupt 1 would leave every batch whole: use 0 for none"),
    (lambda: SelectiveBackprop(interrupt=-1), "interrupt -1 is not allowed"),
    (lambda: SelectiveBackprop(loss_fn="mse"), "loss_fn 'mse' cannot be called"),
]


@pytest.mark.parametrize(("make", "message"), MISTAKES, ids=[message[:30] for _, message in MISTAKES])
def test_a_mistake_is_named_before_training(make: Callable[[], Algorithm], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()
