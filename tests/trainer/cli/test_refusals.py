"""The command ``trainer``: what it refuses before a run is started, and the options that its messages name."""

from pathlib import Path

import pytest
import torch
from gold import GoldMLP
from trainer_command import SMALL, Run, command_in

from bus.runs.directory import list_runs

QUIETLY = ("--device=cpu", "--no-publish", "--no-progress")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, runs_dir: Path) -> Run:
    return command_in(tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["digits", "--microbatch-size=33"], "size 33 is larger than the batch of 32 samples: use 32 or less"),
        ([*SMALL, "--algorithms=blurpool"], "BlurPool finds nothing to blur in GoldMLP"),
        (
            [*SMALL, "--algorithms=stochastic_depth", "-o", "StochasticDepth.target_layer_name=Layer"],
            "names no layer of the model",
        ),
        ([*SMALL, "--save-overwrite"], "--save-overwrite needs --save-folder"),
        ([*SMALL, "--load-what-fits"], "--load-what-fits needs --load-path"),
    ],
)
def test_what_does_not_go_together_is_one_line_and_no_run_is_started(
    run: Run, runs_dir: Path, arguments: list[str], message: str
) -> None:
    refused = run(*arguments, "--device=cpu")
    [line] = refused.err.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert refused.code == 2
    assert list_runs(runs_dir) == []


def test_a_model_that_takes_no_smaller_images_is_one_line(run: Run) -> None:
    refused = run("digits", "--algorithms=progressive_resizing", "-d2ba", *QUIETLY)
    [line] = refused.err.splitlines()
    assert line.startswith("error: model Classifier does not take the images of 4 x 4 pixels that ProgressiveResizing")
    assert "leave that out, or use a model for images of any size" in line
    assert refused.code == 2


def test_checkpoints_that_are_in_the_way_can_be_written_over(run: Run) -> None:
    arguments = [*SMALL, *QUIETLY, "--save-folder=saved"]
    assert run(*arguments, "-d5ba").code == 0
    assert run(*arguments, "-d2ba").code == 2
    assert run(*arguments, "-d2ba", "--save-overwrite").code == 0


def test_weights_that_lack_some_of_the_models_can_be_taken(run: Run, tmp_path: Path) -> None:
    weights = GoldMLP().state_dict()
    weights.popitem()
    torch.save(weights, tmp_path / "some.pt")
    arguments = [*SMALL, *QUIETLY, "-d1ba", "--load-path=some.pt", "--load-weights-only"]
    refused = run(*arguments)
    [line] = refused.err.splitlines()
    assert "load_strict_model_weights=False (--load-what-fits)" in line
    assert refused.code == 2
    assert run(*arguments, "--load-what-fits").code == 0
