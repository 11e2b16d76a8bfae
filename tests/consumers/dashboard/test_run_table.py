"""The table of all runs as a browser gets it: its rows, and what it may ask for."""

import math
import sys
from typing import Any

import pytest
from run_tables import ACCURACY, entry, table

from offloop.bus.index.annotations import Annotations
from offloop.bus.index.entry import RunEntry, unreadable_entry
from offloop.consumers.dashboard.web.home import CompareLook, TableLook, window
from offloop.consumers.runner.places import FolderRuns


def test_a_window_has_the_rows_that_can_be_seen_and_never_more():
    runs = table(*(entry(f"run-{number:03}") for number in range(300)))
    shown = window(runs, TableLook(sort="run", first=100, count=40))
    assert [row["run"] for row in shown["rows"]] == [f"run-{number:03}" for number in range(100, 140)]
    at_the_end = window(runs, TableLook(sort="run", first=10_000, count=40))
    assert (at_the_end["first"], len(at_the_end["rows"])) == (260, 40)


def test_a_run_that_cannot_be_read_is_the_last_row_and_says_why():
    bad = unreadable_entry("bad", "run.json is\ndamaged", Annotations(tags=("a",)))
    runs = table(bad, entry("good"))
    for order in ("-started", "started", "-duration", ACCURACY, "size"):
        assert sorted(row["run"] for row in window(runs, TableLook(sort=order))["rows"]) == ["bad", "good"]
    *_, row = window(runs, TableLook())["rows"]
    assert (row["run"], row["status"], row["why"], row["tags"]) == ("bad", "unreadable", "run.json is damaged", ["a"])


@pytest.mark.skipif(sys.platform == "darwin", reason="names of files are UTF-8 there")
def test_a_name_that_is_not_utf8_is_written_out():
    (row,) = window(table(entry("a\udcff")), TableLook())["rows"]
    assert row["run"].encode() == b"a\\udcff"


def rated(name: str, lr: float | None, accuracy: float, **values: Any) -> RunEntry:
    return entry(name, accuracy, hyperparameters={} if lr is None else {"config/lr": lr}, **values)


RATED = (
    rated("a", 0.1, 0.5, started=1.0),
    rated("b", 0.1, 0.7, started=2.0),
    rated("c", 0.01, 0.9, started=3.0, status="failed"),
    rated("d", None, 0.99, started=4.0),
    rated("e", 0.1, math.nan, started=5.0),
)


def lines(first: int = 0, count: int = 50, sort: str = "-started", **compare: Any) -> list[str]:
    look = TableLook(sort=sort, first=first, count=count, compare=CompareLook(group="lr", **compare))
    return [row["run"] if "run" in row else f"[{row['group']}]" for row in window(table(*RATED), look)["rows"]]


def test_runs_are_grouped_in_the_order_of_the_table_and_those_without_a_value_are_the_last_group():
    assert lines() == ["[0.1]", "e", "b", "a", "[0.01]", "c", "[]", "d"]
    assert lines(sort="started") == ["[0.1]", "a", "b", "e", "[0.01]", "c", "[]", "d"]
    # By the means of 0.6 and 0.9, and not by single runs.
    assert lines(sort="-accuracy.best")[0] == "[0.01]"
    assert lines(sort="accuracy.best")[0] == "[0.1]"


def test_groups_are_closed_and_scrolled_through():
    assert lines(toggled=frozenset({"0.1"})) == ["[0.1]", "[0.01]", "c", "[]", "d"]
    assert lines(folded=True) == ["[0.1]", "[0.01]", "[]"]
    assert lines(folded=True, toggled=frozenset({""})) == ["[0.1]", "[0.01]", "[]", "d"]
    whole = lines()
    for first in range(len(whole)):
        for count in range(1, len(whole) - first + 1):
            assert lines(first, count) == whole[first : first + count]
    sent = window(table(*RATED), TableLook(first=1000, count=3, compare=CompareLook(group="lr")))
    assert (sent["lines"], sent["found"], sent["first"]) == (8, 5, 5)


def test_runs_are_compared_with_a_baseline():
    columns = ("accuracy.best", "accuracy.min", "lr")
    look = TableLook(sort="run", columns=columns, compare=CompareLook(baseline="a"))
    sent = window(table(*RATED), look)
    assert sent["baseline"] == {"label": "a", "isThere": True}
    of = {row["run"]: row for row in sent["rows"]}
    assert [of[name]["isBaseline"] for name in "ab"] == [True, False]
    assert of["a"]["cells"][0] == {"text": "0.5", "best": False}
    assert of["b"]["cells"][0] == {"text": "0.7", "best": False, "difference": "+0.2", "judged": "better"}
    assert of["b"]["cells"][1]["difference"] == "±0"
    assert not of["e"]["cells"][0].get("difference")
    assert [of[name]["cells"][2]["differs"] for name in "abc"] == [False, False, True]
    gone = window(table(*RATED), TableLook(compare=CompareLook(baseline="x", group="no such")))
    assert gone["baseline"] == {"label": "x", "isThere": False}
    assert len(gone["rows"]) == 5


def test_only_a_run_of_the_folder_is_shown_by_its_name(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "run.json").touch()
    place = FolderRuns(tmp_path)
    assert place.has("one")
    for name in ("", ".", "..", "two", str(tmp_path / "one"), f"../{tmp_path.name}/one", "one\0"):
        assert not place.has(name), name
