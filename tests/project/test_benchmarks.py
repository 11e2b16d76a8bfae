"""Each benchmark runs, at a tiny size."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

BENCHMARKS = ROOT / "benchmarks"
OTHERS = (
    "all",
    "callbacks",
    "cluster_runs",
    "common",
    "compare",
    "comparison",
    "cores",
    "gpu",
    "jobs",
    "models",
    "peer_trainings",
)
"""What is no benchmark itself, and what is measured here in other ways."""
NAMES = sorted(path.stem for path in BENCHMARKS.glob("*.py") if path.stem not in OTHERS)
INTERRUPTED_AFTER_THE_FIRST_FIGURE = """
import runpy, sys, common
add = common.Report.add
def add_and_interrupt(*arguments, **options):
    add(*arguments, **options)
    raise KeyboardInterrupt
common.Report.add = add_and_interrupt
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def measured(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_an_interrupted_benchmark_keeps_its_figures(name: str, tmp_path: Path) -> None:
    code = f"import sys; sys.argv.pop(0);{INTERRUPTED_AFTER_THE_FIRST_FIGURE}"
    file = tmp_path / "figures.json"
    done = measured("-c", code, BENCHMARKS / f"{name}.py", "--quick", "--json", file)
    assert done.returncode == 130, done.stderr
    told = json.loads(file.read_text())
    ((figure, entry),) = told["figures"].items()
    assert entry["value"] > 0
    assert figure in done.stdout
    assert (told["complete"], "not complete" in done.stderr) == (False, True)
