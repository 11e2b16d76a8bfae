"""The best, least and greatest values of the metrics that a browser shows."""

from collections.abc import Mapping, Sequence
from typing import Any

from offloop.bus.types.metrics import direction_of, goals_in
from offloop.consumers.dashboard.view.tap import MonitoredRun
from offloop.consumers.dashboard.web.charts import Chart, Look
from offloop.consumers.dashboard.web.units import value_text

_DECIMALS = 4


def extremes_of(charts: Mapping[str, Chart], runs: Sequence[MonitoredRun], look: Look) -> dict[str, dict[str, Any]]:
    """Of each chart of a metric that can be seen which of the two is the best value, if one is, and of each run both:
    text and place on the axis."""
    found: dict[str, dict[str, Any]] = {}
    goals = goals_in(run.view.hyperparameters for run in runs)
    for name in look.visible:
        chart = charts.get(name)
        if chart is None or chart.kind != "metric":
            continue
        of_runs = {}
        for number, run in enumerate(runs):
            try:
                extremes = run.view.series(name).extremes(look.x)
            except KeyError:
                continue
            if extremes is not None:
                of_runs[number] = {
                    "min": [value_text(extremes.low, chart.scale), round(extremes.low_at, _DECIMALS)],
                    "max": [value_text(extremes.high, chart.scale), round(extremes.high_at, _DECIMALS)],
                }
        found[name] = {"best": direction_of(name, goals), "runs": of_runs}
    return found
