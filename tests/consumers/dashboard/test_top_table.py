"""What the terminal shows of all runs, as text: for any runs and any size of a terminal."""

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from run_tables import ACCURACY, entry, table

from offloop.bus.index.annotations import Annotations
from offloop.bus.index.entry import unreadable_entry
from offloop.bus.index.table import RunTable
from offloop.consumers.dashboard.terminal.home import TableShown, table_frame


def text(runs: RunTable, shown: TableShown | None = None, width: int = 80, height: int = 24) -> str:
    return "\n".join(line.plain for line in table_frame(runs, shown or TableShown(), "runs", None, width, height))


def test_in_a_usual_terminal_state_and_measures_come_first_and_wider_ones_show_more():
    runs = table(
        *(
            entry(f"digits-{rate}-seed-{seed}", rate + seed / 10, hyperparameters={"config/lr": rate, "config/seed": 1})
            for rate in (0.1, 0.01)
            for seed in (1, 2)
        )
    )
    narrow = text(runs)
    first = next(line for line in narrow.splitlines() if "digits-0.1-seed-2" in line)
    assert "✓ finished" in first
    assert "0.3 *" in first, "the best of all"
    assert narrow.count("*") == 1
    assert "lr" in narrow
    assert "duration" not in narrow
    assert "duration" in text(runs, width=160)


def test_a_run_that_cannot_be_read_is_a_row_that_says_why():
    runs = table(entry("good"), unreadable_entry("bad", "run.json is damaged: because", Annotations()))
    shown = text(runs, TableShown(run="bad", place=1), width=100)
    assert "! unreadable" in next(line for line in shown.splitlines() if "▸ bad" in line)
    assert "run.json is damaged: because" in shown


def test_the_chosen_run_stays_chosen_when_others_come_and_its_neighbour_when_it_goes():
    shown = TableShown(run="b", place=1)
    two = (entry("a", started=3.0), entry("b", started=2.0), entry("c", started=1.0))
    assert "▸ b" in text(table(*two), shown)
    assert "▸ b" in text(table(entry("newer", started=9.0), *two), shown)
    assert "▸ c" in text(table(two[0], two[2]), shown) or "▸ a" in text(table(two[0], two[2]), shown)


@pytest.mark.parametrize("find", ["", "nothing like it"])
def test_an_empty_table_says_why(find: str):
    runs = table(entry("a")) if find else table()
    assert ("No run is found" if find else "There is no run yet") in text(runs, TableShown(find=find))


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 250),
    st.integers(1, 70),
    st.lists(st.text(min_size=1, max_size=30), max_size=8, unique=True),
    st.sampled_from(["-started", "run", f"-{ACCURACY}.best", "tags", "nothing"]),
    st.booleans(),
)
def test_any_names_fit_any_terminal(width: int, height: int, names: list[str], order: str, is_typing: bool) -> None:
    runs = table(
        *(
            entry(name, number / 7, tags=(name[:3],), note=name * 9, pinned=number == 1, error=name)
            for number, name in enumerate(names)
        )
    )
    shown = TableShown(sort=order, is_typing=is_typing, place=max(len(names) - 1, 0))
    lines = table_frame(runs, shown, "/a/b\x1b[2J", "reading 3 more ...", width, height)
    assert len(lines) == height
    for line in lines:
        assert cell_len(line.plain) <= width
        assert all(letter.isprintable() or unicodedata.category(letter) == "Zs" for letter in line.plain)
