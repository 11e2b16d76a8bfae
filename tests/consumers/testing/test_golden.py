"""Golden files, and what is told when something differs from one."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from offloop.bus.errors import ConfigurationError
from offloop.bus.protocol.snapshot import Snapshot
from offloop.consumers import Callback, Logger
from offloop.consumers.testing import Golden, Logged, MemoryStream, replay


class Logs(Callback):
    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self.rows = rows

    def batch_end(self, state: Snapshot, logger: Logger) -> None:
        logger.log_metrics(self.rows[int(state.timestamp.batch) - 1])


class LogsAll(Callback):
    def __init__(self, file: Path, pixel: int = 0, text: str = "hello") -> None:
        self.file, self.pixel, self.text = file, pixel, text

    def fit_end(self, state: Snapshot, logger: Logger) -> None:
        logger.log_hyperparameters({"seed": 3, "rate": math.inf})
        logger.log_images([[[0, self.pixel]]], name="pixels", masks={"prediction": [[[0, 1]]]})
        logger.log_table(["a"], [[math.nan], [None]])
        logger.log_text(self.text)
        logger.upload_file("there", self.file)
        state.send_command("set", "lr", 0.5)


def logged(*rows: dict[str, Any]) -> Logged:
    stream = MemoryStream()
    stream.train(len(rows))
    return replay(Logs(rows), stream)


def differences(golden: Golden, found: Logged, **options: Any) -> list[str]:
    with pytest.raises(AssertionError) as raised:
        golden.check(found, "name", **options)
    return str(raised.value).splitlines()


@pytest.fixture
def golden(tmp_path: Path) -> Golden:
    """A folder with a file ``name`` of three rows."""
    Golden(tmp_path, update=True).check(logged({"a": 1.0, "b": 2}, {"a": math.nan}, {"a": 3.0}), "name")
    return Golden(tmp_path, how_to_update="make golden")


def test_the_difference_is_reported_with_the_option_to_accept_it(golden: Golden, tmp_path: Path) -> None:
    told = differences(golden, logged({"a": 1.0, "c": 2}, {"a": math.inf}, {"a": 3.0}, {"a": 4.0}))
    assert told == [
        f"what was logged differs from {tmp_path / 'name.jsonl'} in 3 of 3 lines:",
        "  line 1, step 1: b is missing, expected 2; c is 2, expected missing",
        '  line 2, step 2: a is "Infinity", expected "NaN"',
        '  line 4 is new: {"step": 4, "time": 1700000001.0, "metrics": {"a": 4.0}}',
        "if that is meant to be: make golden",
    ]
    assert '  line 3 is missing: {"step": 3' in differences(golden, logged({"a": 1.0, "b": 2}, {"a": math.nan}))[1]


@pytest.mark.parametrize(("before", "now"), [(1, True), (0.0, -0.0), (0.3, 0.1 + 0.2)])
def test_values_are_compared_exactly(tmp_path: Path, before: Any, now: Any) -> None:
    Golden(tmp_path, update=True).check(logged({"a": before}), "name")
    assert "line 1, step 1: a is " in differences(Golden(tmp_path), logged({"a": now}))[1]


def test_a_tolerance_is_relative_and_near_zero_absolute(tmp_path: Path) -> None:
    Golden(tmp_path, update=True).check(logged({"a": 1000.0, "b": 0.0}), "name")
    golden = Golden(tmp_path)
    near = logged({"a": 1000.9, "b": 0.0009})
    golden.check(near, "name", tolerance=1e-3)
    assert len(differences(golden, near)) == 3
    told = differences(golden, logged({"a": 1000.9, "b": 0.0011}), tolerance=1e-3)
    assert told[1] == "  line 1, step 1: b is 0.0011, expected 0.0"
    # NaN is near nothing, and a text is not near a number.
    assert "NaN" in differences(golden, logged({"a": math.nan, "b": 0.0}), tolerance=1e-3)[1]
    assert '"1000.0"' in differences(golden, logged({"a": "1000.0", "b": 0.0}), tolerance=1e-3)[1]


def test_everything_that_can_be_logged_is_compared(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    stream = MemoryStream()
    stream.train(1)
    stream.finish()
    Golden(tmp_path, update=True).check(replay(LogsAll(file), stream), "name")
    lines = [json.loads(line) for line in (tmp_path / "name.jsonl").read_text().splitlines()]
    assert [next(iter(line)) for line in lines] == ["hyperparameters", "text", "table", "images", "upload", "command"]
    assert lines[0] == {"hyperparameters": {"seed": 3, "rate": "Infinity"}}
    assert lines[2]["rows"] == [["NaN"], [None]]
    assert lines[5] == {"command": "set", "arguments": ["lr", 0.5], "decided_at": 1}
    golden = Golden(tmp_path)
    golden.check(replay(LogsAll(file), stream), "name")
    told = differences(golden, replay(LogsAll(file, pixel=1, text="bye"), stream))
    assert told[1] == '  line 2, step 1: content is "bye", expected "hello"'
    assert told[2].startswith("  line 4, step 1: sha256 is ")


@pytest.mark.parametrize(("name", "tolerance"), [("", 0.0), ("/tmp/other", 0.0), ("a/../../b", 0.0), ("a", math.nan)])
def test_names_outside_the_folder_and_invalid_tolerances_are_refused(
    tmp_path: Path, name: str, tolerance: float
) -> None:
    with pytest.raises(ConfigurationError):
        Golden(tmp_path, update=True).check(logged({"a": 1.0}), name, tolerance=tolerance)
