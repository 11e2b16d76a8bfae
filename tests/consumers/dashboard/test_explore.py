"""What a browser is sent of all runs for a scatter plot or parallel coordinates."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offloop.bus.index.entry import MetricValues, RunEntry
from offloop.bus.index.table import RunTable
from offloop.consumers.dashboard.web import explore
from offloop.consumers.dashboard.web.explore import OTHERS, ExploreLook, explored
from offloop.consumers.dashboard.web.frames import look_in
from offloop.consumers.dashboard.web.home import TableLook

ACCURACY = "metrics/eval/accuracy"
SCATTER = ExploreLook("scatter")
PARALLEL = ExploreLook("parallel")


def entry(number: int, accuracy: float | None, **config: Any) -> RunEntry:
    metrics = {} if accuracy is None else {ACCURACY: MetricValues(accuracy, 1, accuracy, 1, accuracy, 1)}
    hyperparameters = {f"config/{name}": value for name, value in config.items()}
    started = float(number)
    return RunEntry(
        f"run-{number}", status="finished", started=started, hyperparameters=hyperparameters, metrics=metrics
    )


def sent(entries: list[RunEntry], look: ExploreLook) -> dict[str, Any]:
    table = RunTable({one.run: one for one in entries})
    frame = explored(table, entries, look, lambda run: run)
    return json.loads(json.dumps(frame, allow_nan=False))


def column_of(frame: dict[str, Any], name: str) -> dict[str, Any]:
    return next(column for column in frame["columns"] if column["name"] == name)


RATES = [
    entry(n, 0.1 * n, lr=10.0 ** -(n % 3), seed=n, width=32, optimizer="adam" if n % 2 else "sgd") for n in range(8)
]


def test_the_usual_axes_are_the_hyperparameters_that_differ_and_the_best_value_of_the_metric():
    scatter = sent(RATES, SCATTER)
    assert (scatter["x"], scatter["y"]) == ("config/lr", f"{ACCURACY}.best")
    assert scatter["color"] == "config/optimizer"
    assert {*sent(RATES, PARALLEL)["axes"]} == {"config/lr", "config/seed", "config/optimizer"}
    names = [entry(n, 0.1, name=f"text {n}", lr=n) for n in range(20)]
    assert sent(names, PARALLEL)["axes"] == ["config/lr"], "a text that is another one in each run is no axis"


def test_columns_are_those_that_are_asked_for_and_mistakes_are_said():
    look = ExploreLook("scatter", x="seed", y="nothing", color=explore.NO_COLOR)
    found = sent(RATES, look)
    assert (found["x"], found["y"], found["color"]) == ("config/seed", f"{ACCURACY}.best", "")
    assert "no run has 'nothing'" in found["problem"]
    found = sent(RATES, ExploreLook("parallel", y="accuracy", axes=("seed", "lr", "config/seed", "accuracy")))
    assert found["axes"] == ["config/seed", "config/lr"]
    assert [one["name"] for one in found["columns"]] == [ACCURACY, "config/seed", "config/lr"]


def test_values_are_numbers_or_texts_and_what_is_missing_or_not_finite_is_nothing():
    entries = [
        entry(0, math.nan, a=1, b="x", c=True, d=[1, 2]),
        entry(1, math.inf, a=10**400, b=2, c=False, d=[]),
        entry(2, 0.5, a=2.5, b=None, c=None, d="\x1b[31m" + "y" * 500),
        entry(3, None),
    ]
    frame = sent(entries, ExploreLook("parallel", y="accuracy", axes=("a", "b", "c", "d")))
    assert column_of(frame, ACCURACY)["values"] == [None, None, 0.5, None]
    assert column_of(frame, "config/a")["values"] == [1.0, None, 2.5, None]
    b, c, d = (column_of(frame, f"config/{name}") for name in "bcd")
    assert [None if at is None else b["texts"][at] for at in b["values"]] == ["x", "2", None, None]
    assert [None if at is None else c["texts"][at] for at in c["values"]] == ["true", "false", None, None]
    assert all(len(text) < 100 and text.isprintable() for text in d["texts"])


def test_texts_and_runs_are_bounded(monkeypatch: pytest.MonkeyPatch):
    entries = [entry(n, 0.1 * n, text="common" if n % 2 else f"text {n}") for n in range(200)]
    column = column_of(sent(entries, ExploreLook("scatter", x="text")), "config/text")
    assert len(column["texts"]) == 51
    assert column["texts"][-1] == OTHERS
    assert column["values"].count(column["texts"].index("common")) == 100
    assert column["values"].count(50) == 51
    monkeypatch.setattr(explore, "MOST_RUNS", 10)
    frame = sent(entries, SCATTER)
    assert (len(frame["runs"]), frame["found"]) == (10, 200)
    assert all(len(column["values"]) == 10 for column in frame["columns"])


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(
                st.sampled_from(["view", "x", "y", "color", "axes"]), inner | st.sampled_from(["scatter", "parallel"])
            )
        ),
        max_leaves=8,
    )
)
def test_a_browser_may_say_anything(told: Any):
    sent(RATES, look_in({"explore": told}, TableLook).explore or ExploreLook())
