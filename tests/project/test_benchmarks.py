"""The benchmarks run; what they measure at this size says nothing."""

import json
import subprocess
import sys

import pytest
from paths import ROOT

BENCHMARKS = ROOT / "benchmarks"


@pytest.mark.parametrize(
    ("name", "figure"),
    [
        ("hot_loop", "unwanted event"),
        ("stream", "replay"),
        ("checkpoint", "2 MB: consumer, later saves"),
        pytest.param("dashboard", "reading 10,000 events into the view", marks=pytest.mark.needs("chromium")),
        ("faults", "trainer killed: until consumers are told, longest"),
    ],
)
def test_it_runs_at_a_tiny_size(runs_dir, tmp_path, name, figure):
    command = [sys.executable, BENCHMARKS / f"{name}.py", "--quick", "--json", tmp_path / "figures.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert figure in done.stdout
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert figures[figure] > 0
