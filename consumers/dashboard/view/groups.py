"""Several runs as one: the mean, least and greatest value of a metric over them."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from offloop.consumers.dashboard.view.series import Axis, Parts, Series

if TYPE_CHECKING:
    from offloop.consumers.dashboard.view.series import Floats

PartsOf = Callable[[Series, "Floats", Axis], Parts]


class GroupPoints(NamedTuple):
    """The values of a group to draw: at each place those of its runs that come that far."""

    xs: "Floats"
    mean: "Floats"
    """Over the runs, each with its mean near the place; NaN where none has a value."""
    low: "Floats"
    """The least value of any of them there."""
    high: "Floats"
    """The greatest."""
    runs: "Floats"
    """The number of runs with a finite value there."""


def common_places(
    series: Sequence[Series], x: Axis, first: float | None = None, last: float | None = None, most: int = 256
) -> "Floats":
    """Places on an axis for all these series together, between ``first`` and ``last``: those where they have points, if
    these are not more than ``most``, else so many at equal distances."""
    import numpy as np

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


def group_points(series: Sequence[Series], places: "Floats", x: Axis, parts_of: PartsOf = Series.parts) -> GroupPoints:
    """The series of one group at those places."""
    import numpy as np

    nothing = np.full(len(places), np.nan)
    found = [Parts(nothing, nothing, nothing), *(parts_of(one, places, x) for one in series)]
    means = np.array([one.mean for one in found])
    count = np.isfinite(means).sum(axis=0)
    low, high = np.fmin.reduce([one.low for one in found]), np.fmax.reduce([one.high for one in found])
    # Divided first, and clipped: the sum of what is very large would be infinite, and rounding must not get beyond.
    mean = np.clip(np.nansum(means / np.maximum(count, 1), axis=0), low, high)
    return GroupPoints(places, np.where(count > 0, mean, np.nan), low, high, count.astype(float))
