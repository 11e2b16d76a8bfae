"""The images of a run, over its steps."""

import threading
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Any, NamedTuple

from offloop.consumers.api.images import as_bytes
from offloop.consumers.api.logger import Images

if TYPE_CHECKING:
    import numpy as np

MAX_NAMES = 16
"""Of so many names images are kept, those of which images came last."""
MAX_STEPS = 500
"""So many steps of a name are kept."""
MAX_BYTES = 64 << 20
"""What all images of a run take together, at most, beside the newest of each name."""
OF_ONE_STEP = 8
"""So many of the images that were logged at once are kept."""


class StepImages(NamedTuple):
    """The images of one name at one step."""

    step: int
    pixels: "tuple[np.ndarray[Any, Any], ...]"
    """Bytes, each of height, width and channels."""
    logged: int
    """How many there were."""

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(image.nbytes for image in self.pixels)


class ImageHistory:
    """Keeps images by name and step. When they become too many, every other one goes where they lie closest; the first
    and the newest of each name stay. It may be used by any thread."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: dict[str, list[StepImages]] = {}
        self._sizes: dict[str, int] = {}

    def take(self, entry: Images) -> None:
        """Takes images; they replace those of the same name and step."""
        # Not under the lock: floats take a while.
        new = StepImages(entry.step, tuple(map(as_bytes, entry.images[:OF_ONE_STEP])), len(entry.images))
        with self._lock:
            kept = self._kept[entry.name] = self._kept.pop(entry.name, [])
            place = bisect_left(kept, new.step, key=_step)
            replaced = kept[place : place + 1] if place < len(kept) and kept[place].step == new.step else []
            kept[place : place + len(replaced)] = [new]
            before = self._sizes.get(entry.name, 0)
            self._sizes[entry.name] = before + new.size - sum(one.size for one in replaced)
            if len(self._kept) > MAX_NAMES:
                oldest = next(iter(self._kept))
                del self._kept[oldest], self._sizes[oldest]
            self._thin(entry.name)

    def steps(self) -> dict[str, list[tuple[int, int]]]:
        """Of each name the steps of which there are images, and how many were logged there."""
        with self._lock:
            return {name: [(one.step, one.logged) for one in kept] for name, kept in self._kept.items()}

    def at(self, name: str, step: int) -> StepImages | None:
        """The images of a name at a step, or the last ones before it; ``None`` where there are none."""
        with self._lock:
            kept = self._kept.get(name, [])
            place = bisect_right(kept, step, key=_step)
            return kept[place - 1] if place else None

    def _thin(self, name: str) -> None:
        while len(self._kept[name]) > MAX_STEPS:
            self._remove_one(name)
        while sum(self._sizes.values()) > self._max_bytes:
            largest = max(
                (one for one, kept in self._kept.items() if len(kept) > 2), key=self._sizes.__getitem__, default=None
            )
            if largest is None:
                break
            self._remove_one(largest)
        # Of two, the first one goes too where there is no other way.
        for kept in [] if sum(self._sizes.values()) <= self._max_bytes else self._kept.values():
            del kept[:-1]
        self._sizes = {one: sum(images.size for images in kept) for one, kept in self._kept.items()}

    def _remove_one(self, name: str) -> None:
        """Removes the step whose neighbours are closest to one another."""
        kept = self._kept[name]
        place = min(range(1, len(kept) - 1), key=lambda one: kept[one + 1].step - kept[one - 1].step)
        self._sizes[name] -= kept.pop(place).size


def _step(images: StepImages) -> int:
    return images.step
