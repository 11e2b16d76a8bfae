"""Images as destinations receive them, made from tensors, arrays and sequences of these."""

import io
from collections.abc import Sequence
from typing import Any, TypeAlias

from offloop.bus.errors import ConfigurationError
from offloop.consumers.api.optional import np

_Array: TypeAlias = "np.ndarray[Any, Any]"
_CHANNELS = (1, 3, 4)


def as_images(name: str, images: Any, channels_last: bool) -> list[_Array]:
    """Return copies of the images, each of height, width and channels. Raises ConfigurationError."""
    return [_image(name, image, channels_last) for image in _each(f"images {name!r}", images, 3)]


def as_masks(name: str, mask: str, values: Any, images: Sequence[_Array]) -> list[_Array]:
    """Return copies of the masks of class numbers, one for each image. Raises ConfigurationError."""
    what = f"mask {mask!r} of images {name!r}"
    masks = [_array(what, one).copy() for one in _each(what, values, 2)]
    if len(masks) != len(images):
        raise ConfigurationError(f"{what} has {len(masks)} masks for {len(images)} images: give one for each")
    for found, image in zip(masks, images, strict=True):
        if found.shape != image.shape[:2]:
            raise ConfigurationError(
                f"{what} has the shape {found.shape} for an image of {image.shape[:2]}: use the image's size"
            )
        if found.dtype.kind not in "biu":
            raise ConfigurationError(f"{what} is of type {found.dtype}: use whole class numbers")
    return masks


def as_bytes(image: _Array) -> _Array:
    """Pixels as bytes. An image of floats outside 0 to 1 is stretched to that range; NaN and infinities are 0."""
    if image.dtype == np.uint8:
        return image
    finite = np.where(np.isfinite(image), image, 0).astype(np.float64)
    low, high = float(finite.min()), float(finite.max())
    if low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    scaled: _Array = ((finite - low) / (high - low or 1.0) * 255).round().astype(np.uint8)
    return scaled


def as_png(pixels: _Array) -> bytes:
    from PIL import Image

    encoded = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(encoded, "PNG")
    return encoded.getvalue()


def class_numbers(mask: _Array) -> _Array:
    if mask.min() < 0 or mask.max() > 255:
        raise ConfigurationError(f"a mask has class numbers up to {mask.max()}: use 0 to 255")
    return mask.astype("uint8")


def _each(what: str, values: Any, dimensions: int) -> Sequence[Any]:
    """Divide a sequence or an array of several images into single ones of at most ``dimensions`` dimensions."""
    if isinstance(values, list | tuple):
        return values
    array = _array(what, values)
    return [array] if array.ndim <= dimensions else list(array)


def _image(name: str, image: Any, channels_last: bool) -> _Array:
    found = _array(f"images {name!r}", image)
    ordered = found
    if found.ndim == 2:
        ordered = found[:, :, None]
    elif found.ndim == 3 and not channels_last:
        ordered = found.transpose(1, 2, 0)
    if ordered.ndim != 3 or not ordered.size or ordered.shape[2] not in _CHANNELS:
        raise ConfigurationError(
            f"an image of {name!r} has the shape {found.shape}: an image has height and width, and 1, 3 or 4 channels "
            f"{'after' if channels_last else 'before'} them (channels_last={channels_last})"
        )
    return ordered.astype(_pixel_type(name, ordered), order="C", copy=True)


def _pixel_type(name: str, image: _Array) -> Any:
    if image.dtype.kind == "f":
        return image.dtype
    if image.dtype.kind not in "biu" or image.min() < 0 or image.max() > 255:
        raise ConfigurationError(
            f"an image of {name!r} has pixels of type {image.dtype}: use floats, or whole numbers from 0 to 255"
        )
    return "uint8"


def _array(what: str, value: Any) -> _Array:
    try:
        if hasattr(value, "detach"):
            tensor = value.detach().cpu()
            # NumPy has no bfloat16.
            return np.asarray((tensor.float() if tensor.is_floating_point() else tensor).numpy())
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigurationError(f"{what} cannot be read as an array: {error}; log tensors or arrays") from None
