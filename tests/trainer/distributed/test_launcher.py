"""What torchrun is told of a failure."""

import json
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from offloop.bus.cli.main import bus
from offloop.bus.errors import RankError
from offloop.trainer.cli.main import trainer
from offloop.trainer.distributed.launcher import report_uncaught_errors


def test_errors_caused_by_another_rank_are_reported_after_their_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torchrun shows the failure with the lowest timestamp, in whole seconds; of equal ones that of the lowest rank."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    report_uncaught_errors(lambda: 100.9)
    reported = {}
    for error in (RankError("rank 1 ended with an error"), ValueError("the cause")):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
        sys.excepthook(type(error), error, None)
        reported[type(error)] = json.loads((tmp_path / "error.json").read_text())["timestamp"]
    assert reported == {RankError: 101, ValueError: 100}
    assert "the cause" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "words"), [(trainer, ["digits"]), (bus, ["train", "digits"]), (bus, ["train"])])
@pytest.mark.parametrize("rank", [0, 1])
def test_errors_of_the_command_are_reported_to_torchrun_first_by_the_first_rank(
    command: click.Command, words: list[str], rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[int] = []
    monkeypatch.setattr("offloop.trainer.cli.main._wait_for_the_first_rank", lambda: waits.append(rank))
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert CliRunner().invoke(command, [*words, "--no-such-option"]).exit_code == 2
    assert "--no-such-option" in (tmp_path / "error.json").read_text()
    assert waits == [1] * rank
