"""Smoothed and mixed targets, against formulas."""

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
from algorithm_runs import Image, image_batches, note, row_batches, train
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.event import Event
from offloop.trainer import Algorithm, Classifier, DataSpec, LanguageModel, State
from offloop.trainer.algorithms import CutMix, LabelSmoothing, MixUp
from offloop.trainer.algorithms.common import random_span, soft_targets

SPLIT = [None, 4]
DRAW = "offloop.trainer.algorithms.common.torch.randint"


def losses_and_parts(algorithm: Algorithm, batches: list[Any], **settings: Any) -> list[tuple[Tensor, Tensor, Any]]:
    """Loss, outputs and batch of each microbatch as they are for the backward pass."""
    notes: list[tuple[Tensor, Tensor, Any]] = []
    look = note(notes, lambda state: (state.loss, state.outputs, state.batch), Event.BEFORE_BACKWARD)
    train(batches, [algorithm, look], **settings)
    return notes


@pytest.mark.parametrize("microbatch_size", SPLIT)
def test_smoothing_gives_the_loss_that_torch_gives(microbatch_size: int | None) -> None:
    probabilities = [(inputs, torch.rand(6, 4).softmax(-1)) for inputs, _ in row_batches()]
    for batches in (row_batches(), probabilities):
        notes = losses_and_parts(LabelSmoothing(0.1), batches, device_train_microbatch_size=microbatch_size)
        assert len(notes) == (8 if microbatch_size else 4)
        for loss, outputs, (_, targets) in notes:
            torch.testing.assert_close(loss, cross_entropy(outputs, targets, label_smoothing=0.1))


def test_targets_are_found_by_name_and_by_functions() -> None:
    class Named(Classifier):
        def forward(self, batch: Any) -> Any:
            return super().forward([batch["x"]])

        def loss(self, outputs: Any, batch: Any) -> Any:
            return super().loss(outputs, [None, batch["y"]])

    batches = [{"x": inputs, "y": targets} for inputs, targets in row_batches()]
    functions = (lambda batch: batch["y"], lambda batch, value: batch | {"y": value})
    for key in ("y", functions):
        algorithm = LabelSmoothing(0.2, target_key=key)
        for loss, outputs, batch in losses_and_parts(algorithm, batches, make_model=lambda: Named(nn.Linear(8, 4))):
            torch.testing.assert_close(loss, cross_entropy(outputs, batch["y"], label_smoothing=0.2))


def test_the_loss_of_a_language_model_takes_smoothed_targets() -> None:
    batches = [(torch.randint(5, (3, 7)), torch.randint(5, (3, 7))) for _ in range(2)]
    notes = losses_and_parts(
        LabelSmoothing(0.1),
        batches,
        make_model=lambda: LanguageModel(nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))),
    )
    for loss, outputs, (_, targets) in notes:
        bits = cross_entropy(outputs.flatten(0, 1), targets.flatten(), label_smoothing=0.1) / math.log(2)
        torch.testing.assert_close(loss, bits)


@given(shape=st.lists(st.integers(1, 4), max_size=3), classes=st.integers(1, 5), seed=st.integers(0, 99))
def test_class_numbers_of_any_shape_become_probabilities(shape: list[int], classes: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(-1, classes, shape, generator=generator)
    probabilities = soft_targets(numbers, torch.zeros(*shape, classes))
    expected = torch.where(numbers[..., None] >= 0, one_hot(numbers.clamp(min=0), classes), 0)
    assert torch.equal(probabilities, expected.float())
    assert soft_targets(probabilities, torch.zeros(*shape, classes)) is probabilities
    # Those of scores in half precision are not rounded.
    assert soft_targets(numbers, torch.zeros(*shape, classes, dtype=torch.bfloat16)).dtype is torch.float32


def test_a_row_without_target_adds_nothing_to_the_loss() -> None:
    inputs, targets = row_batches()[0]
    targets[2] = -100
    ((loss, outputs, _),) = losses_and_parts(LabelSmoothing(0.1), [(inputs, targets)])
    total = cross_entropy(outputs, targets, label_smoothing=0.1, reduction="sum")
    torch.testing.assert_close(loss, total / len(targets))


@pytest.mark.parametrize("targets", [torch.zeros(6, 1, dtype=torch.long), torch.zeros(6, 3), None])
def test_targets_that_do_not_go_with_the_outputs_are_refused(targets: Any) -> None:
    with pytest.raises(ConfigurationError):
        soft_targets(targets, torch.zeros(6, 4))


def mixtures(algorithm: Algorithm, rows: int, **settings: Any) -> list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """Return mixed inputs, targets in the loss, original targets, outputs and loss of each microbatch."""
    # Mixtures of these rows are the weights of the rows in them.
    batches = [(torch.eye(rows), torch.arange(rows) % 4)] * 20
    forward: list[Tensor] = []
    loss: list[Tensor] = []
    backward: list[Any] = []
    look = [
        note(forward, lambda state: state.batch[0], Event.AFTER_FORWARD),
        note(loss, lambda state: state.batch[1], Event.BEFORE_LOSS),
        note(backward, lambda state: (state.batch[1], state.outputs, state.loss), Event.BEFORE_BACKWARD),
    ]
    train(batches, [algorithm, *look], lambda: Classifier(nn.Linear(rows, 4)), **settings)
    return [(mixed, soft, *rest) for mixed, soft, rest in zip(forward, loss, backward, strict=True)]


@pytest.mark.parametrize("microbatch_size", SPLIT)
def test_mixup_mixes_targets_as_it_mixes_inputs(microbatch_size: int | None) -> None:
    seen = mixtures(MixUp(alpha=1.0), 8, device_train_microbatch_size=microbatch_size)
    shares = []
    for number, (mixed, soft, targets, outputs, loss) in enumerate(seen):
        first = (number % 2) * 4 if microbatch_size else 0
        own = mixed[:, first : first + len(mixed)]
        assert mixed.sum() == pytest.approx(len(mixed))
        torch.testing.assert_close(own.sum(dim=0), torch.ones(len(mixed)))
        assert (own.diagonal() >= 0.5).all()
        expected = own @ one_hot(targets, 4).float()
        torch.testing.assert_close(soft, expected)
        torch.testing.assert_close(loss, cross_entropy(outputs, expected))
        shares.append(1 - float(own.diagonal().min()))
    assert len({round(share, 6) for share in shares}) > len(seen) / 2
    assert max(shares) <= 0.5


def test_mixup_draws_from_the_beta_distribution() -> None:
    mixup = MixUp(alpha=0.4)
    torch.manual_seed(1)
    drawn = torch.tensor([mixup.draw_coefficient() for _ in range(4000)])
    assert drawn.mean() == pytest.approx(0.5, abs=0.02)
    assert drawn.var() == pytest.approx(1 / (4 * (2 * 0.4 + 1)), rel=0.05)


@pytest.mark.parametrize("mixing", [MixUp, CutMix])
@pytest.mark.parametrize(("precision", "microbatch_size"), [("fp32", None), ("amp_bf16", 4)])
def test_mixed_losses_equal_the_loss_of_mixed_targets(mixing: Any, microbatch_size: int | None, precision: str) -> None:
    # One batch: gradients in 16 bits differ between the two, and so would the weights of the second batch.
    batches = image_batches(1, 8)
    settings: Any = {"make_model": Image, "device_train_microbatch_size": microbatch_size, "precision": precision}
    of_targets = losses_and_parts(mixing(alpha=1.0), batches, **settings)
    of_losses: list[Tensor] = []
    look = note(of_losses, lambda state: state.loss, Event.AFTER_BACKWARD)
    train(batches, [mixing(alpha=1.0, interpolate_loss=True), look], **settings)
    for (loss, *_), other in zip(of_targets, of_losses, strict=True):
        torch.testing.assert_close(other, loss)


def test_losses_of_several_parts_are_mixed_part_by_part() -> None:
    def parts(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return cross_entropy(outputs, targets), outputs.square().mean()

    def whole(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets) + outputs.square().mean()

    def train_on(loss: Any) -> State:
        return train(image_batches(), MixUp(1.0, interpolate_loss=True), lambda: Image(loss_fn=loss))

    ends = [train_on(loss).model.state_dict() for loss in (parts, whole)]
    for first, second in zip(ends[0].values(), ends[1].values(), strict=True):
        torch.testing.assert_close(first, second)


def test_values_to_regress_on_are_mixed_without_classes() -> None:
    batches = [(torch.eye(6), torch.arange(6.0))]
    notes: list[Any] = []
    look = note(notes, lambda state: state.batch, Event.BEFORE_LOSS)
    model = Classifier(nn.Sequential(nn.Linear(6, 1), nn.Flatten(0)), loss_fn=nn.functional.mse_loss)
    train(batches, [MixUp(alpha=5.0), look], lambda: model)
    ((mixed, targets),) = notes
    torch.testing.assert_close(targets, mixed @ torch.arange(6.0))
    assert not torch.equal(targets, torch.arange(6.0))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_smoothing_and_two_mixings_add_up_in_any_order(order: tuple[int, ...]) -> None:
    # Channel n is 1 in image n only, so that the means of the channels are the weights of the images in the mixture.
    images, classes = torch.eye(6).reshape(6, 6, 1, 1).expand(6, 6, 5, 5), torch.arange(6) % 3
    algorithms = [MixUp(2.0), LabelSmoothing(0.2), CutMix(2.0)]
    seen: list[tuple[Tensor, Tensor]] = []
    after: list[Tensor] = []
    look = [
        note(seen, lambda state: state.batch, Event.BEFORE_LOSS),
        note(after, lambda state: state.batch[1], Event.BEFORE_BACKWARD),
    ]
    model = Classifier(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)))
    train([(images, classes)] * 5, [*(algorithms[number] for number in order), *look], lambda: model)
    weights = [mixed.mean(dim=(2, 3)) for mixed, _ in seen]
    assert max((weight > 0).sum(dim=1).max() for weight in weights) == 4, "both have mixed"
    for weight, (_, soft) in zip(weights, seen, strict=True):
        torch.testing.assert_close(soft, 0.8 * weight @ one_hot(classes, 3).float() + 0.2 / 3)
    assert all(torch.equal(targets, classes) for targets in after)


@pytest.mark.parametrize(("uniform", "microbatch_size"), [(False, 4), (True, None)])
def test_cutmix_weighs_targets_by_the_areas_of_the_images(uniform: bool, microbatch_size: int | None) -> None:
    # Each image is filled with its number, so that each pixel tells which image it is from.
    images = torch.arange(8.0).reshape(8, 1, 1, 1).expand(8, 2, 7, 9).clone()
    classes = torch.arange(8) % 3
    forward: list[Tensor] = []
    soft: list[Tensor] = []
    look = [
        note(forward, lambda state: state.batch[0], Event.AFTER_FORWARD),
        note(soft, lambda state: state.batch[1], Event.BEFORE_LOSS),
    ]
    algorithm = CutMix(alpha=1.0, uniform_sampling=uniform)
    train([(images, classes)] * 15, [algorithm, *look], Image, device_train_microbatch_size=microbatch_size)
    areas = set()
    for number, (mixed, targets) in enumerate(zip(forward, soft, strict=True)):
        rows = torch.arange(len(mixed)) + ((number % 2) * 4 if microbatch_size else 0)
        sources = mixed[:, 0].long()
        torch.testing.assert_close(targets, one_hot(classes[sources], 3).float().mean(dim=(1, 2)))
        foreign = (sources != rows[:, None, None]).any(dim=0)
        assert (foreign.any(dim=1)[:, None] & foreign.any(dim=0)).equal(foreign), "no box"
        areas.add(int(foreign.sum()))
    assert len(areas) > 5


def test_cutmix_cuts_the_share_that_was_drawn() -> None:
    for share, sides in ((0.25, (4, 6)), (0.64, (6, 9)), (1.0, (8, 12))):
        with (
            patch.object(CutMix, "draw_coefficient", return_value=share),
            patch(DRAW, side_effect=[torch.tensor(4), torch.tensor(6)]),
        ):
            mixed, weight = CutMix().mix(
                torch.arange(2.0).reshape(2, 1, 1, 1).expand(2, 1, 8, 12), torch.tensor([1, 0])
            )
        assert int(mixed[0].sum()) == sides[0] * sides[1]
        assert weight == sides[0] * sides[1] / 96


@given(size=st.integers(1, 12), data=st.data(), uniform=st.booleans())
def test_a_span_lies_within_the_image_and_uniform_ones_cover_all_pixels_equally(
    size: int, data: st.DataObject, uniform: bool
) -> None:
    length = data.draw(st.integers(0, size))
    with patch(DRAW, return_value=torch.tensor(0)) as draw:
        random_span(size, length, uniform)
    low, high, _ = draw.call_args.args
    spans = []
    for number in range(low, high):
        with patch(DRAW, return_value=torch.tensor(number)):
            spans.append(random_span(size, length, uniform))
    assert all(0 <= span.start <= span.stop <= size and span.stop - span.start <= length for span in spans)
    counts = [sum(span.start <= pixel < span.stop for span in spans) for pixel in range(size)]
    assert max(span.stop - span.start for span in spans) == length
    if uniform:
        assert set(counts) == {length}


@pytest.mark.parametrize(
    ("algorithm", "batch"),
    [
        (MixUp(), (torch.zeros(6, 8, dtype=torch.long), torch.zeros(6))),
        (MixUp(), (torch.zeros(6, 8), ["a"] * 6)),
        (CutMix(), (torch.zeros(6, 8), torch.zeros(6))),
        (MixUp(input_key="x"), (torch.zeros(6, 8), torch.zeros(6))),
    ],
)
def test_batches_that_cannot_be_mixed_are_refused(algorithm: Algorithm, batch: Any) -> None:
    data = DataSpec([batch], get_num_samples_in_batch=lambda batch: 6)
    with pytest.raises(ConfigurationError):
        train(data, algorithm, max_duration="1ba")
