"""The history of a long run: charts show its summary, and zooming reads parts of the recording."""

import contextlib
import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeAlias

from offloop.bus.errors import OffloopError
from offloop.bus.recording.recording import Recording
from offloop.bus.recording.summary import Summary
from offloop.consumers.dashboard.view.metrics import SPEED_WINDOW
from offloop.consumers.dashboard.view.run_view import RunView
from offloop.consumers.dashboard.view.series import Axis

MAX_BYTES = 32 << 20  # limit of one zoom: some 400,000 batches; longer parts show the summary
TAIL_BYTES = 1 << 20  # the end of a recording that is read event by event, for the newest values of every rank
_REQUESTED_PARTS = 2

_Place: TypeAlias = tuple[int, int, int, frozenset[str]]  # first and last offset, the rank, and the metrics


class History:
    """The recording of a view with a summary up to the offset ``until``, and all events from there on."""

    def __init__(self, view: RunView, recording: Path, summary: Summary, until: int) -> None:
        self._view = view
        self._recording = Recording(recording)
        self._until = until
        ticks = [tick for _, tick in sorted(summary.clock.items()) if tick.offset < until]
        self._batches = [tick.batch for tick in ticks]
        self._offsets = [tick.offset for tick in ticks]
        self._began, self._is_imported = summary.began, summary.is_imported
        self._lock = threading.Lock()
        self._read: list[_Place] = []
        self._requested: OrderedDict[_Place, None] = OrderedDict()
        """The parts to read, the newest last: a zoom does not wait for the one before."""
        self._is_reading = False

    def request(self, x: Axis, first: float, last: float, rank: int = 0) -> None:
        """Read all events between two places of an axis into the view, in a thread, unless too many."""
        begin, end = self._view.batches_at(x, first, last)
        if not self._batches or begin >= self._batches[-1]:
            return
        offsets = self._offsets_around(begin, end)
        place = (*offsets, rank, self._view.drawn)
        with self._lock:
            is_read = any(
                one[0] <= place[0] and place[1] <= one[1] and one[2] == rank and one[3] >= place[3]
                for one in self._read
            )
            if is_read or offsets[1] - offsets[0] > MAX_BYTES:
                return
            self._requested[place] = None
            self._requested.move_to_end(place)
            if len(self._requested) > _REQUESTED_PARTS:
                self._requested.popitem(last=False)
            if not self._is_reading:
                self._is_reading = True
                threading.Thread(target=self._read_requested, name="offloop-zoom", daemon=True).start()

    def _offset(self, place: int) -> int:
        if place < 0:
            return 0
        return self._offsets[place] if place < len(self._offsets) else self._until

    def _offsets_around(self, begin: float, end: float) -> tuple[int, int]:
        first, last = bisect_right(self._batches, begin - SPEED_WINDOW) - 2, bisect_left(self._batches, end) + 1
        return self._offset(first), self._offset(last)

    def _read_part(self, place: _Place, is_requested: Callable[[], bool] = lambda: True) -> RunView:
        view = RunView(self._recording.run_name, self._recording.attempt, wants=place[3].__contains__)
        view.begin_within(self._began, self._is_imported)
        for batch in self._recording.part(*place[:3]):
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
            # Without the recording, the summary remains.
            with contextlib.suppress(OffloopError):
                found = self._read_part(place, partial(self._requested.__contains__, place))
                if place in self._requested:
                    self._view.refine(found)
            with self._lock:
                if place in self._requested:
                    del self._requested[place]
                    self._read.append(place)
