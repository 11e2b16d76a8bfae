"""The table of all runs: which are found, in which order, and what its cells say."""

import math
import sys
from typing import Any

import pytest

from bus.index.entry import MetricValues, RunEntry
from consumers.dashboard.view.run_table import RunTable, progress_of, reached_text
from consumers.dashboard.web.home import TableLook, window

ACCURACY = "metrics/eval/accuracy"


def entry(name: str, accuracy: float = 0.5, **values: Any) -> RunEntry:
    """A run that began at ``started``, with an accuracy that was greatest before its end."""
    usual: dict[str, Any] = {
        **dict.fromkeys(("id", "error", "reason", "epoch", "batch", "sample", "planned")),
        "status": "finished",
        "started": 100.0,
        "ended": 200.0,
        "attempts": 1,
        "size": 2048,
        "tags": (),
        "note": "",
        "pinned": False,
        "archived": False,
        "hyperparameters": {},
    }
    metrics = {ACCURACY: MetricValues(accuracy / 2, 9, 0.0, 1, accuracy, 5)}
    return RunEntry(**{**usual, "run": name, "metrics": metrics, **values})


def table(*entries: RunEntry) -> RunTable:
    return RunTable({one.run: one for one in entries})


def names(of: RunTable, find: str = "", order: str = "-started", archived: bool = False) -> list[str]:
    return [one.run for one in of.choose(find, order, archived).entries]


def test_pinned_runs_come_first_in_any_order_and_archived_ones_only_when_asked_for():
    runs = table(
        entry("a", started=1.0),
        entry("b", started=2.0, pinned=True),
        entry("c", started=3.0, archived=True),
        entry("d"),
    )
    assert names(runs) == ["b", "d", "a"]
    assert names(runs, order="run") == ["b", "a", "d"]
    assert names(runs, archived=True) == ["b", "d", "c", "a"]
    assert names(runs, "archived") == names(runs, "archived == true") == ["c"]
    assert runs.choose("").archived == 1


@pytest.mark.parametrize(
    ("find", "found"),
    [
        ("lr > 0.01", ["high"]),
        ("lr <= 0.01 or tags == keep", ["low"]),
        ("HIGH", ["high"]),
        ("rate note", ["low"]),
        ("keep", ["low"]),
        # Words that are also what every run has, and those that are also names of hyperparameters.
        ("pinned", []),
        ("tags", ["low"]),
        ("lr", []),
        ("this and that", ["high"]),
        ("(", []),
    ],
)
def test_what_is_written_is_an_expression_or_words_in_names_tags_and_notes(find, found):
    runs = table(
        entry("low", hyperparameters={"config/lr": 0.001}, tags=("keep",), note="a note on this rate"),
        entry("high", hyperparameters={"config/lr": 0.1}, note="this and that"),
    )
    assert names(runs, find) == found
    assert runs.choose(find).error is None


def test_a_mistake_in_an_expression_is_said_in_words():
    chosen = table(entry("a")).choose("epoch >")
    assert chosen.entries == []
    assert "it ends where a value is expected" in str(chosen.error)


def test_an_order_by_what_no_run_has_any_more_is_that_of_time():
    runs = table(entry("a", started=1.0), entry("b", started=2.0))
    assert names(runs, order="-metrics/gone") == ["b", "a"]


def test_the_usual_columns_are_those_in_which_runs_differ_and_what_they_are_measured_by():
    runs = table(
        entry("a", hyperparameters={"config/lr": 0.1, "lr": 0.1, "config/width": 8, "git/commit": "1"}),
        entry("b", hyperparameters={"config/lr": 0.2, "lr": 0.2, "config/width": 8, "git/commit": "2"}),
    )
    assert runs.usual_columns[4:-2] == ("config/lr", f"{ACCURACY}.best")
    titles = [(column.title, column.which) for column in runs.columns(None)]
    assert ("lr", "") in titles
    assert ("accuracy", "best") in titles


def test_names_of_columns_that_no_run_has_are_left_out_and_equal_titles_are_written_out():
    runs = table(entry("a", hyperparameters={"config/lr": 1, "a_rather_long_prefix/lr": 2}))
    columns = runs.columns(["config/lr", "nonsense", "a_rather_long_prefix/lr", "config/lr"])
    assert [column.title for column in columns] == ["config/lr", "a_rather_long_prefix/lr"]


def test_the_best_of_a_column_is_that_of_the_runs_that_are_found():
    runs = table(entry("a", 0.5), entry("b", 0.9), entry("c", math.nan), entry("d", 0.7, archived=True))
    column = runs.column(f"{ACCURACY}.best")
    assert runs.choose("").best(column) == "b"
    assert runs.choose("a").best(column) is None, "there is nothing to compare it with"


def test_a_later_table_knows_columns_that_come_with_later_runs():
    before = table(entry("a"))
    same = RunTable(before.entries, before)
    assert same.names is before.names
    later = RunTable({**before.entries, "b": entry("b", hyperparameters={"config/lr": 1})}, before)
    assert names(later, "lr == 1") == ["b"]


@pytest.mark.parametrize(
    ("values", "text", "part"),
    [
        ({}, "", None),
        ({"batch": 1200}, "batch 1,200", None),
        ({"epoch": 3, "batch": 40, "planned": "10ep", "status": "live"}, "epoch 3 of 10", 0.3),
        ({"epoch": 3, "batch": 40, "planned": "10ep"}, "epoch 3 of 10", None),
        ({"epoch": 3, "batch": 40, "planned": "1h", "status": "live"}, "batch 40", None),
        ({"batch": 40, "planned": "nonsense", "status": "live"}, "batch 40", None),
    ],
)
def test_how_far_a_run_is(values, text, part):
    one = entry("a", **values)
    assert reached_text(one) == text
    assert progress_of(one) == part


def test_a_window_has_the_rows_that_can_be_seen_and_never_more():
    runs = table(*(entry(f"run-{number:03}") for number in range(300)))
    shown = window(runs, TableLook(sort="run", first=100, count=40))
    assert [row["run"] for row in shown["rows"]] == [f"run-{number:03}" for number in range(100, 140)]
    at_the_end = window(runs, TableLook(sort="run", first=10_000, count=40))
    assert (at_the_end["first"], len(at_the_end["rows"])) == (260, 40)


def test_text_of_runs_cannot_turn_or_hide_what_stands_around_it():
    odd = entry("a\u202eb\x1b", hyperparameters={"config/text": "\u202e"}, error="one\ntwo")
    shown = window(table(odd), TableLook(columns=("config/text", "error")))
    (row,) = shown["rows"]
    assert (row["label"], row["cells"]) == ("a\\u202eb\\x1b", ["\\u202e", "one two"])
    assert row["why"] == "one two"


@pytest.mark.skipif(sys.platform == "darwin", reason="names of files are UTF-8 there")
def test_a_name_that_is_not_utf8_is_written_out():
    (row,) = window(table(entry("a\udcff")), TableLook())["rows"]
    assert row["run"].encode() == b"a\\udcff"


@pytest.mark.parametrize("told", [None, [], "x", {"find": 1, "sort": [], "columns": "x", "first": "1", "count": None}])
def test_what_a_browser_tells_in_another_form_is_as_by_default(told):
    assert TableLook.from_browser(told).find == ""
    assert TableLook.from_browser(told).sort == "-started"
    assert TableLook.from_browser(told).columns is None


def test_a_browser_cannot_ask_for_more_than_a_window():
    asked = TableLook.from_browser({"first": -5, "count": 10**9, "columns": ["a", 1] * 1000})
    assert (asked.first, asked.count) == (0, 400)
    assert len(asked.columns or ()) == 40
