"""Each benchmark measures. At a tiny size that says nothing, so only the quickest one measures to its end."""

import json
import re
import subprocess
import sys

import pytest
from paths import ROOT

BENCHMARKS = ROOT / "benchmarks"
PARTS = ("common", "jobs", "sleeper")
"""Modules that benchmarks import or name."""
NAMES = sorted(path.stem for path in BENCHMARKS.glob("*.py") if path.stem not in PARTS)
SIZES = {"soak": ["--events", "2000"]}
FIRST_FIGURE = """
import runpy, sys, common
def add(self, name, value, *others, **more):
    sys.exit(f"measured {value}")
common.Report.add = add
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def measured(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.needs("chromium") if name == "dashboard" else ()) for name in NAMES]
)
def test_it_measures_a_first_figure(name: str) -> None:
    code = f"import sys; sys.argv.pop(0);{FIRST_FIGURE}"
    done = measured("-c", code, BENCHMARKS / f"{name}.py", *SIZES.get(name, ["--quick"]))
    assert done.returncode == 1, done.stderr
    (value,) = re.findall(r"^measured (\S+)$", done.stderr, re.MULTILINE)
    assert float(value) > 0


def test_it_measures_all_prints_and_writes_figures(tmp_path) -> None:
    done = measured("stream.py", "--quick", "--json", tmp_path / "figures.json")
    assert done.returncode == 0, done.stderr
    assert "replay" in done.stdout
    assert json.loads((tmp_path / "figures.json").read_text())["figures"]["replay"] > 0
