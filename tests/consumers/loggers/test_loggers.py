"""Console, jsonl and csv: what they write, and that they can be read back."""

import csv
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from consumers_stream import batch_end
from helpers import strict_json
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from logged import LogsWhatItSees

from offloop.bus.errors import ConfigurationError
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.strict_json import plain
from offloop.consumers import (
    Callback,
    ConsoleLogger,
    CsvLogger,
    JsonlLogger,
    Logger,
    LoggerDestination,
    MLFlowLogger,
    PrometheusLogger,
    Runner,
    TensorboardLogger,
    WandBLogger,
)
from offloop.consumers.api.logger import Row, RunContext
from offloop.consumers.loggers.jsonl import _lines as jsonl_lines


def log(destination: LoggerDestination, *rows: dict[str, Any]) -> None:
    """Runs a destination over one batch end for each row, a quarter of a second apart."""
    stream = [batch_end(n, rows=[[n, metrics]]) for n, metrics in enumerate(rows, 1)]
    Runner(stream, [LogsWhatItSees()], [destination]).run()


# -- jsonl ------------------------------------------------------------------------------------------------------------

NAMES = st.text(min_size=1, max_size=8).filter(lambda name: name not in ("step", "time"))
VALUES = st.floats() | st.integers(-(2**63), 2**64 - 1) | st.booleans() | st.text(max_size=5)
NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(rows=st.lists(st.dictionaries(NAMES, VALUES, min_size=1, max_size=4), min_size=1, max_size=4))
def test_jsonl_round_trip(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    path = tmp_path / "metrics.jsonl"
    log(JsonlLogger(str(path), overwrite=True), *rows)
    read = [strict_json(line) for line in path.read_text().splitlines()]
    assert [row.pop("step") for row in read] == list(range(1, len(rows) + 1))
    assert all(row.pop("time") == pytest.approx(1.7e9, abs=10) for row in read)
    for row, original in zip(read, rows, strict=True):
        assert list(row) == list(original)
        for name, value in original.items():
            if isinstance(value, float) and not math.isfinite(value):
                assert repr(NOT_FINITE[row[name]]) == repr(value)
            else:
                assert row[name] == value


@given(
    names=st.lists(NAMES, unique=True, max_size=3),
    data=st.data(),
    values=st.sampled_from([st.floats(), st.floats(1e-6, 2e-4), VALUES, VALUES | st.floats().map(np.float64)]),
)
def test_jsonl_of_many_rows_equals_single_rows(names: list[str], data: st.DataObject, values: Any) -> None:
    entries = st.fixed_dictionaries(dict.fromkeys(names, values))
    rows = [Row(n, n / 7, entry) for n, entry in enumerate(data.draw(st.lists(entries, max_size=20)))]
    lines = jsonl_lines(rows)
    assert lines == b"".join(jsonl_lines([row]) for row in rows)
    assert [json.loads(line) for line in lines.splitlines()] == [
        plain({"step": row.step, "time": row.time, **row.metrics}) for row in rows
    ]


def test_jsonl_has_hyperparameters_on_a_separate_line(tmp_path: Path) -> None:
    class Seeds(Callback):
        def batch_end(self, state: Snapshot, logger: Logger) -> None:
            logger.log_hyperparameters({"seed": 17, "limit": math.inf})

    path = tmp_path / "metrics.jsonl"
    Runner([batch_end(1)], [Seeds()], [JsonlLogger(str(path))]).run()
    assert strict_json(path.read_text())["hyperparameters"] == {"seed": 17, "limit": "Infinity"}


@pytest.mark.timeout(30)
def test_csv_refuses_a_pipe_and_keeps_a_link(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    logger = CsvLogger(f"/dev/fd/{write_end}", overwrite=True)
    with pytest.raises(ConfigurationError, match="is not a regular file, which a table with new columns needs"):
        logger.open(RunContext("run", 1, tmp_path))
    os.close(read_end)
    os.close(write_end)
    link = tmp_path / "link.csv"
    link.symlink_to("target.csv")
    logger = CsvLogger(str(link))
    logger.open(RunContext("run", 1, tmp_path))
    logger.log_rows([Row(1, 2.0, {"x": 3})], batch_end(1))
    logger.close()
    assert link.is_symlink()
    assert link.read_text() == "step,time,x\n1,2.0,3\n"


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", ["link", "fifo"])
@pytest.mark.parametrize(("logger", "name"), [(JsonlLogger, "jsonl"), (CsvLogger, "csv")])
def test_links_and_pipes_in_a_run_directory_are_refused(
    tmp_path: Path, logger: type[LoggerDestination], name: str, kind: str
) -> None:
    victim, run = tmp_path / "victim", tmp_path / "run"
    run.mkdir()
    victim.write_text("")
    planted = run / f"metrics.{name}"
    planted.symlink_to(victim) if kind == "link" else os.mkfifo(planted)
    with pytest.raises(ConfigurationError, match=f"metrics.{name} cannot be written: "):
        logger().open(RunContext("r", 1, run))
    assert victim.read_text() == ""


# -- csv --------------------------------------------------------------------------------------------------------------


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(rows=st.lists(st.dictionaries(st.sampled_from("abcd"), st.floats(), min_size=1), min_size=1, max_size=5))
def test_csv_round_trip(tmp_path: Path, rows: list[dict[str, float]]) -> None:
    path = tmp_path / "metrics.csv"
    log(CsvLogger(str(path), overwrite=True), *rows)
    with path.open(newline="") as file:
        read = [{name: float(cell) for name, cell in row.items() if cell} for row in csv.DictReader(file)]
    assert [{name: repr(value) for name, value in row.items() if name not in ("step", "time")} for row in read] == [
        {name: repr(value) for name, value in row.items()} for row in rows
    ]


# -- both files -------------------------------------------------------------------------------------------------------

FILES = pytest.mark.parametrize("make", [JsonlLogger, CsvLogger])


@FILES
def test_an_existing_file_is_refused_without_overwrite(make: Any, tmp_path: Path) -> None:
    path = tmp_path / "metrics"
    path.write_text("precious\n")
    with pytest.raises(ConfigurationError, match="overwrite=true"):
        log(make(str(path)), {"x": 1})
    assert path.read_text() == "precious\n"
    log(make(str(path), overwrite=True), {"x": 1})
    assert "precious" not in path.read_text()


@FILES
def test_a_missing_path_is_refused_with_the_option_to_set(make: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for destination in (make(), make(str(tmp_path / "file" / "metrics"))):
        with pytest.raises(ConfigurationError, match="path=FILE"):
            log(destination, {"x": 1})


# -- console ----------------------------------------------------------------------------------------------------------


def test_console_prints_one_line_a_second_of_training_time_and_the_last_row(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log(ConsoleLogger(), *({"loss": 1 / n} for n in range(1, 12)))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:6] for line in lines] == [
        ["step", "1", "epoch", "0", "loss", "1"],
        ["step", "5", "epoch", "1", "loss", "0.2"],
        ["step", "9", "epoch", "2", "loss", "0.1111"],
        ["step", "11", "epoch", "2", "loss", "0.09091"],
    ]
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize(
    ("make", "module"),
    [
        (MLFlowLogger, "mlflow"),
        (PrometheusLogger, "prometheus_client"),
        (TensorboardLogger, "tensorboard.compat.proto.event_pb2"),
        (WandBLogger, "wandb"),
    ],
)
def test_a_logger_without_its_package_names_the_install_command(
    make: type[LoggerDestination], module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigurationError, match=rf"pip install 'offloop\[{make.requires and make.requires[0]}\]'"):
        make().check()
