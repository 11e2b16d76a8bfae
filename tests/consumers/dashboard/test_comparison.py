"""Runs of a page in groups, and beside a baseline, without a browser."""

from offloop.consumers.api.logger import Row
from offloop.consumers.dashboard.view.run_view import RunView, labels_of
from offloop.consumers.dashboard.web.charts import Chart, Lines, Look
from offloop.consumers.dashboard.web.comparison import Compared, Comparison
from offloop.consumers.dashboard.web.frames import look_in

LOSS = {"loss": Chart("loss", "metric", "loss")}
LOOK = Look("batch", None, {"loss": 400})


def run(name: str, values: list[float] = (), **config: object) -> RunView:  # type: ignore[assignment]
    made = RunView(name)
    made.log_hyperparameters({f"config/{key}": value for key, value in config.items()})
    made.log_rows([Row(step, 0.0, {"loss": value}) for step, value in enumerate(values)])
    return made


def compared(runs: list[RunView], *hidden: int, tags=None, **asked: object) -> Compared:
    return Compared(look_in(asked, Comparison), runs, labels_of(runs), hidden, lambda run: (tags or {})[run.run_name])


def labels(found: Compared) -> list[str]:
    return [line["label"] for line in found.lines()]


def test_runs_with_the_same_value_are_a_group_in_the_order_of_values():
    runs = [run("a", lr=0.1), run("b", lr=0.02), run("c", lr=0.1), run("d", lr="auto"), run("e")]
    assert labels(compared(runs, group="config/lr")) == [
        "lr = 0.02 · 1 run",
        "lr = 0.1 · 2 runs",
        "lr = auto · 1 run",
        "no lr · 1 run",
    ]
    assert compared(runs, group="lr").column == "config/lr", "the end of the name is enough"
    assert labels(compared(runs, 0, 1, group="lr"))[0] == "lr = 0.1 · 1 run", "hidden runs are left out"
    assert labels(compared(runs, group="nothing of that name")) == ["a", "b", "c", "d", "e"]


def test_status_and_tags_group_too_and_only_what_differs_is_offered():
    runs = [run("a", lr=0.1, depth=3), run("b", lr=0.2, depth=3), run("c", lr=0.2, depth=3)]
    assert compared(runs).columns() == ["config/lr", "status", "tags"]
    assert labels(compared(runs, group="status")) == ["status = waiting · 3 runs"]
    tags = {"a": ("old",), "b": ("new", "good"), "c": ("good", "new")}
    assert labels(compared(runs, group="tags", tags=tags)) == ["tags = good, new · 2 runs", "tags = old · 1 run"]


def test_a_browser_is_sent_means_and_ranges_and_single_runs_only_if_it_wants_them():
    runs = [run("a", [1.0, 2.0], lr=1), run("b", [3.0, 6.0], lr=1), run("c", [5.0], lr=2)]
    lines = Lines()
    first = lines.news(LOSS, runs, LOOK, compared(runs, group="lr"))
    by_id = {line["r"]: line for line in first}
    assert list(by_id) == ["group lr = 1", "group lr = 2"]
    mean = by_id["group lr = 1"]
    assert [list(mean[key]) for key in ("x", "y", "low", "high", "count")] == [[0, 1], [2, 4], [1, 2], [3, 6], [2, 2]]
    assert not lines.news(LOSS, runs, LOOK, compared(runs, group="lr")), "nothing is new"
    runs[0].log_rows([Row(1, 0.0, {"loss": 0.0})])
    again = lines.news(LOSS, runs, LOOK, compared(runs, group="lr"))
    assert [list(line["y"]) for line in again if line["r"] == "group lr = 1"] == [[2, 3]]
    with_singles = lines.news(LOSS, runs, LOOK, compared(runs, group="lr", singles=True))
    assert [line["r"] for line in with_singles] == [0, 1, 2]


def test_a_baseline_has_a_line_of_its_own_and_all_else_is_compared_with_it():
    runs = [run("a", [2.0], lr=1), run("b", [1.0], lr=2), run("c", [1.5], lr=2)]
    plain = compared(runs, baseline="b")
    assert [line["id"] for line in plain.lines() if line.get("baseline")] == [1]
    values = {number: one.series("loss").last for number, one in enumerate(runs)}
    assert plain.latest("loss", values, ()) == {
        "0": {"last": "2", "apart": "+1", "sense": "worse"},
        "1": {"last": "1", "apart": "", "sense": ""},
        "2": {"last": "1.5", "apart": "+0.5", "sense": "worse"},
    }
    grouped = compared(runs, baseline="b", group="lr")
    assert grouped.lines()[-1]["label"] == "b"
    assert grouped.latest("loss", values, ())["group lr = 2"]["apart"] == "+0.25"
    assert compared(runs, baseline="gone").baseline is None
