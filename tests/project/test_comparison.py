"""The page that shows offloop beside other tools: its generated part, from what the benchmark has measured."""

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import comparison
import pytest
from paths import ROOT

MEASURED: dict[str, Any] = {
    "machine": "2 cores (a <processor>)",
    "date": "2026-11-22",
    "tools": {
        "PyTorch loop": {
            "versions": "torch 2.13.0",
            "cells": {
                "tiny": {"value": 1.004},
                "slow": {"value": 0.25},
                "disk": {"text": "no change"},
                "memory": {"value": -0.3},
                "hang": {"none": "no server"},
            },
        },
        "W&B, offline": {
            "versions": "wandb 0.31.0",
            "cells": {
                "tiny": {"value": 0.913},
                "hang": {"text": "waits before the first step: no | figure, *only* <b>this</b>\nand more"},
                "slow": {"none": "no callbacks"},
            },
        },
        "Aim": {"cells": {}, "failed": "did not install: `no` wheel"},
    },
}


def rows(text: str) -> list[list[str]]:
    """The cells of the table's lines. A bar within a cell is escaped."""
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in text.splitlines() if line[:1] == "|"
    ]


def test_the_table_has_every_tool_with_figures_texts_and_reasons() -> None:
    text = comparison.table(MEASURED)
    head, _, *lines = rows(text)
    assert head == ["", "tiny MLP", "MB added", "50 ms callback", "server hangs", "disk full"]
    by_name = {name: cells for name, *cells in lines}
    assert list(by_name) == list(MEASURED["tools"])
    assert by_name["PyTorch loop"] == ["1.00", "0", "0.25", "n/a<sup>1</sup>", "no change"]
    assert by_name["W&B, offline"] == [
        "0.91",
        "n/a<sup>2</sup>",
        "n/a<sup>3</sup>",
        "waits before the first step<sup>4</sup>",
        "n/a<sup>2</sup>",
    ]
    assert by_name["Aim"] == ["n/a<sup>5</sup>"] * 5
    notes = text.split("\n\n", 1)[1].splitlines()
    assert notes == [
        "1. no server",
        "2. not measured",
        "3. no callbacks",
        r"4. no \| figure, \*only\* &lt;b&gt;this&lt;/b&gt; and more",
        r"5. did not install: \`no\` wheel",
    ]


def test_the_picture_is_an_svg_with_a_row_for_each_tool_that_has_a_speed() -> None:
    picture = ElementTree.fromstring(comparison.picture(MEASURED))
    shown = ["".join(text.itertext()) for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert {"PyTorch loop", "W&B, offline"} < set(shown)
    assert "Aim" not in shown


def test_the_readme_has_a_line_for_each_telling_column_that_was_measured() -> None:
    tools = {**MEASURED["tools"], comparison.OURS: {"cells": {"tiny": {"value": 0.97}, "killed": {"value": 0}}}}
    _, _, *lines = rows(comparison.summary({**MEASURED, "tools": tools}))
    measured = ("tiny", "slow", "hang", "killed")
    assert [title for title, *_ in lines] == [comparison.TELLING[cell] for cell in measured]
    by_title = {title: cells for title, *cells in lines}
    assert by_title[comparison.TELLING["tiny"]] == ["0.97", "W&B 0.91"]
    assert by_title[comparison.TELLING["slow"]] == ["n/a", "PyTorch loop 0.25"]
    assert by_title[comparison.TELLING["hang"]] == ["n/a", "W&B waits before the first step"]
    assert by_title[comparison.TELLING["killed"]] == ["0", ""]


def test_what_is_generated_has_date_machine_picture_and_versions() -> None:
    text = comparison.generated(MEASURED)
    assert "Measured on 2026-11-22" in text
    assert "a &lt;processor&gt;" in text
    assert f"]({comparison.PICTURE})" in text
    assert "torch 2.13.0, wandb 0.31.0" in text


def test_only_what_is_between_the_marks_of_a_page_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{comparison.BEGIN}\nold\n{comparison.END}\nafter\n")
    for _ in range(2):
        comparison.write(page, "new")
    assert page.read_text() == f"before\n{comparison.BEGIN}\n\nnew\n\n{comparison.END}\nafter\n"


def test_a_page_without_marks_stays_as_it_is(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing")
    with pytest.raises(ValueError, match="no place for the table"):
        comparison.write(page, "new")
    assert page.read_text() == "nothing"


@pytest.mark.parametrize("page", ["docs/performance.md", "README.md"])
def test_our_pages_have_the_marks(page: str) -> None:
    text = (ROOT / page).read_text()
    assert text.index(comparison.BEGIN) < text.index(comparison.END)
