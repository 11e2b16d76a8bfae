"""Holes in images, and images that grow."""

from typing import Any

import pytest
import torch
from algorithm_runs import Image, image_batches, seen_batches, train
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from training import Act

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.event import Event
from offloop.trainer import Classifier
from offloop.trainer.algorithms import CutOut, ProgressiveResizing


@settings(deadline=None, max_examples=25)
@given(
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    length=st.floats(0.01, 1),
    holes=st.integers(1, 3),
    uniform=st.booleans(),
)
def test_a_hole_is_a_square_of_zeros_in_all_images_and_the_rest_stays(
    height: int, width: int, length: float, holes: int, uniform: bool
) -> None:
    batches = image_batches(count=2, height=height, width=width)
    side = int(length * min(height, width))
    algorithm = CutOut(num_holes=holes, length=length, uniform_sampling=uniform)
    for (cut, targets), (images, classes) in zip(seen_batches(algorithm, batches), batches, strict=True):
        hole = cut[0, 0] == 0
        assert torch.equal(cut, images * ~hole)
        assert torch.equal(targets, classes)
        assert int(hole.sum()) <= holes * side**2
        if holes == 1:
            rows, columns = hole.any(dim=1), hole.any(dim=0)
            assert torch.equal(hole, rows[:, None] & columns)
            assert rows.sum() <= side
            assert columns.sum() <= side
            assert bool(hole.any()) == (side > 0)


def test_holes_have_their_number_and_length_unless_they_are_cut_off() -> None:
    sizes = [int((cut[0, 0] == 0).sum()) for cut, _ in seen_batches(CutOut(3, 0.25), image_batches(20, 1))]
    assert max(sizes) == 3 * 2**2
    assert len(set(sizes)) > 1


def sizes(algorithm: ProgressiveResizing, batches: Any, **arguments: Any) -> list[tuple[int, ...]]:
    return [tuple(images.shape[2:]) for images, *_ in seen_batches(algorithm, batches, **arguments)]


@pytest.mark.parametrize("mode", ["resize", "crop"])
def test_images_wait_then_grow_then_have_their_full_size(mode: str) -> None:
    algorithm = ProgressiveResizing(mode, 0.5, finetune_fraction=0.2, delay_fraction=0.4, size_increment=2)
    # The scale is 1/2 until batch 4, then 1/2, 5/8, 3/4, 7/8 of 16 pixels, and 1 for the last two batches.
    widths = [8, 8, 8, 8, 8, 10, 12, 14, 16, 16]
    assert sizes(algorithm, image_batches(10, 2, 8, 16)) == [(width // 2, width) for width in widths]


@pytest.mark.parametrize(
    ("arguments", "widths"),
    [
        ({"size_increment": 100}, [15] * 10),
        ({"initial_scale": 0.01, "size_increment": 3}, [3, 3, 3, 3, 3, 3, 9, 12, 15, 15]),
        ({"finetune_fraction": 0.0, "delay_fraction": 0.0}, [8, 8, 8, 8, 12, 12, 12, 12, 12, 15]),
    ],
)
def test_widths_are_multiples_of_the_increment_until_the_full_size(arguments: Any, widths: list[int]) -> None:
    algorithm = ProgressiveResizing(**({"delay_fraction": 0.4} | arguments))
    assert sizes(algorithm, image_batches(10, 2, 15, 15)) == [(width, width) for width in widths]


def test_crops_are_pieces_from_all_over_the_images() -> None:
    images = torch.arange(64.0).reshape(1, 1, 8, 8).repeat(2, 2, 1, 1)
    batches = [(images, torch.tensor([0, 1]))] * 40
    starts: set[tuple[int, int]] = set()
    for crop, _ in seen_batches(ProgressiveResizing("crop", delay_fraction=0.8), batches)[:32]:
        top, left = divmod(int(crop[0, 0, 0, 0]), 8)
        assert torch.equal(crop, images[:, :, top : top + 4, left : left + 4])
        starts.add((top, left))
    assert {top for top, _ in starts} == {left for _, left in starts} == {0, 1, 2, 3, 4}


class Pixels(Classifier):
    """Scores for each pixel, with the classes last, where there are as many targets as pixels."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(1, 3, 1), loss_fn=lambda outputs, targets: outputs.mean())


@pytest.mark.parametrize("mode", ["resize", "crop"])
@pytest.mark.parametrize("dtype", [torch.long, torch.bool])
def test_targets_of_pixels_stay_with_their_pixels(mode: str, dtype: torch.dtype) -> None:
    numbers = torch.randint(2, (3, 1, 8, 12), generator=torch.Generator().manual_seed(2))
    algorithm = ProgressiveResizing(mode, resize_targets=True)
    for targets in (numbers.to(dtype), numbers[:, 0].to(dtype)):
        for images, seen in seen_batches(algorithm, [(numbers.float(), targets)] * 10, Pixels):
            assert seen.dtype is dtype
            assert torch.equal(images.flatten().to(dtype), seen.flatten())


@pytest.mark.parametrize("mode", ["resize", "crop"])
def test_targets_with_fewer_pixels_are_reduced_in_proportion(mode: str) -> None:
    corners = torch.arange(16).reshape(1, 4, 4)
    images = corners.repeat_interleave(4, 1).repeat_interleave(4, 2).float().unsqueeze(1)
    algorithm = ProgressiveResizing(mode, resize_targets=True, delay_fraction=0.8)
    for image, target in seen_batches(algorithm, [(images, corners)] * 20, Pixels)[:16]:
        assert (image.shape[2:], target.shape) == ((8, 8), (1, 2, 2))
        assert int(image[0, 0, 0, 0]) == int(target[0, 0, 0])


def test_the_size_is_logged() -> None:
    logged: list[Any] = []

    def collect(event: Event, state: Any, logger: Any) -> None:
        logged.extend(logger.take())

    algorithm = ProgressiveResizing(finetune_fraction=0.25, delay_fraction=0.25, size_increment=2)
    train(image_batches(4, 2, 16, 8), [algorithm, Act(collect, Event.BATCH_START)], Image)
    names = [f"progressive_resizing/{name}" for name in ("height", "width", "scale_factor")]
    expected = [(8, 4, 0.5), (8, 4, 0.5), (12, 6, 0.75), (16, 8, 1.0)]
    assert logged == [[step, dict(zip(names, size, strict=True))] for step, size in enumerate(expected)]


ROWS = (torch.zeros(6, 8), torch.zeros(6))


@pytest.mark.parametrize(
    ("algorithm", "batch"),
    [
        (CutOut(), ROWS),
        (ProgressiveResizing(), ROWS),
        (ProgressiveResizing(resize_targets=True), (torch.zeros(6, 1, 8, 8), torch.zeros(6))),
        (CutOut(input_key=[0, "image"]), ([torch.zeros(6, 8)], torch.zeros(6))),
    ],
)
def test_batches_without_images_are_refused(algorithm: Any, batch: Any) -> None:
    with pytest.raises(ConfigurationError):
        train([batch], algorithm, Image)
