"""benchmarks/comparison.py: the table of docs/performance.md, and what of it the README quotes."""

from typing import Any

import pytest
from comparison import is_noise, picture, summary, table


def cell(value: float, low: float, high: float) -> dict[str, Any]:
    return {"value": value, "low": low, "high": high, "rounds": [low, value, high]}


ITSELF = {"apart": cell(0.96, 0.95, 0.98), "thread": cell(2.0, 1.0, 4.0), "slow": cell(0.24, 0.23, 0.25)}
MEASURED = {
    "date": "2026-11-27",
    "machine": "2 cores",
    "tools": {
        "PyTorch loop": {"cells": ITSELF},
        "offloop, own loop": {
            "cells": {
                "apart": cell(0.97, 0.96, 0.99),
                "thread": cell(45.0, 40.0, 51.0),
                "slow": cell(0.99, 0.97, 1.02),
                "killed": {"value": 1.0, "low": 0.5, "high": 1.5, "rounds": [0.0, 1.0, 2.0]},
            }
        },
        "MLflow, SQLite": {
            "cells": {
                "apart": cell(0.09, 0.08, 0.1),
                "thread": {"text": "fails at step 3: no such file"},
                "slow": {"none": "it does not run callbacks"},
                "killed": {"value": 0.0, "low": 0.0, "high": 0.0, "rounds": [0.0, 0.0, 0.0]},
            }
        },
    },
}


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("apart", cell(0.9, 0.85, 0.94), False),
        ("apart", cell(0.97, 0.93, 1.0), True),  # its quartiles contain 1
        ("apart", cell(0.97, 0.93, 0.99), True),  # the loop against itself varies as much
        ("apart", cell(1.1, 1.05, 1.2), False),
        ("thread", cell(0.5, -3.0, 5.0), True),
        ("thread", cell(45.0, 40.0, 51.0), False),
        ("slow", cell(0.24, 0.235, 0.245), False),  # the plain loop runs the callback itself
        ("end", cell(1.0, 0.9, 1.1), False),  # not a comparison
        ("apart", {"text": "fails"}, False),
    ],
)
def test_a_cell_within_noise(name: str, given: dict[str, Any], expected: bool) -> None:
    assert is_noise(name, given, ITSELF) is expected


def test_the_table_shows_noise_as_no_difference_and_the_quartiles() -> None:
    _, _, plain, ours, mlflow, _, *notes = table(MEASURED).splitlines()
    assert plain.startswith("| PyTorch loop | ≈ 1 <sub>0.95…0.98</sub> | ≈ 0 ")
    assert "| ≈ 1 <sub>0.96…0.99</sub> | 45 <sub>40…51</sub> | ≈ 1 <sub>0.97…1.02</sub> | 0 to 2 |" in ours
    assert "| 0.09 <sub>0.08…0.10</sub> | fails at step 3<sup>2</sup> | n/a<sup>3</sup> | 0 |" in mlflow
    assert notes == ["1. not measured", "2. no such file", "3. it does not run callbacks"]


def test_the_readme_quotes_only_the_quartiles_of_a_figure_within_noise() -> None:
    rows = summary(MEASURED).splitlines()[4:]
    assert rows[0].endswith("its thread on a core of its own | ≈ 1 (0.96 to 0.99) | MLflow 0.09 |")
    assert rows[1] == "| speed with a callback that takes 50 ms | ≈ 1 (0.97 to 1.02) | PyTorch loop 0.24 |"
    assert rows[2] == "| logged steps lost by `kill -9` of the training | 0 to 2 | MLflow 0 |"


def test_the_picture_has_a_line_from_quartile_to_quartile() -> None:
    drawn = picture(MEASURED)
    assert drawn.count("<circle") == 4 + 2 + 2 + 1  # the legend, then each tool's cells
    assert drawn.count('stroke-width="2"') == 5
