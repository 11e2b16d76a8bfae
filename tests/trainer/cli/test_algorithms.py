"""Algorithms by name: the command's list and options, and which algorithms train which task."""

import re
from pathlib import Path
from typing import Any

import pytest
from commands import Run
from paths import ROOT
from trainer_command import SMALL, command_in
from training import Act

from offloop.bus.runs.directory import list_runs
from offloop.bus.types.event import Event
from offloop.trainer import algorithms
from offloop.trainer.algorithms import ALGORITHMS, CutMix

OWN = '''
from offloop.bus.types.event import Event
from offloop.trainer import Algorithm

class Note(Algorithm):
    """Says something at the end. Twice."""

    def __init__(self, text: str = "over"):
        self.text = text

    def match(self, event, state):
        return event is Event.FIT_END

    def apply(self, event, state, logger):
        names = ",".join(type(one).__name__ for one in state.algorithms)
        print(f"{self.text}: {names}")

class Unfinished(Algorithm):
    def match(self, event, state):
        return False
'''

NAMES = [entry.name for entry in ALGORITHMS.entries()]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, runs_dir: Path) -> Run:
    return command_in(tmp_path, monkeypatch, capsys)


def test_every_algorithm_has_a_short_name_and_can_be_imported_from_the_package() -> None:
    found = {ALGORITHMS.find(name).__name__ for name in NAMES}
    assert found == set(algorithms.__all__) - {"ALGORITHMS"}
    for name in algorithms.__all__:
        assert getattr(algorithms, name) is not None
    assert set(algorithms.__all__) <= set(dir(algorithms))
    with pytest.raises(AttributeError, match="no attribute 'EMMA'"):
        algorithms.EMMA  # noqa: B018


def test_the_list_shows_algorithms_with_their_options(run: Run) -> None:
    listed = run("--list-algorithms")
    assert listed.code == 0
    lines = listed.out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ") and line[2] != " "] == NAMES
    [mixup] = [line for line in lines if line.startswith("  mixup ")]
    assert mixup.endswith("and on their targets in the same proportion.")
    assert [line.strip() for line in lines if "ema.half_life" in line] == [
        "-o ema.half_life=1000ba (a time such as 10ba or none)"
    ]
    assert any("-o stochastic_depth.target_layer_name=... (text)" in line for line in lines)


def test_algorithms_and_their_options_on_the_command_line(run: Run, runs_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    names = ["--algorithms", "ema, label_smoothing", "--algorithms", "mine.py:Note"]
    done = run(*SMALL, "-d2ba", "--no-progress", *names, "-o", "ema.half_life=10ba", "-o", "Note.text=the end")
    assert done.code == 0, done.err
    assert "the end: EMA,LabelSmoothing,Note" in done.out.splitlines()
    [info] = list_runs(runs_dir)
    assert info.last.info["config"]["algorithms"] == ["ema", "label_smoothing", "mine.py:Note"]
    assert info.last.info["config"]["algorithm_options"] == ["ema.half_life=10ba", "Note.text=the end"]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--algorithms", "emma"], "did you mean ema?"),
        (["--algorithms", "ema", "-o", "EMA.half_life=10"], "algorithm ema: "),
        (["-o", "EMA.half_life=10ba"], "'EMA'"),
        (["--algorithms", "mine.py:Unfinished"], "apply"),
        (["--algorithms", "stochastic_depth", "-o", "StochasticDepth.target_layer_name=Layer"], "'Layer'"),
    ],
)
def test_a_mistake_is_one_line(run: Run, tmp_path: Path, arguments: list[str], word: str) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    refused = run(*SMALL, "-d2ba", "--no-progress", *arguments)
    [line] = refused.err.splitlines()
    assert line.startswith("error: ")
    assert word in line
    assert refused.code == 2


PAGE = (ROOT / "docs" / "algorithms.md").read_text()


def test_the_page_has_a_row_for_every_algorithm() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", PAGE, re.MULTILINE)
    assert rows == [(name, ALGORITHMS.find(name).__name__) for name in NAMES]


def test_the_page_s_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    own, ordered = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    exec(own, names)
    assert capsys.readouterr().out == "48\n"
    exec(ordered, names)
    made = names["trainer"]
    # Its images are rows of numbers, which CutMix would refuse.
    made.state.algorithms[:] = [CutMix(), Act(lambda *_: print("applied"), Event.BEFORE_FORWARD)]
    made.engine.run_event(Event.BEFORE_FORWARD)
    assert capsys.readouterr().out == "applied\n"
