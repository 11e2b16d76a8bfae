"""The mean and the range of several runs, against numpy."""

import math
import threading

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from offloop.consumers.dashboard.view.series import Clock, Series, common_places, group_points

ODD = [math.nan, math.inf, -math.inf]


def series_of(points: dict[float, float], clock: Clock | None = None) -> Series:
    made = Series("loss", clock or Clock(), threading.RLock())
    for step, value in points.items():
        made.append(step, value)
    return made


def grouped(*runs: dict[float, float], most: int = 256, **given_range: float):
    series = [series_of(run) for run in runs]
    return group_points(series, common_places(series, "batch", most=most, **given_range), "batch")


def test_other_axes_are_those_of_each_run():
    def clocked(batches: int, seconds_each: float) -> Series:
        clock = Clock()
        clock.extend(np.array([[step, 8 * step, step / 10, step * seconds_each] for step in range(batches)], float))
        return series_of({step: float(step) for step in range(batches)}, clock)

    series = [clocked(101, 1.0), clocked(101, 2.0)]
    places = common_places(series, "time")
    found = group_points(series, places, "time")
    at = found.xs.tolist().index(100.0)
    assert (found.low[at], found.high[at], found.runs[at]) == (50.0, 100.0, 2)
    assert found.runs[-1] == 1


values = st.one_of(st.floats(-1e6, 1e6), st.sampled_from(ODD))
runs = st.lists(st.dictionaries(st.integers(0, 300), values, max_size=60), min_size=1, max_size=6)


@settings(deadline=None)
@given(runs, st.sampled_from([8, 40, 1000]))
def test_means_and_ranges_are_those_that_are_computed_one_by_one(several, most):
    several = [dict(sorted(run.items())) for run in several]
    found = grouped(*several, most=most)
    xs = found.xs
    borders = [-math.inf, *((xs[1:] + xs[:-1]) / 2), math.inf]
    for place, x in enumerate(xs):
        means, lows, highs = [], [], []
        for run in several:
            steps = [step for step in run if borders[place] <= step < borders[place + 1]]
            if steps:
                near = [run[step] for step in steps if math.isfinite(run[step])]
            elif run and min(run) <= x <= max(run):
                before, after = max(step for step in run if step <= x), min(step for step in run if step >= x)
                ends = run[before], run[after]
                near = [np.interp(x, [before, after], ends)] if np.isfinite(ends).all() else []
            else:
                near = []
            if near:
                means.append(np.mean(near))
                lows.append(min(near))
                highs.append(max(near))
        assert found.runs[place] == len(means)
        if means:
            assert np.isclose(found.mean[place], np.mean(means), rtol=1e-9, atol=1e-6)
            assert np.isclose(found.low[place], min(lows), rtol=1e-9, atol=1e-6)
            assert np.isclose(found.high[place], max(highs), rtol=1e-9, atol=1e-6)
            assert found.low[place] <= found.mean[place] <= found.high[place]
        else:
            assert math.isnan(found.mean[place])
