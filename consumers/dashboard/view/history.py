"""The history of a long run: its summary says what charts show of all of it, and parts of the recording are read when
somebody zooms into them."""

import contextlib
import math
import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

from offloop.bus.errors import OffloopError
from offloop.bus.recording.recording import Recording
from offloop.bus.recording.summary import Summary
from offloop.consumers.dashboard.view.metrics import SPEED_WINDOW
from offloop.consumers.dashboard.view.run_view import RunView
from offloop.consumers.dashboard.view.series import Axis

MAX_BYTES = 32 << 20
"""Of a recording, for one zoom: some 400,000 batches; a longer part is shown as the summary has it."""
TAIL_BYTES = 1 << 20
"""At the end of a recording: so much is read event by event, for the newest values of every rank."""
_STRETCH_BYTES = 8 << 20
_KEPT_PARTS = 4
_REQUESTED_PARTS = 2

_Place: TypeAlias = tuple[int, int, int]
"""From one offset to another, and the rank."""


class Part(NamedTuple):
    """A part of a run at full resolution: the steps from ``low`` up to ``high``; there may be others beside them."""

    view: RunView
    low: float
    high: float


class History:
    """What a view has as a summary, and where in the recording it is.

    Args:
        view: shows the run; what comes behind the offset ``until`` it has at full resolution.
    """

    def __init__(self, view: RunView, recording: Path, summary: Summary, until: int) -> None:
        self._view = view
        self._recording = Recording(recording)
        self._until = until
        ticks = [tick for _, tick in sorted(summary.clock.items()) if tick.offset < until]
        self._batches = [tick.batch for tick in ticks]
        self._offsets = [tick.offset for tick in ticks]
        self._names = summary.metrics.keys()
        self._began, self._is_imported = summary.began, summary.is_imported
        self._lock = threading.Lock()
        self._read: OrderedDict[_Place, RunView] = OrderedDict()
        self._requested: OrderedDict[_Place, None] = OrderedDict()
        """What is to be read, the newest last: who zooms on does not wait for what was shown before."""
        self._is_reading = False

    def has(self, name: str) -> bool:
        """Whether the values of a metric are in the recording."""
        return name in self._names or name.startswith("throughput/")

    def detail(self, x: Axis, first: float, last: float, rank: int = 0) -> RunView | None:
        """What one rank has between two places of an axis, at full resolution. ``None`` where the view has that itself,
        where it is too much, and until it has been read: the view's version grows then."""
        begin, end = self._view.batches_at(x, first, last)
        offsets = self._offsets_around(begin, end)
        if not self._batches or begin >= self._batches[-1] or offsets[1] - offsets[0] > MAX_BYTES:
            return None
        place = (*offsets, rank)
        with self._lock:
            found = self._read.get(place)
            if found is not None:
                self._read.move_to_end(place)
                return found
            self._requested[place] = None
            self._requested.move_to_end(place)
            if len(self._requested) > _REQUESTED_PARTS:
                self._requested.popitem(last=False)
            if not self._is_reading:
                self._is_reading = True
                threading.Thread(target=self._read_requested, name="offloop-zoom", daemon=True).start()
            return None

    def parts(self, rank: int = 0) -> Iterator[Part]:
        """All that a rank has, at full resolution, part by part."""
        low, place, last = -math.inf, -1, len(self._batches) - 1
        while place < last:
            place = max(place + 1, bisect_right(self._offsets, self._offset(place) + _STRETCH_BYTES) - 1)
            found = self._read_part((*self._offsets_around(low, self._batches[place]), rank))
            high = self._batches[place] if place < last else max((one.batch for one in found.ranks()), default=low)
            yield Part(found, low, high)
            low = high
        yield Part(self._view, low, math.inf)

    def _offset(self, place: int) -> int:
        if place < 0:
            return 0
        return self._offsets[place] if place < len(self._offsets) else self._until

    def _offsets_around(self, begin: float, end: float) -> tuple[int, int]:
        """Where the batches are, with some more at either side: lines come from there, and throughput is measured."""
        first, last = bisect_right(self._batches, begin - SPEED_WINDOW) - 2, bisect_left(self._batches, end) + 1
        return self._offset(first), self._offset(last)

    def _read_part(self, place: _Place, is_requested: Callable[[], bool] = lambda: True) -> RunView:
        view = RunView(self._recording.run_name, self._recording.attempt)
        view.begin_within(self._began, self._is_imported)
        for batch in self._recording.part(*place):
            for state in batch:
                view.see(state)
            if not is_requested():
                break
        return view

    def _read_requested(self) -> None:
        while True:
            with self._lock:
                place = next(reversed(self._requested), None)
                self._is_reading = place is not None
            if place is None:
                return
            found = None
            # Where the recording is gone, or the disk does not give it, the summary is what remains.
            with contextlib.suppress(OffloopError):
                found = self._read_part(place, partial(self._requested.__contains__, place))
            with self._lock:
                if self._requested.pop(place, self) is self or found is None:
                    continue
                self._read[place] = found
                if len(self._read) > _KEPT_PARTS:
                    self._read.popitem(last=False)
            self._view.note_change()
