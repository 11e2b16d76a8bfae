"""Each benchmark starts. What they measure at a tiny size says nothing, so only the quickest one measures here."""

import json
import runpy
import subprocess
import sys

import pytest
from paths import ROOT

BENCHMARKS = ROOT / "benchmarks"
PARTS = ("common", "jobs", "sleeper")
"""Modules that benchmarks import or name."""
NAMES = sorted(path.stem for path in BENCHMARKS.glob("*.py") if path.stem not in PARTS)


@pytest.mark.parametrize("name", NAMES)
def test_it_starts(name, monkeypatch, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: {name}.py")


def test_it_measures_prints_and_writes_figures(runs_dir, tmp_path):
    command = [sys.executable, BENCHMARKS / "stream.py", "--quick", "--json", tmp_path / "figures.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "replay" in done.stdout
    assert json.loads((tmp_path / "figures.json").read_text())["figures"]["replay"] > 0
