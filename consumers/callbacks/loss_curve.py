"""The course of the loss as a small picture."""

import io
import math
from dataclasses import dataclass, field

_POINTS = 600
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 640, 320, 76, 14, 28


@dataclass
class LossCurve:
    """The losses of some batches, at equal distances."""

    points: list[tuple[int, float]] = field(default_factory=list)
    stride: int = 1
    last: float | None = None

    def add(self, batch: int, loss: float) -> None:
        """Add the loss of a batch; of very many batches every second one is kept, and so on."""
        self.last = loss
        if batch % self.stride == 0:
            self.points.append((batch, loss))
        if len(self.points) > _POINTS:
            self.stride *= 2
            self.points = [one for one in self.points if one[0] % self.stride == 0]

    def as_png(self) -> bytes | None:
        """Draw it; ``None`` with fewer than two losses that are finite."""
        points = [(batch, loss) for batch, loss in self.points if math.isfinite(loss)]
        if len(points) < 2:
            return None
        from PIL import Image, ImageDraw

        batches, losses = zip(*points, strict=True)
        first, last, low, high = min(batches), max(batches), min(losses), max(losses)
        across, down = (_WIDTH - _LEFT - 12) / ((last - first) or 1), (_HEIGHT - _TOP - _BOTTOM) / ((high - low) or 1)
        image = Image.new("RGB", (_WIDTH, _HEIGHT), "white")
        draw = ImageDraw.Draw(image)
        for loss in (low, (low + high) / 2, high):
            y = _TOP + (high - loss) * down
            draw.line([(_LEFT, y), (_WIDTH - 12, y)], fill="#dddddd")
            draw.text((8, y - 6), f"{loss:.4g}", fill="#333333")
        draw.text((_LEFT, _HEIGHT - 20), f"batch {first:,} to {last:,}", fill="#333333")
        line = [(_LEFT + (batch - first) * across, _TOP + (high - loss) * down) for batch, loss in points]
        draw.line(line, fill="#1f77b4", width=2, joint="curve")
        file = io.BytesIO()
        image.save(file, "PNG")
        return file.getvalue()
