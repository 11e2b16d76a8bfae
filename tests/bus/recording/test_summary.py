"""The summary beside a long recording: what is in it, and that it can be lost."""

import math
import os
import signal
import struct

import pytest
from brokers import broker_pid
from helpers import wait_for
from hypothesis import given, settings
from hypothesis import strategies as st

from offloop.bus import Event, Publisher
from offloop.bus.protocol.frames import Topic, event_encoder, pack_map
from offloop.bus.recording import summary as summaries
from offloop.bus.recording.summary import Metric, Summarizer, Summary, path_beside
from offloop.bus.recording.writer import RecordingWriter
from offloop.bus.runs.directory import find_run
from offloop.bus.types.metrics import shown_step

START = 1_700_000_000_000_000_000
VALUES = st.floats(allow_nan=True, allow_infinity=True, width=64)


def record(path, losses, run="run", attempt=1, run_id=None):
    """Write batches of two ranks with an evaluation after each tenth, and return the open writer."""
    writer, context = RecordingWriter(path, run, attempt, run_id), pack_map({"dataloader_len": 100})
    seqs = [0, 0]

    def send(event, rank, batch, fields):
        seqs[rank] += 1
        topic, seq = Topic(run, event, rank), seqs[rank]
        now = (0, batch // 100, batch, 8 * batch, 0, 0, 0, batch % 100, 0, 0, 1000 * batch, 0, 0, 1000)
        before = (0, 0, batch - 1, *now[3:]) if batch else None
        frame = event_encoder(topic, attempt)(seq, seq, START + batch * 10**6, now, before, fields, context)
        writer.append(topic.encode()[:-1], seq, seq, START, frame[len(topic.encode()) :])

    send("fit_start", 0, 0, {})
    for batch, loss in enumerate(losses, 1):
        send("batch_end", 0, batch, {"loss": loss, "lr": {"SGD": [0.5 / batch]}, "note": "text"})
        send("batch_end", 1, batch, {"loss": -1000.0})
        if batch % 10 == 0:
            evaluated = {"eval_metrics": {"eval": {"accuracy": loss}, "other": {"accuracy": 0.0}}}
            send("eval_end", 0, batch, {**evaluated, "dataloader_label": "eval", "logged": [[batch, {"mine": 1}]]})
        if batch % 7 == 0:
            writer.flush()
    return writer


def summary_of(path, run="run", attempt=1, run_id=None):
    summarizer = Summarizer(path, run, attempt, run_id)
    summarizer.work(math.inf)
    summarizer.save()
    summarizer.close()
    return summarizer.summary


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 400), VALUES), max_size=400), st.integers(1, 30))
def test_each_bucket_holds_minimum_maximum_and_last_of_all_its_values(points, most):
    points.sort(key=lambda point: point[0])
    metric = Metric()
    for step, value in points:
        metric.add(step, value)
        metric.widen(most)
    assert len(metric.buckets) <= most
    expected = {}
    for step, value in points:
        expected.setdefault(step // metric.width, []).append((step, value))
    assert metric.buckets.keys() == expected.keys()
    for place, values in expected.items():
        bucket, finite = metric.buckets[place], [value for _, value in values if math.isfinite(value)]
        assert (bucket.last_step, repr(bucket.last)) == (values[-1][0], repr(values[-1][1]))
        assert bucket.odd == sum({summaries.ODD[str(value)] for _, value in values if not math.isfinite(value)})
        assert (bucket.low_step >= 0) == bool(finite)
        if finite:
            assert (bucket.low, bucket.high) == (min(finite), max(finite))
            assert (bucket.low_step, bucket.low) in values
            assert (bucket.high_step, bucket.high) in values
    if points:
        until = points[len(points) // 2][0]
        assert points[0][0] <= metric.first_step < points[0][0] + metric.width
        before, earlier = metric.whole(until), [one for one in points if one[0] < until and math.isfinite(one[1])]
        assert before.low_step < 0 or {(before.low_step, before.low), (before.high_step, before.high)} <= {*earlier}
        if earlier and metric.width == 1:
            values = [value for _, value in earlier]
            assert (before.low, before.high) == (min(values), max(values))


def test_a_summary_covers_the_first_rank_and_is_continued_at_its_end(tmp_path):
    path = tmp_path / "recording-1.mcap"
    losses = [math.sin(batch * batch) for batch in range(3000)]
    losses[77], losses[1234] = 99.0, math.nan
    writer = record(path, losses)
    writer.flush()
    part = summary_of(path)
    assert Summary.load(path) == part
    writer.close()
    whole = summary_of(path)
    path_beside(path).unlink()
    anew = summary_of(path)
    assert whole == anew
    assert set(whole.metrics) == {"loss/train/total", "lr-SGD/group0", "metrics/eval/accuracy", "mine"}
    loss = whole.metrics["loss/train/total"]
    assert len(loss.buckets) <= summaries.MAX_BUCKETS
    assert loss.buckets[77 // loss.width].high == 99.0
    assert loss.buckets[1234 // loss.width].odd == summaries.ODD["nan"]
    assert max(loss.buckets) == 2999 // loss.width
    assert loss.buckets[max(loss.buckets)].last == losses[-1]
    assert max(tick.batch for tick in whole.clock.values()) == 3000


def log_many(path, steps, writer=None, first=1):
    """Write batches that log many values each, by step, and return the open writer."""
    writer, topic = writer or RecordingWriter(path, "run", 1, None), Topic("run", "batch_end", 0)
    for seq, (step, values) in enumerate(steps, first):
        now, before = ((0, 0, batch, *[0] * 11) for batch in (step + 1, step))
        frame = event_encoder(topic, 1)(seq, seq, START, now, before, {"logged": [[step, values]]}, pack_map({}))
        writer.append(topic.encode()[:-1], seq, seq, START, frame[len(topic.encode()) :])
        writer.flush()
    return writer


def many_values(step):
    """300 values of a step: some not finite, whole, or in a map; other names at every hundredth step."""
    values = {f"metric{number}": math.sin(1000 * number + step) for number in range(300)}
    values |= {"metric7": math.nan if step % 97 == 0 else values["metric7"], "metric8": step, "metric9": -math.inf}
    if step % 100 == 50:
        values = {"map": {"part": step}, **values}
    return values


def test_buckets_of_many_metrics_hold_all_values_also_late_ones_and_continued_ones(tmp_path):
    path = tmp_path / "recording-1.mcap"
    steps = [(step, many_values(step)) for step in [*range(400), 390, *range(5000, 5100)]]
    writer = log_many(path, steps[:250])
    assert len(summary_of(path).metrics) == 301
    log_many(path, steps[250:], writer, 251).close()
    continued = summary_of(path)
    path_beside(path).unlink()
    for found in (continued, summary_of(path)):
        for name in ("metric0", "metric7", "metric8", "metric9", "map/part"):
            own = {step: values.get("map", {}).get("part") if "/" in name else values[name] for step, values in steps}
            known = {step: value for step, value in own.items() if value is not None}
            metric = found.metrics[name]
            assert len(metric.buckets) <= 2 * summaries.MAX_ALL // 301
            expected = {}
            for step in sorted(known):
                place = step // metric.width
                expected.setdefault(place, summaries.MetricValues(known[step], step)).add(step, known[step])
            assert repr(metric.buckets) == repr({place: as_float(one) for place, one in expected.items()})
            whole, *later = expected.values()
            for one in later:
                whole.merge(one)
            assert repr(metric.whole()) == repr(as_float(whole))


@pytest.mark.parametrize("others", [0, 300])
def test_logged_values_keep_their_steps_and_have_names_that_no_column_has(others, tmp_path):
    path = tmp_path / "recording-1.mcap"
    values = {"metrics/val/acc": 0.5, "step": 7.0, "time": 8.0} | {f"other{number}": 1.0 for number in range(others)}
    log_many(path, [(step, values) for step in range(5)]).close()
    metrics = summary_of(path).metrics
    assert [shown_step("metrics/val/acc", step) for step, _ in metrics["metrics/val/acc"].points()] == [*range(5)]
    assert list(metrics["log/step"].points()) == [(step, 7.0) for step in range(5)]
    assert list(metrics["log/time"].points()) == [(step, 8.0) for step in range(5)]
    assert not {"step", "time"} & {*metrics}


def as_float(bucket):
    return summaries.MetricValues(
        *(float(bucket.last), bucket.last_step, float(bucket.low), bucket.low_step, float(bucket.high)),
        *(bucket.high_step, bucket.odd),
    )


def test_metrics_beyond_the_limit_are_counted_and_named(tmp_path, monkeypatch):
    monkeypatch.setattr(summaries, "MAX_METRICS", 280)
    path = tmp_path / "recording-1.mcap"
    log_many(path, [(step, many_values(step)) for step in range(3)]).close()
    summary = summary_of(path)
    assert len(summary.metrics) == 280
    assert summary.left_out == {f"metric{number}" for number in range(280, 300)}
    assert Summary.load(path).left_out == summary.left_out


def test_of_a_loaded_summary_only_the_buckets_that_are_used_are_read(tmp_path):
    path = tmp_path / "recording-1.mcap"
    log_many(path, [(step, many_values(step)) for step in range(200)]).close()
    whole, beside = summary_of(path), path_beside(path)
    begin = beside.read_bytes().index(struct.pack("d", whole.metrics["metric200"].rows[3].last))
    with beside.open("r+b") as file:
        file.seek(begin)
        file.write(b"damaged!")
    loaded = Summary.load(path)
    assert loaded.metrics["metric200"].points()[-1] == whole.metrics["metric200"].points()[-1]
    assert len(loaded.metrics["metric200"].points()) < len(whole.metrics["metric200"].points())
    assert [repr(metric.whole()) for metric in loaded.metrics.values()] == [
        repr(metric.whole()) for metric in whole.metrics.values()
    ]
    # The broker replaces it meanwhile.
    os.replace(path, beside)
    assert loaded.metrics["metric0"].points() == whole.metrics["metric0"].points()


def test_a_damaged_summary_is_rebuilt(tmp_path, caplog):
    path = tmp_path / "recording-1.mcap"
    record(path, [float(batch) for batch in range(300)]).close()
    expected, beside = summary_of(path), path_beside(path)
    good = beside.read_bytes()
    nonsense = summaries.msgspec.msgpack.encode([1, "run", 1, None, -5])
    checked = summaries._PLACE.pack(summaries._MAGIC, 20, summaries.zlib.crc32(nonsense)) + nonsense
    flipped = good[:-200] + bytes([good[-200] ^ 1]) + good[-199:]
    for content in (good[:-9], flipped, b"", b"hello", checked, good + bytes(5 << 20)):
        beside.write_bytes(content)
        assert Summary.load(path) is None
        assert summary_of(path) == expected == Summary.load(path)
    beside.unlink()
    beside.mkdir()
    assert Summary.load(path) is None
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


def test_the_summary_of_another_recording_is_not_used(tmp_path):
    first, second = tmp_path / "recording-1.mcap", tmp_path / "recording-2.mcap"
    record(first, [1.0] * 300).close()
    summary_of(first)
    record(second, [2.0] * 300).close()
    os.replace(path_beside(first), path_beside(second))
    assert Summary.load(second) is None
    record(tmp_path / "recording-3.mcap", [2.0] * 300, run="other").close()
    assert summary_of(second).metrics["loss/train/total"].buckets[0].last == 2.0
    # Nor is that of a longer one.
    os.truncate(second, 900)
    assert Summary.load(second) is None


@pytest.mark.slow
def test_the_summary_of_a_killed_broker_is_continued_by_the_next_one(runs_dir):
    publisher = Publisher("r")
    noise = os.urandom(1500)
    sent = 0

    def publish(count):
        nonlocal sent
        for _ in range(count):
            sent += 1
            loss = 50.0 if sent == 100 else 1 / sent
            publisher.publish(Event.BATCH_END, batch=sent, loss=loss, noise=os.urandom(750) + noise[:750])
        wait_for(lambda: publisher.poll() or publisher.statistics().acknowledged >= sent, "events on disk")

    recording = runs_dir / "r" / "recording-1.mcap"
    publish(6000)
    assert recording.stat().st_size > summaries.MIN_BYTES

    def saved():
        publish(20)
        return path_beside(recording).exists()

    wait_for(saved, "a summary")
    os.kill(broker_pid(runs_dir / "r"), signal.SIGKILL)
    left = Summary.load(recording)
    assert left is not None
    assert left.offset <= recording.stat().st_size
    publish(3000)
    publisher.close()
    wait_for(lambda: not find_run("r").live, "the broker to end")
    # It is saved a moment after the lock is released.
    wait_for(lambda: (Summary.load(recording) or left).offset > left.offset, "a later summary")
    # On a busy machine it may lag behind: what continues it comes to the same as from the beginning.
    continued = summary_of(recording, "r", 1, find_run("r").id)
    path_beside(recording).unlink()
    assert continued == summary_of(recording, "r", 1, find_run("r").id)
    assert max(one.high for one in continued.metrics["loss/train/total"].buckets.values()) == 50.0


def test_it_counts_the_events_and_rows_of_all_ranks_once(tmp_path):
    path = tmp_path / "recording-1.mcap"
    writer, seqs = RecordingWriter(path, "run", 1, None), [0, 0]

    def send(event, rank, fields):
        seqs[rank] += 1
        topic, seq = Topic("run", event, rank), seqs[rank]
        frame = event_encoder(topic, 1)(seq, 0, START, (0,) * 14, None, fields, pack_map({}))
        writer.append(topic.encode()[:-1], seq, 0, START, frame[len(topic.encode()) :])

    for step in range(50):
        for rank in (0, 1):
            send("#samples", rank, {"step": step, "columns": ["x"], "rows": [[1], [2]]})
        send("@rollout_end", 1, {"rows": "not those of a table"})
        send("#damaged", 0, {"rows": 7})
        if step % 20 == 5:
            # What follows the last check record is read again.
            writer.flush()
            summary_of(path)
    writer.close()
    whole = summary_of(path)
    assert whole.own == {"#samples": 200, "@rollout_end": 50}
    assert whole.rows == {"samples": 200}
    path_beside(path).unlink()
    assert summary_of(path) == whole
