"""benchmarks/compare.py: its verdicts, and the whole command with a benchmark that takes no time."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from compare import Compared, verdict
from paths import ROOT

FAKE = """
import json, sys
import offloop
assert sys.argv[1] == "--json" and "--fraction" in sys.argv
figures = {"time": {"value": offloop.TIME, "unit": "us", "better": "lower"}}
figures["rate"] = {"value": 1 / offloop.TIME, "unit": "events/s", "better": "higher"}
figures["steady"] = {"value": 3.0, "unit": "us", "better": "lower"}
open(sys.argv[2], "w").write(json.dumps({"figures": figures}))
figures["new"] = {"value": offloop.NEW, "unit": "us", "better": "lower"}
open(sys.argv[2], "w").write(json.dumps({"figures": figures}))
"""


@pytest.mark.parametrize(
    ("ratios", "better", "expected"),
    [
        ([1.10, 1.12, 1.09, 1.11], "lower", "slower"),
        ([1.10, 1.12, 1.09, 1.11], "higher", "faster"),
        ([0.90, 0.91, 0.89, 0.92], "lower", "faster"),
        ([0.90, 0.91, 0.89, 0.92], "higher", "slower"),
        ([0.90, 1.20, 1.15, 1.10, 1.20, 1.20, 1.20], "lower", "slower"),  # one round of seven is off
        ([0.90, 0.95, 1.15, 1.10, 1.20, 1.20, 1.20], "lower", "noise"),
        ([0.90, 1.20, 1.15, 1.10], "lower", "noise"),  # one round of four
        ([0.90, 0.95, 1.15, 1.40], "lower", "noise"),  # the quartiles contain 1
        ([1.01, 1.015, 1.01, 1.012], "lower", "noise"),  # within the margin
        ([0.99, 0.985, 0.99, 0.988], "lower", "noise"),
        ([1.50, 1.50, 1.50], "lower", "noise"),  # too few rounds
    ],
)
def test_a_verdict_needs_both_quartiles_beyond_the_margin(ratios: Sequence[float], better: str, expected: str) -> None:
    assert verdict(ratios, better, margin=0.02) == expected


@pytest.mark.parametrize(
    ("further", "expected"), [([], "slower"), ([1.2] * 4, "slower"), ([1.0] * 4, "noise"), ([0.8] * 4, "noise")]
)
def test_further_rounds_have_to_confirm_a_verdict(further: list[float], expected: str) -> None:
    after = [1.2] * 4 + further
    assert Compared("us", "lower", [1.0] * len(after), after).verdict(4, 0.02) == expected


def test_rounds_with_a_difference_below_zero_have_no_ratio() -> None:
    compared = Compared("us", "lower", [1.0, -0.1, 0.0, 2.0], [2.0, 1.0, 1.0, -1.0])
    assert compared.ratios() == [2.0]
    assert compared.verdict(4, 0.02) == "noise"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "offloop").mkdir()
    (tmp_path / "offloop" / "__init__.py").write_text("TIME = 2.0\n")
    (tmp_path / "benchmarks").mkdir()
    for name in ("compare", "common"):
        shutil.copy(ROOT / "benchmarks" / f"{name}.py", tmp_path / "benchmarks")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-C", str(tmp_path)]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "First"], ["tag", "v1"]):
        subprocess.run([*git, *command], check=True)
    # The revision before has no such benchmark.
    (tmp_path / "benchmarks" / "fake.py").write_text(FAKE)
    return tmp_path


def compared(repository: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, repository / "benchmarks" / "compare.py", "--only", "fake", "--rounds", "4", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def rows_of(done: "subprocess.CompletedProcess[str]") -> dict[str, list[str]]:
    rows = map(str.split, done.stdout.splitlines())
    return {row[0]: row for row in rows if row}


def test_a_slower_working_tree_fails(repository: Path) -> None:
    (repository / "offloop" / "__init__.py").write_text("TIME, NEW = 3.0, 1.0\n")
    done = compared(repository)
    assert done.returncode == 1, done.stderr
    rows = rows_of(done)
    assert rows["time"] == ["time", "2.000", "3.000", "us", "1.500", "(1.500", "to", "1.500)", "slower"]
    assert rows["rate"][-1] == "slower"
    assert rows["steady"][-1] == "noise"
    assert rows["new"] == ["new", "-", "-", "us"]
    assert "2 slower, 0 faster, 1 noise" in done.stdout
    assert "fake failed with before (v1): AttributeError: module 'offloop' has no attribute 'NEW'" in done.stdout
    assert done.stderr.count("further round 4 of 4") == 2


def test_a_faster_one_passes_and_one_that_fails_does_not(repository: Path) -> None:
    (repository / "offloop" / "__init__.py").write_text("TIME, NEW = 1.0, 1.0\n")
    done = compared(repository, "v1")
    assert (done.returncode, rows_of(done)["time"][-1]) == (0, "faster"), done.stderr
    done = compared(repository, "v1", "--after", "v1")
    assert (done.returncode, rows_of(done)["time"][-1]) == (1, "noise"), done.stderr
    assert "fake failed with after (v1)" in done.stdout
    (repository / "offloop" / "__init__.py").write_text("TIME = 2.0\n")
    done = compared(repository, "v1")
    assert (done.returncode, rows_of(done)["time"][-1]) == (1, "noise"), done.stderr


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["no-such-revision"], "git archive failed"),
        (["v1", "--only", "fakes"], "no benchmark 'fakes'"),
        (["v1", "--rounds", "3"], "3 rounds are too few: use at least 4"),
    ],
)
def test_mistakes_are_explained(repository: Path, options: list[str], expected: str) -> None:
    done = compared(repository, *options)
    assert (done.returncode, expected in done.stderr) == (2, True), done.stderr
