"""Several runs as one: the mean of a metric over them, and its least and greatest value."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from offloop.consumers.dashboard.view.series import Axis, Parts, Series

if TYPE_CHECKING:
    from offloop.consumers.dashboard.view.series import Floats

PartsOf = Callable[[Series, "Floats", Axis], Parts]

_STEPS = (1.0, 2.0, 5.0, 10.0)


class GroupPoints(NamedTuple):
    """What is to be drawn of a group: at each place what those of its runs have that come that far."""

    xs: "Floats"
    mean: "Floats"
    """Over the runs, each with the mean of what it has near the place; NaN where none has anything."""
    low: "Floats"
    """The least value of any of them there."""
    high: "Floats"
    """The greatest."""
    runs: "Floats"
    """How many have a finite value there."""


def common_places(
    series: Sequence[Series], x: Axis, first: float | None = None, last: float | None = None, most: int = 256
) -> "Floats":
    """Places on an axis for all these series together, between ``first`` and ``last``: those where they have points, if
    these are not more than ``most``, else about so many at round places."""
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
    rough = (high - low) / max(most - 2, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * one for one in _STEPS if power * one >= rough * (1 - 1e-9))
    places = np.arange(math.floor(low / step), math.ceil(high / step) + 1) * step
    # The ends are where the lines end.
    inside = places[(places > low) & (places < high)]
    return np.concatenate([[low], inside, [high]])


def group_points(series: Sequence[Series], places: "Floats", x: Axis, parts_of: PartsOf = Series.parts) -> GroupPoints:
    """The series of one group at those places."""
    import numpy as np

    found = [parts_of(one, places, x) for one in series]
    if not found or not len(places):
        nothing = np.full(len(places), np.nan)
        return GroupPoints(places, nothing, nothing, nothing, np.zeros(len(places)))
    means = np.array([one.mean for one in found])
    has = np.isfinite(means)
    count = has.sum(axis=0)
    low = np.where(has, [one.low for one in found], np.inf).min(axis=0)
    high = np.where(has, [one.high for one in found], -np.inf).max(axis=0)
    mean = (np.where(has, means, 0.0) / np.maximum(count, 1)).sum(axis=0)
    is_there = count > 0
    return GroupPoints(
        places,
        np.where(is_there, np.clip(mean, low, high), np.nan),
        np.where(is_there, low, np.nan),
        np.where(is_there, high, np.nan),
        count.astype(float),
    )
