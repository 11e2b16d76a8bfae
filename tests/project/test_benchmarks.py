"""Each benchmark measures. At a tiny size that says nothing, so only the quickest one measures to its end. What they
report, and how two reports are compared."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from common import Report, argument_parser, run
from compare import compare, read
from paths import ROOT

from offloop.bus import ConfigurationError

BENCHMARKS = ROOT / "benchmarks"
OTHERS = ("all", "common", "compare", "comparison", "gpu", "jobs", "models", "peer_trainings", "sleeper", "stopwatch")
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
WITHOUT_CONSUMERS = """
import contextlib, sys
sys.path.insert(0, "")
import gpu
gpu.attached = lambda *_: contextlib.nullcontext()
sys.argv.pop(0)
gpu.main()
"""
"""They take long to start, and other benchmarks have them."""


def measured(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.needs("chromium") if name in ("dashboard", "home") else ())
        for name in NAMES
    ],
)
def test_it_measures_a_first_figure_and_keeps_it_when_interrupted(name: str, tmp_path: Path) -> None:
    code = f"import sys; sys.argv.pop(0);{INTERRUPTED_AFTER_THE_FIRST_FIGURE}"
    file = tmp_path / "figures.json"
    done = measured("-c", code, BENCHMARKS / f"{name}.py", "--quick", "--json", file)
    assert done.returncode == 130, done.stderr
    told = json.loads(file.read_text())
    ((figure, entry),) = told["figures"].items()
    assert entry["value"] > 0
    assert figure in done.stdout
    assert (told["complete"], "not complete" in done.stderr) == (False, True)


def test_what_is_measured_on_a_gpu_is_measured_on_the_host_to_try_it(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = measured("-c", WITHOUT_CONSUMERS, "gpu.py", "--quick", "--device", "cpu", "--json", file)
    assert done.returncode == 0, done.stderr
    told = json.loads(file.read_text())
    assert told["complete"]
    figures = {name: entry["value"] for name, entry in told["figures"].items()}
    without = {name for name, value in figures.items() if value <= 0}
    assert without <= {name for name in figures if name.startswith(("waits", "memory", "2 MB: consumer"))}
    assert {
        "having a loss read",
        "small MLP: Trainer with speed,lr / bare",
        "2 MB: async_save, later",
    } <= figures.keys()


def test_all_runs_the_chosen_ones_and_has_the_figures_of_each(tmp_path: Path) -> None:
    done = measured("all.py", "--quick", "--only", "stream", "--json", tmp_path / "figures.json")
    assert done.returncode == 0, done.stderr
    assert "] throughput\n" in done.stderr
    told = json.loads((tmp_path / "figures.json").read_text())
    assert (told["benchmark"], told["complete"]) == ("all", True)
    assert told["figures"]["stream: replay"]["value"] > 0


def chosen(*words: str) -> Any:
    return argument_parser("", ["fast", "slow"]).parse_args(words)


def test_a_part_that_does_not_exist_is_refused_with_those_that_do(capsys) -> None:
    with pytest.raises(SystemExit):
        chosen("--only", "slwo")
    assert "unknown part 'slwo': did you mean slow? allowed: fast, slow\n" in capsys.readouterr().err


def test_a_figure_is_the_median_with_its_spread_and_its_goal(tmp_path: Path, capsys) -> None:
    report = Report("title", quick=False, json_file=tmp_path / "figures.json")
    report.add("time", [4.0, 1.0, 2.0], "us", 3)
    report.add("speed", 0.5, "x", 1, at_least=True)
    report.add("size", 2000, "bytes")
    shown = [line.split() for line in capsys.readouterr().out.splitlines()[3:]]
    assert shown == [
        ["time", "2.000", "us", "(1.000", "to", "4.000)", "at", "most", "3:", "met"],
        ["speed", "0.500", "x", "at", "least", "1:", "MISSED"],
        ["size", "2,000", "bytes"],
    ]
    assert json.loads((tmp_path / "figures.json").read_text())["figures"] == {
        "time": {"value": 2.0, "unit": "us", "spread": [1.0, 4.0], "goal": "at most 3", "met": True},
        "speed": {"value": 0.5, "unit": "x", "goal": "at least 1", "met": False},
        "size": {"value": 2000, "unit": "bytes"},
    }
    report.close()
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["time", "speed", "1"]


def test_tiny_sizes_are_not_judged(capsys) -> None:
    Report("title", quick=True).add("time", 4, "us", 3)
    assert "at most" not in capsys.readouterr().out


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_part_that_fails_leaves_the_figures_of_the_others(tmp_path: Path, capsys, interrupted: bool) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt if interrupted else ZeroDivisionError("oh")

    file = tmp_path / "figures.json"
    parts = {
        "first": lambda report, where, quick: report.add("directory", where.is_dir(), ""),
        "second": fail,
        "third": lambda report, where, quick: report.add("quick", quick, ""),
    }
    options = SimpleNamespace(quick=False, json=file, only=list(parts))
    with pytest.raises(SystemExit) as ended:
        run("title", parts, options)
    assert ended.value.code == (130 if interrupted else 1)
    told = json.loads(file.read_text())
    assert list(told["figures"]) == (["directory"] if interrupted else ["directory", "quick"])
    assert not told["complete"]
    said = capsys.readouterr().err
    assert "not complete: second\n" in said
    assert ("part second failed: oh\n" in said) != interrupted


def test_progress_is_a_line_every_few_seconds_where_there_is_no_terminal(capsys) -> None:
    report = Report("title", quick=True)
    assert list(report.rounds("events", 50)) == list(range(50))
    assert capsys.readouterr().err == "[   0 s] events: round 1 of 50\n"


def test_progress_is_one_line_of_a_terminal_and_makes_way_for_figures(capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    report = Report("title", quick=True)
    for _ in report.rounds("events", 2):
        pass
    report.add("time", 1, "us")
    clear = "\r\x1b[K"
    assert capsys.readouterr().err == f"{clear}[   0 s] events: round 1 of 2{clear}[   0 s] events: round 2 of 2{clear}"


def written(folder: Path, title: str, *figures: tuple[Any, ...], quick: bool = False) -> dict[str, Any]:
    report = Report(title, quick, folder / "figures.json")
    for figure in figures:
        report.add(*figure)
    return read(folder / "figures.json")


def test_two_files_are_compared_figure_by_figure(tmp_path: Path) -> None:
    before = written(tmp_path, "t", ("a", 2, "us", 3), ("b", 5, "us", 3), ("c", 1, "us", 3), ("old", 1, "s"))
    after = written(tmp_path, "t", ("a", 4, "us", 3), ("b", 2, "us", 3), ("c", 1, "us", 3), ("new", 0, "s"))
    header, *rows = [line.split() for line in compare(before, after)]
    assert header == ["t", "before", "after", "ratio"]
    assert rows == [
        ["a", "2.000", "4.000", "2.000", "us", "at", "most", "3:", "met", "->", "MISSED"],
        ["b", "5.000", "2.000", "0.400", "us", "at", "most", "3:", "MISSED", "->", "met"],
        ["c", "1.000", "1.000", "1.000", "us", "at", "most", "3:", "met"],
        ["old", "1.000", "-", "-", "s"],
        ["new", "-", "0.000", "-", "s"],
    ]


def test_the_machines_are_named_where_they_differ(tmp_path: Path) -> None:
    one = written(tmp_path, "t")
    assert list(compare({**one, "machine": "another"}, one))[:2] == ["before: another", f"after:  {one['machine']}"]


def test_files_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    one = written(tmp_path, "one")
    with pytest.raises(ConfigurationError, match="cannot compare one with two: give two files of the same benchmark"):
        list(compare(one, written(tmp_path, "two")))
    with pytest.raises(ConfigurationError, match="cannot compare one with one --quick"):
        list(compare(one, written(tmp_path, "one", quick=True)))


@pytest.mark.parametrize("content", [None, "{", "[]", '{"figures": {}}'])
def test_a_file_without_figures_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "other.json").write_text(content)
    with pytest.raises(ConfigurationError, match=r"cannot read figures from .*: give two files that a benchmark wrote"):
        read(tmp_path / "other.json")
