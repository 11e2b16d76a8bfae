"""Images in the cells of tables."""

from typing import Any

from offloop.bus.errors import ConfigurationError

_FORMATS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"RIFF", b"GIF8")


class Image:
    """An image, as a cell of a table. It is sent and stored once, however many rows have it.

    ``data`` is the content of a PNG, JPEG, WebP or GIF file, or an array of bytes (uint8) of the shape
    ``(height, width)`` or ``(height, width, channels)`` with 1, 3 or 4 channels.

    Raises ConfigurationError for anything else."""

    __slots__ = ("content",)

    content: list[Any]
    """``[file]``, or ``[height, width, channels, pixels]``."""

    def __init__(self, data: Any) -> None:
        if isinstance(data, bytes) and data.startswith(_FORMATS):
            self.content = [data]
            return
        shape = tuple(getattr(data, "shape", ()))
        kind = str(getattr(data, "dtype", type(data).__name__)).removeprefix("torch.")
        channels = shape[2] if len(shape) == 3 else 1
        if kind != "uint8" or len(shape) not in (2, 3) or channels not in (1, 3, 4) or 0 in shape:
            raise ConfigurationError(
                f"an image is given as {kind} of shape {list(shape)}: use the bytes of a PNG, JPEG, WebP or GIF file, "
                "or a uint8 array of shape (height, width) or (height, width, 1, 3 or 4)"
            )
        pixels = data.numpy() if hasattr(data, "numpy") else data
        self.content = [shape[0], shape[1], channels, pixels.tobytes()]
