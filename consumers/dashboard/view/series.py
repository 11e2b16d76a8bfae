"""The values of a metric over the training: small in memory, quick to draw at any width."""

import threading
from array import array
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from offloop.bus.errors import ConfigurationError
from offloop.consumers.api.optional import np

Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"
Indices: TypeAlias = "np.ndarray[Any, np.dtype[np.intp]]"

Axis: TypeAlias = Literal["batch", "sample", "epoch", "time"]
"""Batches, samples and epochs trained, or seconds since the run's start."""

_COLUMN_OF_AXIS = {"batch": 0, "sample": 1, "epoch": 2, "time": 3}
_THINNED_TOGETHER = 16
_FIRST_ROOM = 64
_MANY = 4  # fewer buckets are computed one by one


class Points(NamedTuple):
    xs: Floats
    ys: Floats  # as they were logged, with NaN and infinities

    @property
    def not_finite(self) -> list[tuple[float, float]]:
        odd = ~np.isfinite(self.ys)
        return list(zip(self.xs[odd].tolist(), self.ys[odd].tolist(), strict=True))


class Parts(NamedTuple):
    mean: Floats
    low: Floats
    high: Floats


class NumericTable:
    """Rows of numbers that grow at the end, at 8 bytes a number.

    New numbers are gathered by column, which costs some 30 nanoseconds each, and moved in many rows at a time."""

    def __init__(self, width: int) -> None:
        self._rows: Floats = np.empty((_FIRST_ROOM, width), order="F")
        self._count = 0
        self._gathered = [array("d") for _ in range(width)]
        self.appends: list[Callable[[float], None]] = [column.append for column in self._gathered]
        """A function of each column that adds a number. Calling all of them adds a row."""

    def __len__(self) -> int:
        return self._count + self.gathered

    @property
    def gathered(self) -> int:
        return len(self._gathered[-1])

    def rows(self) -> Floats:
        """Return a view that is valid until the table changes."""
        if self.gathered:
            self.extend(self.take_gathered())
        return self._rows[: self._count]

    def settled(self) -> Floats:
        return self._rows[: self._count]

    def take_gathered(self) -> Floats:
        rows = np.column_stack([np.frombuffer(column) for column in self._gathered])
        for column in self._gathered:
            del column[:]
        return rows

    def extend(self, rows: Floats, place: int | None = None) -> None:
        begin = self._count if place is None else place
        end = begin + len(rows)
        if end > len(self._rows):
            grown = np.empty((max(end, 2 * len(self._rows)), self._rows.shape[1]), order="F")
            grown[:begin] = self._rows[:begin]
            self._rows = grown
        self._rows[begin:end] = rows
        self._count = end

    def replace(self, rows: Floats) -> None:
        self._rows, self._count = rows.copy(order="F"), len(rows)

    def limit(self, most: int) -> None:
        """Drop every second row, but not the last one, when there are more than ``most``."""
        if len(self) > most:
            rows = self.rows()
            self.replace(np.concatenate([rows[:-1:2], rows[-1:]]))

    def replace_part(self, rows: Floats) -> None:
        """In a table ordered by its first column, replace the rows from the first to the last of these."""
        own = self.rows()
        begin, end = own[:, 0].searchsorted(rows[0, 0], "left"), own[:, 0].searchsorted(rows[-1, 0], "right")
        self.replace(np.concatenate([own[:begin], rows, own[end:]]))


class Clock(NumericTable):
    """Batches, samples, epochs and seconds since the run's start: a row for each batch.

    Beyond a million rows it drops every second one; places between two rows are interpolated."""

    MAX_ROWS = 1 << 20

    def __init__(self) -> None:
        super().__init__(len(_COLUMN_OF_AXIS))

    def add(self, rows: Floats) -> None:
        self.extend(rows)
        self.limit(self.MAX_ROWS)

    def refine(self, other: "Clock") -> None:
        if len(other):
            self.replace_part(other.rows())
            self.limit(self.MAX_ROWS)

    def read(self, steps: Floats, axis: Axis) -> Floats:
        rows, column = self.rows(), _column_of(axis)
        return np.interp(steps, rows[:, 0], rows[:, column]) if column and len(rows) else steps

    @property
    def reached(self) -> float:
        """The last known batch; below zero before the first."""
        rows = self.rows()
        return float(rows[-1, 0]) if len(rows) else -1.0

    def places(self, batches: Sequence[float], axis: Axis) -> list[float]:
        return list(self.read(np.array(batches, dtype=np.float64), axis).tolist())

    def steps_at(self, xs: Floats, axis: Axis) -> Floats:
        """Return the batches at places of an axis; infinite beyond its ends."""
        rows, column = self.rows(), _column_of(axis)
        if not column or not len(rows):
            return xs
        return np.interp(xs, rows[:, column], rows[:, 0], left=-np.inf, right=np.inf)


class Series:
    """One metric: a value for each step, in the order of the steps; of several values for a step the last one.

    It may be read from any thread, under the lock that it shares with its view. ``before_reading`` adds pending values.
    Callers of the methods that change it hold the lock."""

    def __init__(
        self, name: str, clock: Clock, lock: "threading.RLock", before_reading: Callable[[], object] = lambda: None
    ) -> None:
        self.name = name
        self._before_reading = before_reading
        self._clock = clock
        self._lock = lock
        self._table = NumericTable(2)
        add_step, add_value = self._table.appends
        self.append_step: Callable[[float], None] = add_step
        self.append_value: Callable[[float], None] = add_value
        """Add the step and the value of a point, the value first, which may be refused. Steps come in any order."""
        self._taken = 0

    def __len__(self) -> int:
        with self._lock:
            return len(self._read())

    @property
    def version(self) -> int:
        with self._lock:
            self._before_reading()
            return self._taken + self._table.gathered

    @property
    def last(self) -> float | None:
        with self._lock:
            rows = self._read()
            return float(rows[-1, 1]) if len(rows) else None

    def at(self, step: float) -> float | None:
        with self._lock:
            rows = self._read()
            place = int(np.searchsorted(rows[:, 0], step))
            return float(rows[place, 1]) if place < len(rows) and rows[place, 0] == step else None

    def points(
        self, x: Axis = "batch", first: float | None = None, last: float | None = None, width: int = 1000
    ) -> Points:
        """Return points to draw between ``first`` and ``last`` on an axis, with one more at either side for the lines.

        Of more than ``width`` points, each ``width``-th part of the axis keeps its first, last, least and greatest
        point, and one of each of NaN, infinity and minus infinity. Raises ConfigurationError for an unknown axis."""
        with self._lock:
            rows, clock = self._read(), self._clock
            steps, values = rows[:, 0], rows[:, 1]
            borders = np.array([-np.inf if first is None else first, np.inf if last is None else last])
            low, high = clock.steps_at(borders, x)
            begin = max(int(steps.searchsorted(low, "left")) - 1, 0)
            end = int(steps.searchsorted(high, "right")) + 1
            steps, values = steps[begin:end], values[begin:end]
            if len(steps) <= width:
                return Points(clock.read(steps, x).copy(), values.copy())
            left, right = clock.read(steps[[0, -1]], x).tolist()
            edges = np.linspace(left, right, width + 1)[1:-1]
            starts = steps.searchsorted(clock.steps_at(edges, x), "left")
            kept = kept_points(values, np.unique(np.concatenate([[0], starts[starts < len(steps)]])))
            return Points(clock.read(steps[kept], x), values[kept])

    def span(self, x: Axis = "batch") -> tuple[float, float] | None:
        with self._lock:
            rows = self._read()
            if not len(rows):
                return None
            first, last = self._clock.read(rows[[0, -1], 0], x).tolist()
            return first, last

    def parts(self, places: Floats, x: Axis = "batch") -> Parts:
        """Return the values at ordered places: of the nearest points, else on the line between two finite points."""
        with self._lock:
            rows, clock = self._read(), self._clock
            steps, values = rows[:, 0], rows[:, 1]
            if not len(places) or not len(steps):
                return Parts(*(np.full(len(places), np.nan) for _ in Parts._fields))
            half = (places[-1] - places[-2]) / 2 if len(places) > 1 else np.inf
            inner = clock.steps_at((places[1:] + places[:-1]) / 2, x)  # the clock has no places beyond its ends
            first, last = clock.steps_at(np.array([places[0] - half, places[-1] + half]), x)
            starts = np.concatenate([steps.searchsorted([first]), steps.searchsorted(inner)])
            ends = np.concatenate([steps.searchsorted(inner), steps.searchsorted([last], "right")])
            found = binned(values, starts, np.maximum(ends, starts))
            empty = np.flatnonzero(ends <= starts)
            between = np.interp(clock.steps_at(places[empty], x), steps, values, left=np.nan, right=np.nan)
            for filled in found:
                filled[empty] = np.where(np.isfinite(between), between, np.nan)
            return found

    def _read(self) -> Floats:
        self._before_reading()
        return self.settle()

    def settle(self) -> Floats:
        if self._table.gathered:
            self.extend(self._table.take_gathered())
        return self._table.settled()

    def append(self, step: float, value: float) -> None:
        self.append_value(value)
        self.append_step(step)

    def extend(self, points: Floats) -> None:
        self._taken += len(points)
        settled, steps = self._table.settled(), points[:, 0]
        place = len(settled)
        if not (np.all(steps[1:] > steps[:-1]) and (not place or steps[0] > settled[-1, 0])):
            place = int(settled[:, 0].searchsorted(steps.min(), "left"))
            points = np.concatenate([settled[place:], points])
            points = points[np.argsort(points[:, 0], kind="stable")]
            points = points[np.flatnonzero(np.diff(points[:, 0], append=np.inf))]  # of equal steps the last row
        self._table.extend(points, place)

    def refine(self, other: "Series") -> None:
        rows = other.settle()
        if len(rows):
            self.settle()
            self._taken += len(rows)
            self._table.replace_part(rows)

    def thin(self) -> None:
        """Drop points: each group of 16 keeps its first, last, least and greatest, and values that are not finite."""
        rows = self.settle()
        starts = np.arange(0, len(rows), _THINNED_TOGETHER)
        self._table.replace(rows[kept_points(rows[:, 1], starts)])


def kept_points(values: Floats, starts: "Indices") -> "Indices":
    """Return the points that stand for all, in buckets that begin at ``starts``.

    Of each bucket the first, last, least and greatest, and the first of each of NaN, infinity and minus infinity."""
    ends = np.append(starts[1:], len(values))
    kept = [starts, ends - 1]
    if np.isfinite(values).all():
        low = high = values
    else:
        finite = np.isfinite(values)
        low, high = np.where(finite, values, np.inf), np.where(finite, values, -np.inf)
        for odd in (np.isnan(values), values == np.inf, values == -np.inf):
            places = np.flatnonzero(odd)
            _, first = np.unique(starts.searchsorted(places, "right"), return_index=True)
            kept.append(places[first])
    size = int(ends[0] - starts[0])  # buckets of one size, often very many, are computed together
    same = 0 if len(starts) < _MANY else int(np.argmin(np.append(ends - starts == size, False)))
    kept.append(starts[:same] + low[: same * size].reshape(same, size).argmin(axis=1))
    kept.append(starts[:same] + high[: same * size].reshape(same, size).argmax(axis=1))
    buckets = list(zip(starts[same:].tolist(), ends[same:].tolist(), strict=True))
    kept.append(np.array([begin + low[begin:end].argmin() for begin, end in buckets], dtype=np.intp))
    kept.append(np.array([begin + high[begin:end].argmax() for begin, end in buckets], dtype=np.intp))
    chosen = np.zeros(len(values), dtype=bool)
    chosen[np.concatenate(kept)] = True
    return np.flatnonzero(chosen)


def binned(values: Floats, starts: "Indices", ends: "Indices") -> Parts:
    """Return the mean, least and greatest of the finite values in consecutive ranges; NaN without any."""
    found = Parts(*(np.full(len(starts), np.nan) for _ in Parts._fields))
    filled = np.flatnonzero(ends > starts)
    if not len(filled):
        return found
    begin, end = int(starts[filled[0]]), int(ends[filled[-1]])
    inside, places = values[begin:end], starts[filled] - begin
    finite = np.isfinite(inside)
    counts = np.add.reduceat(finite.astype(np.intp), places)
    has = counts > 0
    sizes = np.diff(np.append(places, len(inside)))
    # Divided first: the sum of very large values would be infinite.
    shares = np.where(finite, inside, 0.0) / np.repeat(np.maximum(counts, 1), sizes)
    low = np.minimum.reduceat(np.where(finite, inside, np.inf), places)[has]
    high = np.maximum.reduceat(np.where(finite, inside, -np.inf), places)[has]
    found.low[filled[has]], found.high[filled[has]] = low, high
    # Rounding must not leave the range.
    found.mean[filled[has]] = np.clip(np.add.reduceat(shares, places)[has], low, high)
    return found


def _column_of(axis: Axis) -> int:
    if axis not in _COLUMN_OF_AXIS:
        raise ConfigurationError(f"axis {axis!r} is not known: use {', '.join(get_args(Axis))}")
    return _COLUMN_OF_AXIS[axis]


PartsOf: TypeAlias = Callable[[Series, Floats, Axis], Parts]


class GroupPoints(NamedTuple):
    xs: Floats
    mean: Floats  # mean over the runs of their means near the place; NaN without a value
    low: Floats  # the least value of any run there
    high: Floats  # the greatest
    runs: Floats  # the number of runs with a finite value there


def common_places(
    series: Sequence[Series], x: Axis, first: float | None = None, last: float | None = None, most: int = 256
) -> Floats:
    """Return common places on an axis for several series, between ``first`` and ``last``.

    The places of their points, or ``most`` at equal distances if those are more."""
    spans = [span for span in (one.span(x) for one in series) if span is not None]
    if not spans:
        return np.empty(0)
    low, high = min(span[0] for span in spans), max(span[1] for span in spans)
    low = low if first is None else max(low, first)
    high = high if last is None else min(high, last)
    if high < low:
        return np.empty(0)
    if all(len(one) <= most for one in series):
        every = np.unique(np.concatenate([one.points(x, first, last, most).xs for one in series]))
        every = every[(every >= low) & (every <= high)]
        if len(every) <= most:
            return every
    return np.linspace(low, high, most)


def group_points(series: Sequence[Series], places: Floats, x: Axis, parts_of: "PartsOf" = Series.parts) -> GroupPoints:
    nothing = np.full(len(places), np.nan)
    found = [Parts(nothing, nothing, nothing), *(parts_of(one, places, x) for one in series)]
    means = np.array([one.mean for one in found])
    count = np.isfinite(means).sum(axis=0)
    low, high = np.fmin.reduce([one.low for one in found]), np.fmax.reduce([one.high for one in found])
    # Divided first, and clipped: the sum of very large values would be infinite, and rounding must not leave the range.
    mean = np.clip(np.nansum(means / np.maximum(count, 1), axis=0), low, high)
    return GroupPoints(places, np.where(count > 0, mean, np.nan), low, high, count.astype(float))
