"""Events, spans and tables of a training's own, from the loop to callbacks, files and frames."""

import csv
import io
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from click.testing import CliRunner
from timeline_stream import MS, RankStream
from trace_rules import read_trace
from training import Act, gold_trainer
from watched_loop import Loop

import offloop
from offloop.bus import ConfigurationError, Event, Recording, Snapshot, find_run
from offloop.bus.cli.recordings import export_recording
from offloop.bus.recording.tables import read_rows
from offloop.bus.tools.trace import TraceWriter
from offloop.bus.types.event import ANY_CUSTOM
from offloop.consumers import Callback, Logger
from offloop.consumers.callbacks import Tables, Trace
from offloop.consumers.testing import MemoryStream, replay
from offloop.trainer import AlgorithmLogger, State

pytestmark = pytest.mark.usefixtures("runs_dir")


def recorded(run: str = "r") -> list[Snapshot]:
    return list(Recording(find_run(run).path))


def own(run: str = "r") -> list[str]:
    return [one.event.value for one in recorded(run) if one.event.is_own]


def sampled(**options: Any) -> Loop:
    """A watched loop with an event, a span and a row in each batch."""
    loop = Loop()

    def after_batch() -> None:
        run = loop.run
        run.event("batch_done", loss=loop.losses[-1])
        with run.span("think"):
            pass
        run.log_table("samples", lambda: [{"text": "a", "loss": loop.losses[-1]}])

    loop.after_batch = after_batch
    loop.watched(1, run_name="r", **options)
    return loop


def test_what_nobody_requests_is_not_published_and_the_weights_are_the_same() -> None:
    plain = Loop().plain(1)
    quiet = sampled()
    assert own() == []
    loud = sampled(record="all")
    assert own("r-2") == ["@batch_done", "@think", "#samples"] * quiet.batches
    for one in (quiet, loud):
        assert all(map(torch.equal, one.weights, plain.weights))


def test_each_is_recorded_between_its_batches_with_their_training_time() -> None:
    sampled(record="@batch_done,#samples")
    events = [one for one in recorded() if one.event.is_own or one.event is Event.BATCH_END]
    assert [one.event.value for one in events[:3]] == ["@batch_done", "#samples", "batch_end"]
    # The batch ends when the next one is fetched.
    assert [one.timestamp.batch for one in events if one.event.is_table] == list(range(10))
    assert [one.step for one in events if one.event.is_table] == list(range(10))


class Unshown:
    def __repr__(self) -> str:
        raise RuntimeError("it has no text")


def test_mistakes_are_reported_and_the_training_continues(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop()

    def after_batch() -> None:
        loop.run.event("a b")
        loop.run.event("bad", value=object())
        loop.run.log_table("bad", [[1]])
        loop.run.log_table("fails", lambda: {}["mine"])
        with loop.run.span("bad", value=object()):
            pass
        loop.run.event(Unshown())  # type: ignore[arg-type]
        loop.run.log_table(Unshown(), [])  # type: ignore[arg-type]
        with loop.run.span([]):  # type: ignore[arg-type]
            pass

    loop.after_batch = after_batch
    loop.watched(1, run_name="r", record="all")
    assert not loop.run.detached
    assert len(loop.losses) == loop.batches
    shown = ("event a b", "event bad", "table bad", "table fails", "span bad", "span []")
    for what in (*shown, "event a Unshown that cannot be shown", "table a Unshown that cannot be shown"):
        assert caplog.text.count(f"{what} is left out") == 1


def test_an_algorithm_of_a_trainer_logs_them() -> None:
    def log(event: Event, state: State, logger: AlgorithmLogger) -> None:
        logger.event("sampled", n=1)
        with logger.span("judge"):
            logger.log_table("samples", [{"text": "x", "score": torch.tensor(0.5)}])

    def train(**options: Any) -> list[torch.Tensor]:
        trainer = gold_trainer(run_name="t", algorithms=[Act(log, Event.BATCH_END)], max_duration="1ep", **options)
        with trainer:
            trainer.fit()
        return list(trainer.state.model.parameters())

    weights = train(publish=True, record="@*")
    assert own("t") == ["@sampled", "#samples", "@judge"] * 4
    parts = list(read_rows([Recording(find_run("t").path)]))
    assert [(part.step, part.rows) for part in parts] == [(step, [["x", 0.5]]) for step in (1, 2, 3, 4)]
    assert all(map(torch.equal, weights, train(publish=False)))


class Rewards(Callback):
    @Callback.on("rollout_end")
    def reward(self, state: Snapshot, logger: Logger) -> None:
        logger.log_metrics({"reward": state.reward})

    @Callback.on("#completions")
    def rows(self, state: Snapshot, logger: Logger) -> None:
        logger.log_metrics({"rows": len(state.rows)})


class Everything(Callback):
    def __init__(self) -> None:
        self.seen: list[str] = []

    @Callback.on("*", "#*")
    def note(self, state: Snapshot, logger: Logger) -> None:
        self.seen.append(state.event.value)


def made_up() -> MemoryStream:
    stream = MemoryStream()
    stream.batch(loss=1.0)
    stream.emit("@rollout_end", reward=0.25)
    stream.emit("@other")
    stream.emit("#completions", step=1, columns=["text", "ids"], rows=[["a", [1, 2]], ["b", []]])
    stream.finish()
    return stream


def test_a_callback_handles_events_by_name_and_all_of_a_kind() -> None:
    everything = Everything()
    assert replay([Rewards(), everything], made_up()).last == {"reward": 0.25, "rows": 2}
    assert everything.seen == ["@rollout_end", "@other", "#completions"]
    with pytest.raises(ConfigurationError, match="cannot name"):
        Callback.on("rollout end")


def test_loggers_get_the_rows() -> None:
    logged = replay(Tables(), made_up())
    (table,) = logged.tables
    assert (table.name, table.step, table.columns, table.rows) == (
        *("completions", 1, ["text", "ids"]),
        [["a", "[1, 2]"], ["b", "[]"]],
    )
    assert replay(Tables(tables=("other",)), made_up()).tables == []


def test_trace_requests_what_a_timeline_shows() -> None:
    loop = Loop()

    def after_batch() -> None:
        deadline = time.monotonic() + 150
        while ANY_CUSTOM not in loop.run.requested_events and time.monotonic() < deadline:
            time.sleep(0.02)
            loop.run.log(other=1.0)
            loop.run._training.publisher.poll()
        with loop.run.span("think"):
            pass

    loop.after_batch = after_batch
    loop.watched(1, run_name="r", callbacks=[Trace()])
    assert own() == ["@think"] * loop.batches
    assert any("phases" in one.fields for one in recorded())


def export_table(to: str, table: str = "samples") -> Path:
    CliRunner().invoke(export_recording, ["r", "--to", to, "--table", table], catch_exceptions=False)
    return Path(find_run("r").path) / f"recording-1-samples.{to}"


def test_a_table_is_exported_to_parquet_csv_and_jsonl() -> None:
    sampled(record="all")
    table = pyarrow.parquet.read_table(export_table("parquet"))
    assert {field.name: str(field.type) for field in table.schema} == {
        "step": "int64",
        "time": "double",
        "rank": "int64",
        "attempt": "int64",
        "text": "string",
        "loss": "double",
        "utc": "timestamp[ns, tz=UTC]",
    }
    rows = list(csv.DictReader(export_table("csv").read_text().splitlines()))
    lines = [json.loads(line) for line in export_table("jsonl").read_text().splitlines()]
    assert table["step"].to_pylist() == [line["step"] for line in lines] == list(range(10))
    assert [row["step"] for row in rows] == [str(step) for step in range(10)]
    assert set(rows[0]) == set(table.column_names)
    with pytest.raises(ConfigurationError, match=r"no table 'sample': did you mean samples\?"):
        export_table("csv", "sample")


def test_a_frame_has_the_rows_of_all_attempts() -> None:
    sampled(record="all")
    run = offloop.runs()["r"]
    assert run.tables() == {"samples": 10}
    frame = run.table("samples")
    assert list(frame.columns) == ["step", "time", "rank", "attempt", "text", "loss"]
    assert frame["step"].tolist() == list(range(10))
    with pytest.raises(ConfigurationError, match="no table 'x'"):
        run.table("x")


def test_an_image_of_a_table_is_found_by_its_hash() -> None:
    red = np.zeros((2, 3, 3), np.uint8)
    red[..., 0] = 255
    png = b"\x89PNG\r\n\x1a\n.."
    with offloop.Publisher("images") as publisher:
        publisher.log_table("first", [{"image": offloop.Image(red)}, {"image": offloop.Image(png)}])
        publisher.log_table("second", [{"image": offloop.Image(red)}])
    run = offloop.runs()["images"]
    pixels, file = run.table("first", to="dict")["image"]
    assert run.table("second", to="dict")["image"] == [pixels]
    assert np.array_equal(run.image(pixels), red)
    assert run.image(file) == png
    with pytest.raises(ConfigurationError, match="no image 'x'"):
        run.image("x")


def test_spans_are_drawn_within_one_another_and_side_by_side_where_they_overlap() -> None:
    stream = RankStream(0)
    spans = [  # name, its end in ms, its duration, id, parent
        *(("inner", 8, 3, 2, 1), ("other", 9, 8, 3, 0), ("outer", 10, 9, 1, 0)),
        *(("left", 18, 6, 5, 4), ("right", 19, 6, 6, 4), ("both", 20, 9, 4, 0), ("orphan", 30, 5, 8, 7)),
    ]
    file = io.StringIO()
    writer = TraceWriter(file)
    writer.see(stream.event(Event.INIT))
    before = 0
    for name, end, duration, number, parent in spans:
        event = stream.event(Event(f"@{name}"), end - before, span=[number, parent, duration * MS], n=number)
        writer.see(event)
        before = end
    writer.see(stream.event(Event("@mark"), 1, n=9))
    writer.close()
    trace = read_trace(file.getvalue())
    found = {
        track: [(one.name, float(one.began) / 1000, float(one.ended or 0) / 1000) for one in trace.on(track)]
        for track in ("spans", "spans 2")
    }
    assert found == {
        "spans": [("other", 1, 9), ("both", 11, 20), ("left", 12, 18), ("orphan", 25, 30)],
        "spans 2": [("outer", 1, 10), ("inner", 5, 8), ("right", 13, 19)],
    }
    assert {one.name: one.args["n"] for one in trace.slices}["outer"] == 1
    assert [one.name for one in trace.instants] == ["run run, attempt 1", "mark"]
