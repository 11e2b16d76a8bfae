"""The images of a run, over its steps."""

import threading
from bisect import bisect_left, bisect_right
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from offloop.consumers.api.images import as_bytes
from offloop.consumers.api.logger import Images

if TYPE_CHECKING:
    import numpy as np

MAX_NAMES = 16
"""Names of which images are kept: those of which images came last."""
MAX_STEPS = 500
"""Steps of a name."""
MAX_BYTES = 64 << 20
"""Bytes of all images of a run together."""
OF_ONE_STEP = 8
"""Images kept of those that were logged at once."""


_step = attrgetter("step")


class StepImages(NamedTuple):
    """The images of one name at one step."""

    step: int
    pixels: "tuple[np.ndarray[Any, Any], ...]"
    """Bytes, each of height, width and channels."""
    logged: int
    """The number of images, of which some may not be kept."""

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(image.nbytes for image in self.pixels)


class ImageHistory:
    """Keeps images by name and step. When they become too many, those go that lie closest together; the first and the
    newest of each name stay. For any thread."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: dict[str, list[StepImages]] = {}

    def take(self, entry: Images) -> None:
        """Add images; they replace those of the same name and step."""
        # Not under the lock: floats take a while.
        new = StepImages(entry.step, tuple(map(as_bytes, entry.images[:OF_ONE_STEP])), len(entry.images))
        with self._lock:
            kept = self._kept[entry.name] = self._kept.pop(entry.name, [])
            begin, end = bisect_left(kept, new.step, key=_step), bisect_right(kept, new.step, key=_step)
            kept[begin:end] = [new]
            if len(self._kept) > MAX_NAMES:
                del self._kept[next(iter(self._kept))]
            if len(kept) > MAX_STEPS:
                _remove_one(kept)
            self._keep_size()

    def steps(self) -> dict[str, list[tuple[int, int]]]:
        """The steps with images of each name, and the number of images logged there."""
        with self._lock:
            return {name: [(one.step, one.logged) for one in kept] for name, kept in self._kept.items()}

    def at(self, name: str, step: int) -> StepImages | None:
        """The images of a name at a step, or the last ones before it; ``None`` without any."""
        with self._lock:
            kept = self._kept.get(name, [])
            place = bisect_right(kept, step, key=_step)
            return kept[place - 1] if place else None

    def _keep_size(self) -> None:
        sizes = {name: sum(one.size for one in kept) for name, kept in self._kept.items()}
        while sum(sizes.values()) > self._max_bytes:
            # The first of two goes, too, where there is no other way.
            name = max(sizes, key=lambda one: (len(self._kept[one]) > 2, sizes[one] * (len(self._kept[one]) > 1)))
            if len(self._kept[name]) < 2:
                return
            sizes[name] -= _remove_one(self._kept[name]).size


def _remove_one(kept: list[StepImages]) -> StepImages:
    """Remove the step whose neighbours are closest to one another; of two, the first."""
    inner = range(1, len(kept) - 1)
    return kept.pop(min(inner, key=lambda one: kept[one + 1].step - kept[one - 1].step, default=0))
