"""Boxes in images."""

from typing import Any

import torch

from bus.errors import ConfigurationError

__all__ = ["check_images", "random_span"]


def check_images(images: Any, algorithm: str) -> torch.Tensor:
    """The images, a tensor of shape (rows, channels, height, width).

    Raises :class:`bus.errors.ConfigurationError` for anything else."""
    if isinstance(images, torch.Tensor) and images.ndim == 4:
        return images
    what = f"shape {tuple(images.shape)}" if isinstance(images, torch.Tensor) else f"type {type(images).__name__}"
    raise ConfigurationError(
        f"{algorithm} cannot use inputs of {what}: it needs images of shape (rows, channels, height, width); "
        "name them by input_key"
    )


def random_span(size: int, length: int, uniform: bool) -> slice:
    """One side of a box of ``length`` pixels in an image side of ``size`` pixels, cut off where it sticks out.

    With ``uniform`` every pixel is in the box with the same probability; otherwise the middle of the box is drawn from
    all pixels, as in the papers, and pixels near the border are in it less often. The random number comes from torch's
    generator on the host."""
    lowest, offset = (1 - max(length, 1), 0) if uniform else (0, length // 2)
    start = int(torch.randint(lowest, size, ())) - offset
    return slice(max(start, 0), min(start + length, size))
