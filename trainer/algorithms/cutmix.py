"""Training on images with a piece of another image in them."""

import math

import torch

from offloop.trainer.algorithms.common import check_images, random_span
from offloop.trainer.algorithms.mixing import Mixing
from offloop.trainer.device.batch import BatchKey


class CutMix(Mixing):
    """Replaces a box in each image by the same box of another image of the microbatch, its partner, and mixes their
    targets in proportion to the areas.

    The box is the same for all images of a microbatch. Its share of the area is drawn from Beta(alpha, alpha), and its
    sides have the image's proportions; it is cut off at the border.

    Args:
        alpha: parameter of the Beta distribution, 0 or more: the larger, the closer to equal parts; 0 for no mixing.
        interpolate_loss: mix the losses for both sets of targets, for losses that take no probabilities as targets.
        uniform_sampling: let every pixel be in the box with the same probability; by default the box's middle is drawn
            from all pixels, as in the paper.
        input_key, target_key: where images (of shape (rows, channels, height, width)) and targets (class numbers,
            probabilities or values) are in the batch, see :mod:`offloop.trainer.device.batch`.

    Paper: Yun et al. 2019, "CutMix: Regularization Strategy to Train Strong Classifiers with Localizable Features",
    arXiv:1905.04899. Reference: ``composer/algorithms/cutmix``."""

    def __init__(
        self,
        alpha: float = 1.0,
        interpolate_loss: bool = False,
        uniform_sampling: bool = False,
        input_key: BatchKey = 0,
        target_key: BatchKey = 1,
    ) -> None:
        super().__init__(alpha, interpolate_loss, input_key, target_key)
        self.uniform_sampling = uniform_sampling

    def mix(self, inputs: torch.Tensor, partners: torch.Tensor) -> tuple[torch.Tensor, float]:
        height, width = check_images(inputs, "CutMix").shape[2:]
        side = math.sqrt(self.draw_coefficient())
        rows = random_span(height, int(side * height), self.uniform_sampling)
        columns = random_span(width, int(side * width), self.uniform_sampling)
        mixed = inputs.clone()
        mixed[:, :, rows, columns] = inputs[partners, :, rows, columns]
        area = (rows.stop - rows.start) * (columns.stop - columns.start)
        return mixed, area / (height * width)
