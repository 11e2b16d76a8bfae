"""The history of a long run: what its summary shows, and what zooming reads."""

import asyncio
import math
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from helpers import wait_for

from offloop.bus import Event, Publisher, Recording, Subscriber
from offloop.bus.protocol.frames import CHECKPOINT, COMMAND, Topic, event_encoder, pack_map
from offloop.bus.recording import records
from offloop.bus.recording.reader import RecordingReader
from offloop.bus.recording.summary import Summarizer
from offloop.bus.recording.writer import RecordingWriter
from offloop.bus.types.commands import Command
from offloop.consumers import Runner
from offloop.consumers.api.logger import Logger, LoggerDestination
from offloop.consumers.callbacks import SpeedMonitor
from offloop.consumers.dashboard.view import history, tap
from offloop.consumers.dashboard.view.run_view import RunView
from offloop.consumers.dashboard.view.series import Axis
from offloop.consumers.dashboard.view.tap import RunTap

START = 1_700_000_000_000_000_000
SECOND = 1_000_000_000
BATCHES, PER_EPOCH, PER_CHUNK = 6000, 1000, 50
LOW, HIGH = 3456, 1200
AXES = ("batch", "sample", "epoch", "time")
PHASES = {"began": START, "spans": [["forward", 0, SECOND // 10]], "device": False}


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tap, "MIN_BYTES", 0)
    monkeypatch.setattr(tap, "TAIL_BYTES", 20_000)


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "recording-1.mcap"
    seqs, context = [0, 0], {"dataloader_len": PER_EPOCH, "max_duration": f"{BATCHES}ba", "dataloader_label": "eval"}
    with closing(RecordingWriter(path, "run", 1)) as writer:

        def send(event: str, batch: int, fields: dict, rank: int = 0) -> None:
            seqs[rank] += 1
            topic, seq = Topic("run", event, rank), seqs[rank]
            counts = (0, batch // PER_EPOCH, batch, 8 * batch, 16 * batch, 0, 0, batch % PER_EPOCH, 0, 0)
            now = (*counts, batch * 10**6, 0, 0, 10**6)
            before = (0, 0, batch - 1, *now[3:]) if batch else None
            time = START + batch * SECOND + seq
            frame = event_encoder(topic, 1)(seq, seq, time, now, before, fields, pack_map(context))
            writer.append(topic.encode()[:-1], seq, seq, time, frame[len(topic.encode()) :])

        send("init", 0, {"hyperparameters": {"config": {"lr": 0.5}}})
        send("fit_start", 0, {})
        for batch in range(1, BATCHES + 1):
            loss = {LOW: -9.0, HIGH: 9.0}.get(batch, 1 / batch)
            fields = {"loss": loss, "lr": {"SGD": [loss / 2]}, "logged": [[batch, {"mine": loss, "count": batch % 7}]]}
            if batch % 10 == 0:
                fields |= {"phases": PHASES, "on_demand": ["phases"]}
            send("batch_end", batch, fields)
            of_other = {name: fields[name] for name in ("phases", "on_demand") if name in fields}
            send("batch_end", batch, {"loss": 5.0, **of_other}, rank=1)
            if batch % PER_EPOCH == 0:
                send("eval_end", batch, {"eval_metrics": {"eval": {"accuracy": batch / BATCHES}}})
            if batch == LOW:
                send(CHECKPOINT, batch, {"action": "save"})
                send(COMMAND, batch, {**Command("stop", id="a").to_wire(), "event": "batch_checkpoint"})
            if batch % PER_CHUNK == 0:
                writer.flush()
        send("fit_end", BATCHES, {})
        send("$end", BATCHES, {"status": "finished", "error": None})
    return path


@pytest.fixture
def recording(long_run: Path, tmp_path: Path) -> Path:
    copy = tmp_path / long_run.name
    copy.write_bytes(long_run.read_bytes())
    return copy


def summed_up(recording: Path) -> Path:
    summarizer = Summarizer(recording, "run", 1, None)
    summarizer.work(math.inf)
    summarizer.save()
    summarizer.close()
    return recording


def show(recording: Path) -> tuple[RunView, int]:
    run = RunView("run")
    handled = Runner(Recording(recording), [RunTap(run)], [run]).run().handled
    return run, handled


@pytest.fixture(scope="module")
def whole(long_run: Path) -> RunView:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tap, "MIN_BYTES", 1 << 40)
        run, handled = show(long_run)
    assert handled > 2 * BATCHES
    return run


@pytest.mark.parametrize("has_summary", [True, False])
def test_a_long_run_is_shown_from_its_summary_and_its_newest_events(
    recording: Path, whole: RunView, has_summary: bool
) -> None:
    if has_summary:
        summed_up(recording)
    run, handled = show(recording)
    view = run
    assert 10 < handled < BATCHES / 4, "only the newest events came"
    assert view.names() == whole.names()
    for name in whole.names():
        if name.startswith("throughput/"):
            continue
        shown, everything = view.series(name).points(width=10**9), whole.series(name).points(width=10**9)
        values = dict(zip(everything.xs.tolist(), everything.ys.tolist(), strict=True))
        assert dict(zip(shown.xs.tolist(), shown.ys.tolist(), strict=True)).items() <= values.items()
        assert view.series(name).last == whole.series(name).last
    speed = view.series("throughput/batches_per_sec").points(width=10**9).ys
    assert np.allclose(speed, 1.0)
    assert (view.status, view.progress()) == (whole.status, whole.progress())
    assert view.hyperparameters == whole.hyperparameters
    assert view.rank_count == 2
    assert [one.text for one in view.log()] == [one.text for one in whole.log()]
    marks, expected = (
        [(one.mark.kind, one.mark.batch, round(one.sample), round(one.seconds)) for one in each.marks().marks]
        for each in (view, whole)
    )
    assert sorted(marks) == sorted(expected)
    assert len(marks) == BATCHES // PER_EPOCH + 2
    phases = view.phases(0)
    assert phases.batches[0] < 200
    assert phases.batches[-1] == BATCHES


def zoom(run: RunView, axis: Axis, first: float, last: float, rank: int = 0) -> None:
    assert run.history is not None
    before = run.refined
    run.history.request(axis, first, last, rank)
    wait_for(lambda: run.refined > before, "the part")


@pytest.mark.parametrize(
    ("axis", "first", "last"),
    [("epoch", 3.4, 3.5), ("time", 3400, 3500)],
)
def test_a_zoom_reads_the_part_that_is_shown_and_no_more(
    recording: Path, whole: RunView, axis: Axis, first: float, last: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = show(summed_up(recording))
    decoded: list[int] = []
    decode = records.Chunk.decode
    monkeypatch.setattr(records.Chunk, "decode", lambda record: decoded.append(len(record)) or decode(record))
    zoom(run, axis, first, last)
    assert len(decoded) <= 10, "of 120 chunks"
    for name in whole.names():
        found, expected = (one.series(name).points(axis, first, last, 10**6) for one in (run, whole))
        np.testing.assert_allclose(found.xs, expected.xs)
        np.testing.assert_allclose(found.ys, expected.ys)
    inside = [batch for batch in run.phases(0).batches.tolist() if 3400 <= batch <= 3500]
    assert inside == list(range(3400, 3501, 10))
    assert len([batch for batch in run.phases(1).batches.tolist() if 3400 <= batch <= 3500]) == 0
    zoom(run, axis, first, last, rank=1)
    assert len([batch for batch in run.phases(1).batches.tolist() if 3400 <= batch <= 3500]) == 11
    before = run.refined
    run.history.request(axis, first, last)
    assert run.history._requested == {}
    assert run.refined == before, "it has been read"


def test_a_zoom_across_what_is_new_has_both_and_the_last_one_of_many_is_read(recording: Path, whole: RunView) -> None:
    run, _ = show(summed_up(recording))
    zoom(run, "batch", BATCHES - 2000, BATCHES)
    found, expected = (
        one.series("loss/train/total").points("time", BATCHES - 2000, BATCHES, 10**6) for one in (run, whole)
    )
    np.testing.assert_array_equal(found.xs, expected.xs)
    np.testing.assert_array_equal(found.ys, expected.ys)
    for begin in range(0, 4000, 50):
        run.history.request("batch", begin, begin + 20)  # type: ignore[union-attr]
    wait_for(lambda: not run.history._is_reading, "the reader to end")  # type: ignore[union-attr]
    assert len([step for step in run.series("mine").points(width=10**6).xs if 3950 <= step <= 3970]) == 21


def test_what_is_not_zoomed_far_enough_or_is_new_is_not_read(recording: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = show(summed_up(recording))
    assert run.history is not None
    monkeypatch.setattr(history, "MAX_BYTES", 20_000)
    for shown in ((0, BATCHES), (-10, 2 * BATCHES), (BATCHES - 3, BATCHES), (2 * BATCHES, 3 * BATCHES)):
        run.history.request("batch", *shown)
        assert run.history._requested == {}


def test_a_damaged_chunk_costs_a_zoom_no_more_than_its_values(recording: Path) -> None:
    summed_up(recording)
    with RecordingReader(recording) as reader:
        damaged = next(reader.position for found in reader.read() for one in found if b"\xcb\xc0\x22\0\0" in one[1])
    with recording.open("r+b") as file:
        file.seek(damaged + 200)
        file.write(b"damage")
    run, _ = show(recording)
    assert run.history is not None
    zoom(run, "batch", 3300, 3600)
    steps = run.series("loss/train/total").points("batch", 3300, 3600, 10**6).xs
    assert 200 < len(steps) < 300
    recording.unlink()
    run.history.request("batch", 100, 120)
    wait_for(lambda: not run.history._is_reading, "the reader to end")
    assert run.refined == 1


def test_a_live_run_continues_behind_what_its_summary_has(runs_dir: Path) -> None:
    with Publisher("live") as publisher:
        for batch in range(1, 2001):
            publisher.publish(Event.BATCH_END, batch=batch, loss=1 / batch)
        wait_for(lambda: publisher.poll() or publisher.statistics().acknowledged >= 2000, "events on disk")
        run, seen = RunView("live"), []

        async def follow() -> None:
            with closing(Subscriber("live")) as subscriber:
                await RunTap(run).prepare(subscriber, Logger())
                publisher.publish(Event.BATCH_END, batch=2001, loss=7.0)
                publisher.close("finished")
                async for state in subscriber:
                    seen.append(state.timestamp.values.batch)
                    run.see(state)

        asyncio.run(follow())
    assert seen == list(range(seen[0], 2002))
    assert run.series("loss/train/total").last == 7.0
    assert run.series("loss/train/total").points(width=10**6).ys[0] == 1.0


def test_a_history_whose_end_is_not_found_is_read_event_by_event(
    recording: Path, whole: RunView, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tap, "next_check_record", lambda path, offset: None)
    run, handled = show(summed_up(recording))
    assert handled > 2 * BATCHES
    assert run.history is None
    for axis in AXES:
        found, expected = (one.series("loss/train/total").points(axis, width=10**6) for one in (run, whole))
        np.testing.assert_array_equal(found.xs, expected.xs)
    assert run.progress() == whole.progress()
    assert [one.text for one in run.log()] == [one.text for one in whole.log()]


@pytest.mark.parametrize("is_beside", [True, False])
def test_hyperparameters_reach_every_destination_once(recording: Path, is_beside: bool) -> None:
    found: list[dict] = []

    class Collects(LoggerDestination):
        def log_hyperparameters(self, hyperparameters, state) -> None:
            found.append(dict(hyperparameters))

    run = RunView("run")
    callback = RunTap(run)
    shared = [SpeedMonitor()] if is_beside else [callback]
    runner = Runner(Recording(summed_up(recording)), shared, [run, Collects()])
    if is_beside:
        runner.run_beside("tap", callback, Recording(recording))
    runner.run()
    assert len(found) == 1
    assert run.hyperparameters == found[0] != {}
    assert run.history is not None
