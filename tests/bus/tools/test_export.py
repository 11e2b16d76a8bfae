"""``offloop export``: what other tools read is what was recorded."""

import base64
import csv
import json
import math
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recorded_runs import Entry, write_recording
from recording_files import append, file_limit, spoil
from run_folders import WrittenRun

from offloop.bus import ConfigurationError, Event, Recording, RunDirectoryError
from offloop.bus.cli.recordings import export_recording
from offloop.bus.recording.writer import RecordingWriter
from offloop.bus.tools import export as tables
from offloop.bus.tools.convert import convert
from offloop.bus.tools.export import export
from offloop.bus.tools.rows import FIXED, FORMATS

quick = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5)
leaves = scalars | st.binary(max_size=5) | st.lists(scalars, max_size=3)
names = st.sampled_from(["loss", "lr", "a", "time", "event", "x"])
maps = st.dictionaries(names, leaves, max_size=3)
fields = st.dictionaries(names, leaves | maps | st.lists(maps, max_size=2), max_size=4)
events = st.sampled_from(["batch_end", "loss"])
streams = st.lists(
    st.tuples(events, fields, maps).map(lambda drawn: Entry(drawn[0], 0, 0, *drawn[1:])), min_size=1, max_size=4
)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(export_recording, [str(argument) for argument in arguments], catch_exceptions=False)


def exported(path: Path, to: str, **options: Any) -> Path:
    output = path.with_name(f"out.{to}")
    export(path, output, to, force=True, **options)
    return output


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text("utf-8").split("\n")[:-1]]


def same(one: Any, other: Any) -> bool:
    """Equal in type and value, NaN like NaN and -0.0 unlike 0.0."""
    return repr(one) == repr(other)


@pytest.fixture
def trained(runs_dir) -> Path:
    """Return the recording of two epochs with an evaluation."""
    run = WrittenRun(runs_dir, "trained").train([1 / (1 + batch) for batch in range(20)], accuracy=0.5)
    run.send(Event.BATCH_END, {"logged": [[20, {"own": 7.5}]]})
    return run.end() / "recording-1.mcap"


def test_a_row_begins_with_run_rank_and_time(trained):
    first = "run,attempt,rank,seq,event,time,utc,epoch,batch,sample,token"
    assert exported(trained, "csv").read_text().startswith(first)
    states, table = list(Recording(trained)), pa.parquet.read_table(exported(trained, "parquet"))
    assert table.column_names[:11] == first.split(",")
    assert table.schema.field("utc").type == pa.timestamp("ns", tz="UTC")
    assert table["utc"].cast(pa.int64()).to_pylist()[:-1] == [state.time_ns for state in states]
    *rows, end = read_csv(exported(trained, "csv"))
    for row, state in zip(rows, states, strict=True):
        assert (row["run"], int(row["attempt"]), int(row["rank"])) == ("trained", 1, 0)
        assert float(row["time"]) == state.time
        moment, _, nanoseconds = row["utc"].removesuffix("Z").partition(".")
        seconds = int(datetime.fromisoformat(moment).replace(tzinfo=UTC).timestamp())
        assert seconds * 10**9 + int(nanoseconds) == state.time_ns
        assert float(row["total_wct"]) == state.timestamp.total_wct.total_seconds()
    # The end is a row without training time.
    assert (end["event"], end["status"], end["batch"]) == ("$end", "finished", "")


def test_commands_are_rows_unless_events_are_chosen(tmp_path):
    command = {"command": "set", "arguments": ["lr", 0.5], "id": "x", "event": "batch_end", "error": None}
    write_recording(tmp_path / "a.mcap", [Entry(batch=1), Entry("$command", 0, 1, command), Entry("$demand", 0, 1)])
    rows = read_jsonl(exported(tmp_path / "a.mcap", "jsonl"))
    assert [row["event"] for row in rows] == ["batch_end", "$command"]
    # The event at which it took effect is not the row's own.
    assert (rows[1]["fields/event"], rows[1]["arguments"]) == ("batch_end", ["lr", 0.5])
    chosen = exported(tmp_path / "a.mcap", "jsonl", events=[Event.BATCH_END])
    assert [row["event"] for row in read_jsonl(chosen)] == ["batch_end"]


def test_damage_without_a_whole_event_is_reported_with_its_offset(tmp_path):
    path = tmp_path / "a.mcap"
    write_recording(path, [Entry(batch=1, fields={"text": "words " * 100})])
    os.truncate(path, path.read_bytes().index(b"words"))
    with pytest.raises(
        ConfigurationError, match=r"^no whole event of \S+ is chosen: \S+ ends within .* at offset \d+; "
    ):
        exported(path, "csv")


def test_the_timeline_is_that_of_the_recording(trained):
    drawn = json.loads(exported(trained, "trace").read_text())
    assert "batches" in {one["args"].get("name") for one in drawn if one.get("name") == "thread_name"}
    assert sum(one["ph"] == "C" and "loss" in one["args"] for one in drawn) == 20
    assert any("finished" in one.get("name", "") for one in drawn if one["ph"] == "i")


def as_json(value: Any) -> Any:
    """Return a value as strict JSON has it."""
    if isinstance(value, dict):
        return {name: as_json(item) for name, item in value.items()}
    if isinstance(value, list):
        return [as_json(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def columns_of(entry: Entry) -> dict[str, Any]:
    """Return the columns that an event's fields are in."""
    columns = {}
    for name, value in {**entry.context, **entry.fields}.items():
        name = f"fields/{name}" if name in FIXED else name
        columns |= {f"{name}/{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
    return columns


def write_anew(folder: Path, stream: list[Entry]) -> Path:
    path = folder / "a.mcap"
    path.unlink(missing_ok=True)
    write_recording(path, stream)
    return path


def check_cell(value: Any, found: Any, kind: pa.DataType) -> None:
    """Check that a value of a Parquet file, or of a list in one, is the recorded one."""
    if value is None:
        assert found is None
    elif pa.types.is_list(kind):
        assert len(value) == len(found)
        for one, other in zip(value, found, strict=True):
            check_cell(one, other, kind.value_type)
    elif pa.types.is_float64(kind):
        assert same(found, float(value))
    elif pa.types.is_string(kind) and not isinstance(value, str):
        assert same(json.loads(found), as_json(value))
    else:
        assert same(found, value)


@quick
@given(stream=streams)
def test_every_value_reads_back_as_it_was_recorded(tmp_path, stream):
    path = write_anew(tmp_path, stream)
    for row, entry in zip(read_csv(exported(path, "csv")), stream, strict=True):
        for name, value in columns_of(entry).items():
            cell = row.pop(name)
            if value is None:
                assert cell == ""
            elif isinstance(value, str | bytes):
                assert cell == as_json(value)
            elif isinstance(value, float):
                assert same(float(cell), value)
            else:
                assert same(json.loads(cell), as_json(value))
        assert all(cell == "" for name, cell in row.items() if name not in FIXED)
    for row, entry in zip(read_jsonl(exported(path, "jsonl")), stream, strict=True):
        for name, value in {**entry.context, **entry.fields}.items():
            assert same(row[f"fields/{name}" if name in FIXED else name], as_json(value))
    table = pa.parquet.read_table(exported(path, "parquet"))
    for row, entry in zip(table.to_pylist(), stream, strict=True):
        columns = columns_of(entry)
        for name, value in columns.items():
            check_cell(value, row[name], table.schema.field(name).type)
        assert all(value is None for name, value in row.items() if name not in columns and name not in FIXED)


def test_a_column_has_the_type_of_what_is_in_it(tmp_path):
    columns: list[tuple[list[Any], pa.DataType]] = [
        ([1, None, -(2**63)], pa.int64()),
        ([2**64 - 1, 0], pa.string()),
        ([1, 0.5, math.nan], pa.float64()),
        ([2**53, 0.5], pa.float64()),
        ([2**53 + 1, 0.5], pa.string()),
        ([[1 - 2**60, 0.5]], pa.string()),
        ([True, None], pa.bool_()),
        (["a", 1.5], pa.string()),
        ([b"a"], pa.binary()),
        ([[1, 2], [0.5], []], pa.list_(pa.float64())),
        ([[[1]], None], pa.list_(pa.list_(pa.int64()))),
        ([[{"a": 1}]], pa.string()),
        ([None], pa.null()),
    ]
    for values, kind in columns:
        path = write_anew(tmp_path, [Entry(fields={"x": value}) for value in values])
        column = pa.parquet.read_table(exported(path, "parquet"))["x"]
        assert column.type.equals(kind)
        for value, found in zip(values, column.to_pylist(), strict=True):
            check_cell(value, found, kind)


def test_no_value_hides_another_one(tmp_path):
    fields = {"a": {"b": 1, "c": {"d": 2}}, "a/b": 3, "rank": 4, "seq": {"x": 5}}
    path = write_anew(tmp_path, [Entry(fields=fields)])
    (row,) = read_csv(exported(path, "csv"))
    assert (row["a/b"], row["a/b'"], row["a/c/d"], row["rank"], row["fields/rank"]) == ("1", "3", "2", "0", "4")
    assert row["fields/seq/x"] == "5"
    path = write_anew(tmp_path, [Entry(fields={"x": "", "y": None, "z": 'a"b,\r\nc'})])
    assert exported(path, "csv").read_bytes().decode().endswith(',"",,"a""b,\r\nc"\n'), "an empty text is not None"


def test_parquet_is_written_in_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "_ROWS_IN_A_GROUP", 10)
    path = write_anew(tmp_path, [Entry(batch=batch, fields={"x": batch}) for batch in range(25)])
    with pa.parquet.ParquetFile(exported(path, "parquet")) as file:
        assert [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)] == [10, 10, 5]
        assert file.read()["x"].to_pylist() == list(range(25))


def test_what_is_recorded_between_two_passes_is_left_for_the_next_export(tmp_path, monkeypatch):
    path = tmp_path / "a.mcap"
    writer = RecordingWriter(path, "r", 1)
    append(writer, 1)
    writer.flush()

    groups = tables._groups

    def late(*arguments: Any) -> Any:
        if writer.written == 1:
            append(writer, 2)
            writer.flush()
        return groups(*arguments)

    monkeypatch.setattr(tables, "_groups", late)
    assert pa.parquet.read_table(exported(path, "parquet")).num_rows == 1
    assert pa.parquet.read_table(exported(path, "parquet")).num_rows == 2
    writer.close()


def test_of_a_damaged_recording_everything_whole_is_exported(tmp_path):
    path = tmp_path / "a.mcap"
    write_recording(path, [Entry(batch=batch) for batch in range(1, 21)])
    spoil(path, 700)
    for to in FORMATS:
        result = run(path, "--to", to)
        assert result.exit_code == 3
        assert "exported 15 events of" in result.output
        assert "is damaged at offset" in result.output
        assert "missing: events " in result.output


def test_a_recording_without_its_ending_and_a_part_of_one_are_whole(tmp_path):
    path = tmp_path / "a.mcap"
    write_recording(path, [Entry(batch=batch) for batch in range(1, 8)], footer=False)
    result = run(path, "--to", "jsonl")
    assert (result.exit_code, len(result.output.splitlines())) == (0, 2)
    convert([path], tmp_path / "p.mcap", "3ba", "4ba")
    result = run(tmp_path / "p.mcap", "--to", "csv")
    assert result.exit_code == 0
    assert "left out: events 1 to 2 of rank 0\nleft out: events 5 to 7 of rank 0\n" in result.output
    assert [row["seq"] for row in read_csv(tmp_path / "p.csv")] == ["3", "4"]


def test_events_and_ranks_are_chosen(tmp_path):
    path = tmp_path / "a.mcap"
    write_recording(path, [Entry(name, rank) for name in ("batch_end", "epoch_end") for rank in (0, 1, 2)])
    run(path, "--to", "csv", "--events", "epoch_end, EPOCH_START", "--ranks", "0,2")
    assert [(row["event"], row["rank"]) for row in read_csv(tmp_path / "a.csv")] == [
        ("epoch_end", "0"),
        ("epoch_end", "2"),
    ]


def test_a_mistake_is_named_and_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.mcap", "nothing.mcap"):
        write_recording(tmp_path / name, [Entry()])
    for arguments, message in (
        (["--events", "batch_edn"], "batch_end"),
        (["--events", ","], "--events"),
        (["--ranks", "3"], "'--ranks'"),
        (["-o", "nothing.mcap/x.csv"], "'--output'"),
    ):
        result = CliRunner().invoke(export_recording, ["a.mcap", "--to", "csv", *arguments])
        assert result.exit_code == 1
        assert message in str(result.exception)
    with pytest.raises(ConfigurationError, match="did you mean jsonl"):
        export(tmp_path / "a.mcap", tmp_path / "b", "jsnol")
    assert sorted(os.listdir()) == ["a.mcap", "nothing.mcap"]


def test_a_file_that_is_there_stays_unless_told_otherwise(tmp_path):
    path = write_anew(tmp_path, [Entry()])
    output = tmp_path / "a.csv"
    output.write_text("mine")
    with pytest.raises(ConfigurationError, match="exists"):
        export(path, output, "csv")
    assert output.read_text() == "mine"
    export(path, output, "csv", force=True)
    assert output.read_text().startswith("run,")
    with pytest.raises(ConfigurationError, match="is an input"):
        export(path, path, "csv", force=True)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigurationError, match="pipe is not a file"):
        export(path, pipe, "csv", force=True)
    assert pipe.is_fifo()
    link = tmp_path / "link"
    link.symlink_to(output)
    output.write_text("mine")
    export(path, link, "csv", force=True)
    assert link.is_symlink()
    assert output.read_text().startswith("run,")


def test_a_full_disk_leaves_nothing_half_written(tmp_path):
    path = write_anew(tmp_path, [Entry(batch=batch, fields={"x": os.urandom(3000).hex()}) for batch in range(3)])
    for to in FORMATS:
        with file_limit(400), pytest.raises(RunDirectoryError, match="cannot write"):
            export(path, tmp_path / "out", to)
        assert [path.name for path in tmp_path.iterdir()] == ["a.mcap"]


def test_without_pyarrow_it_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = write_anew(tmp_path, [Entry()])
    with pytest.raises(ConfigurationError, match=r"pip install 'offloop\[parquet\]'"):
        export(path, tmp_path / "b.parquet", "parquet")
    export(path, tmp_path / "b.csv", "csv")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.mcap", "b.csv"]
