"""Parquet tables, read back with PyArrow."""

import errno
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet
import pytest
from consumers_stream import batch_end
from hypothesis import given, settings
from hypothesis import strategies as st
from logged import LogsWhatItSees, goes_on_after_every_kill, run_killed_and_again

from offloop.bus.errors import ClosedError, ConfigurationError
from offloop.bus.protocol.snapshot import Snapshot
from offloop.consumers import Runner
from offloop.consumers.api.logger import Row, RunContext
from offloop.consumers.loggers.parquet import ParquetLogger


def stream_of(*rows: dict[str, Any]) -> list[Snapshot]:
    return [batch_end(n, rows=[[n, row]]) for n, row in enumerate(rows, 1)]


def log(path: Path, *rows: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    Runner(stream_of(*rows), [LogsWhatItSees()], [ParquetLogger(str(path), **options)]).run()
    return read(path)


def read(path: Path) -> list[dict[str, Any]]:
    """Every row, as whoever reads the directory finds them, without what is null."""
    table = pyarrow.dataset.dataset(path).to_table()
    return [{name: value for name, value in row.items() if value is not None} for row in table.to_pylist()]


def schemas(path: Path) -> list[pa.Schema]:
    return [pyarrow.parquet.read_schema(file) for file in sorted(path.glob("part-*.parquet"))]


def test_rows_come_back_as_one_wide_table(tmp_path: Path) -> None:
    rows = log(tmp_path / "t", {"loss": 0.5, "note": "begun"}, {"loss": 0.25, "count": 3, "last": True})
    assert rows == [
        {"step": 1, "time": 1.7e9 + 0.25, "loss": 0.5, "note": "begun"},
        {"step": 2, "time": 1.7e9 + 0.5, "loss": 0.25, "count": 3.0, "last": 1.0},
    ]
    [schema] = schemas(tmp_path / "t")
    assert schema.names == ["step", "time", "loss", "note", "count", "last"]
    assert [str(kind) for kind in schema.types] == ["int64", "double", "double", "string", "double", "double"]


def test_numbers_that_are_not_finite_stay_what_they_are(tmp_path: Path) -> None:
    rows = log(tmp_path / "t", {"x": math.nan}, {"x": math.inf}, {"x": -math.inf}, {"y": 1})
    assert [repr(row.get("x")) for row in rows] == ["nan", "inf", "-inf", "None"]


def test_a_metric_that_appears_late_is_a_column_of_every_file(tmp_path: Path) -> None:
    rows = log(tmp_path / "t", *({"a": n} for n in range(7)), {"b": 1.5, "a": 7}, {"c": "text"}, rows_per_file=2)
    assert [row.get("a") for row in rows] == [*range(8), None]
    assert [row.get("b") for row in rows] == [*[None] * 7, 1.5, None]
    found = schemas(tmp_path / "t")
    assert len(found) == 5
    assert [schema.names for schema in found] == [["step", "time", "a", "b", "c"]] * 5
    assert all(schema.equals(found[0]) for schema in found)


def test_a_metric_that_was_a_number_and_a_text_is_a_column_of_texts(tmp_path: Path) -> None:
    rows = log(tmp_path / "t", {"x": 1.5}, {"x": 2}, {"x": "three"}, {"x": 4}, rows_per_file=1)
    assert [row["x"] for row in rows] == ["1.5", "2.0", "three", "4.0"]


def test_a_reader_finds_a_whole_table_at_every_moment(tmp_path: Path) -> None:
    path, seen = tmp_path / "t", []
    destination = ParquetLogger(str(path), rows_per_file=4, flush_interval=0)
    destination.open(RunContext("run", 1, None))
    for state in stream_of(*({"a": n} for n in range(1, 10))):
        destination.log_rows([Row(state.seq, state.time, {"a": state.seq})], state)
        seen.append([row["a"] for row in read(path)])
    assert seen == [[float(n) for n in range(1, last + 1)] for last in range(1, 10)]
    destination.close()
    assert [file.name for file in sorted(path.iterdir())] == [f"part-{n:05}.parquet" for n in range(3)]


def test_rows_are_written_at_intervals_of_the_run_s_own_time(tmp_path: Path) -> None:
    path, seen = tmp_path / "t", []
    destination = ParquetLogger(str(path), flush_interval=1)
    destination.open(RunContext("run", 1, None))
    for state in stream_of(*({"a": n} for n in range(1, 10))):  # four of them a second
        destination.log_rows([Row(state.seq, state.time, {"a": 1})], state)
        seen.append(len(read(path)))
    destination.close()
    assert seen == [1, 1, 1, 1, 5, 5, 5, 5, 9]


def test_it_holds_no_more_rows_than_a_file_has(tmp_path: Path) -> None:
    destination = ParquetLogger(str(tmp_path / "t"), rows_per_file=10, flush_interval=math.inf)
    destination.open(RunContext("run", 1, None))
    state = batch_end(1)
    destination.log_rows([Row(n, state.time, {"a": n}) for n in range(105)], state)
    assert len(read(tmp_path / "t")) >= 100
    destination.close()
    assert [row["a"] for row in read(tmp_path / "t")] == list(range(105))


VALUES = st.floats(-9, 9) | st.integers(-9, 9) | st.sampled_from(["x", "1"]) | st.just(math.nan)


@settings(max_examples=6, deadline=None)
@given(
    rows=st.lists(st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3), min_size=1, max_size=6),
    commit_every=st.integers(1, 3),
    rows_per_file=st.integers(1, 4),
)
def test_a_consumer_killed_at_any_moment_goes_on_to_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], commit_every: int, rows_per_file: int
) -> None:
    def make(place: Path) -> ParquetLogger:
        return ParquetLogger(str(place), rows_per_file, flush_interval=0.5)

    goes_on_after_every_kill(stream_of(*rows), make, tmp_path_factory.mktemp("killed"), commit_every)


@pytest.mark.slow
def test_after_kill_9_every_row_is_there_once(tmp_path: Path) -> None:
    logger = "offloop.consumers.loggers.parquet:ParquetLogger"
    directory = run_killed_and_again(tmp_path, logger, "ParquetLogger.rows_per_file=8")
    rows = read(directory / "metrics.parquet")
    assert [(row["step"], row["loss"]) for row in rows] == [(batch, 1 / batch) for batch in range(1, 61)]
    assert [row["since/50"] for row in rows if "since/50" in row] == [1 / batch for batch in range(50, 60)]
    assert not list((directory / "metrics.parquet").glob(".*"))


def test_a_table_that_exists_is_refused_unless_it_may_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "t"
    log(path, *[{"old": 1}] * 3, rows_per_file=1)
    with pytest.raises(ConfigurationError, match=r"t exists: '-o parquet\.overwrite=true'.*-o parquet\.path=DIR"):
        log(path, {"new": 1})
    assert len(read(path)) == 3
    assert [list(row) for row in log(path, {"new": 1}, overwrite=True)] == [["step", "time", "new"]]


def test_a_table_has_one_writer_at_a_time(tmp_path: Path) -> None:
    first = ParquetLogger(str(tmp_path / "t"))
    first.open(RunContext("run", 1, None))
    with pytest.raises(ConfigurationError, match="is being written by another process"):
        ParquetLogger(str(tmp_path / "t")).open(RunContext("run", 1, None))
    first.close()
    ParquetLogger(str(tmp_path / "t")).open(RunContext("run", 1, None))


def full(*_arguments: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_table_that_could_not_be_written_may_be_written_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t"
    first = ParquetLogger(str(path), flush_interval=math.inf)
    first.open(RunContext("run", 1, None))
    for state in stream_of({"a": 1.0}, {"a": 2.0}):
        first.log_rows([Row(state.seq, state.time, {"a": 1.0})], state)
    with monkeypatch.context() as patched:
        patched.setattr(pyarrow.parquet, "write_table", full)
        with pytest.raises(OSError, match="No space left"):
            first.close()
    assert [file.name for file in path.iterdir()] == ["part-00000.parquet"]
    second = ParquetLogger(str(path), overwrite=True)
    second.open(RunContext("run", 1, None))
    second.close()


def test_rows_that_did_not_fit_on_the_disk_are_written_when_it_has_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = ParquetLogger(str(tmp_path / "t"), flush_interval=0)
    logger.open(RunContext("run", 1, None))
    state = batch_end(1)
    with monkeypatch.context() as patched:
        patched.setattr(pyarrow.parquet, "write_table", full)
        with pytest.raises(OSError, match="No space left"):
            logger.log_rows([Row(1, state.time, {"a": 1.0})], state)
    logger.close()
    assert [row["a"] for row in read(tmp_path / "t")] == [1.0]


def test_each_attempt_of_a_run_has_a_table_of_its_own(tmp_path: Path) -> None:
    for attempt in (1, 2):
        destination = ParquetLogger()
        destination.open(RunContext("digits", attempt, tmp_path))
        destination.log_rows([Row(1, 0.0, {"x": attempt})], batch_end(1))
        destination.close()
    assert [row["x"] for row in read(tmp_path / "metrics-2.parquet")] == [2.0]
    assert [row["x"] for row in read(tmp_path / "metrics.parquet")] == [1.0]


def test_a_table_that_is_cut_back_has_the_columns_of_its_rows(tmp_path: Path) -> None:
    first = ParquetLogger(str(tmp_path / "t"), rows_per_file=1)
    first.open(RunContext("run", 1, None))
    first.log_rows([Row(1, 0.25, {"a": 1})], batch_end(1))
    position = first.state_dict()
    first.log_rows([Row(2, 0.5, {"a": "text", "b": 1})], batch_end(2))
    first.close()
    assert schemas(tmp_path / "t")[0].names == ["step", "time", "a", "b"]
    again = ParquetLogger(str(tmp_path / "t"), rows_per_file=1)
    again.load_state_dict(position)
    again.open(RunContext("run", 1, None))
    assert read(tmp_path / "t") == [{"step": 1, "time": 0.25, "a": 1.0}]
    again.close()


def test_one_destination_can_serve_one_run_after_the_other(tmp_path: Path) -> None:
    destination = ParquetLogger(rows_per_file=2)
    for name in ("a", "b"):
        destination.open(RunContext("run", 1, tmp_path / name))
        destination.log_rows([Row(n, 0.0, {name: n}) for n in range(3)], batch_end(1))
        destination.close()
    assert read(tmp_path / "b" / "metrics.parquet") == [{"step": n, "time": 0.0, "b": n} for n in range(3)]


def test_rows_that_were_committed_and_are_gone_are_told(tmp_path: Path) -> None:
    first = ParquetLogger(str(tmp_path / "t"), rows_per_file=2)
    first.open(RunContext("run", 1, None))
    for state in stream_of(*[{"a": 1}] * 5):
        first.log_rows([Row(state.seq, state.time, {"a": 1})], state)
    position = first.state_dict()
    first.close()
    (tmp_path / "t" / "part-00001.parquet").write_bytes(b"PAR1 damaged")
    again = ParquetLogger(str(tmp_path / "t"), rows_per_file=2)
    again.load_state_dict(position)
    with pytest.raises(ConfigurationError, match=r"lacks some of the 5 rows.*another '--name'.*parquet\.path=DIR"):
        again.open(RunContext("run", 1, None))
    with pytest.raises(ConfigurationError, match="have 2 rows, not 3"):
        ParquetLogger(rows_per_file=3).load_state_dict(position)


def test_where_it_cannot_write_the_message_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"cannot be written: Not a directory; '-o parquet\.path=DIR'"):
        ParquetLogger(str(tmp_path / "file" / "t")).open(RunContext("run", 1, None))
    with pytest.raises(ConfigurationError, match=r"no run directory.*-o parquet\.path=DIR"):
        ParquetLogger().open(RunContext("run", 1, None))
    with pytest.raises(ClosedError, match="open"):
        ParquetLogger().log_rows([Row(1, 0.0, {"x": 1})], batch_end(1))
    with pytest.raises(ConfigurationError, match="rows_per_file is at least 1, not 0"):
        ParquetLogger(rows_per_file=0)
    with pytest.raises(ConfigurationError, match="flush_interval"):
        ParquetLogger(flush_interval=-1)
