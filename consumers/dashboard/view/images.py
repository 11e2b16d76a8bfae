"""The images of a run, over its steps."""

import threading
from bisect import bisect_left, bisect_right
from operator import attrgetter
from typing import Any, NamedTuple

from offloop.consumers.api.images import as_bytes
from offloop.consumers.api.logger import Images
from offloop.consumers.api.optional import np

MAX_NAMES = 16  # names with images, the newest
MAX_STEPS = 500
MAX_BYTES = 64 << 20  # bytes of all images of a run together
OF_ONE_STEP = 8  # images kept of one call


_step = attrgetter("step")


class StepImages(NamedTuple):
    step: int
    pixels: "tuple[np.ndarray[Any, Any], ...]"  # bytes, each of height, width and channels
    logged: int  # the number of logged images, of which some may not be kept

    @property
    def size(self) -> int:
        return sum(image.nbytes for image in self.pixels)


class ImageHistory:
    """Keeps images by name and step, for any thread. Of too many, the closest together are removed."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: dict[str, list[StepImages]] = {}

    def take(self, entry: Images) -> None:
        # Not under the lock: converting floats takes a while.
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
        with self._lock:
            return {name: [(one.step, one.logged) for one in kept] for name, kept in self._kept.items()}

    def at(self, name: str, step: int) -> StepImages | None:
        with self._lock:
            kept = self._kept.get(name, [])
            place = bisect_right(kept, step, key=_step)
            return kept[place - 1] if place else None

    def _keep_size(self) -> None:
        sizes = {name: sum(one.size for one in kept) for name, kept in self._kept.items()}
        while sum(sizes.values()) > self._max_bytes:
            # Of two, the first is removed too if necessary.
            name = max(sizes, key=lambda one: (len(self._kept[one]) > 2, sizes[one] * (len(self._kept[one]) > 1)))
            if len(self._kept[name]) < 2:
                return
            sizes[name] -= _remove_one(self._kept[name]).size


def _remove_one(kept: list[StepImages]) -> StepImages:
    """Remove the step with the closest neighbours; of two, the first."""
    inner = range(1, len(kept) - 1)
    return kept.pop(min(inner, key=lambda one: kept[one + 1].step - kept[one - 1].step, default=0))
