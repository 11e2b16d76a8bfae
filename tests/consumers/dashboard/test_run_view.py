"""The model that dashboards draw from: what it takes from a stream, and what it shows of it."""

import math
import threading
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from consumers_stream import Collector, snapshots_of_training
from hypothesis import example, given, settings
from hypothesis import strategies as st

from offloop.bus.protocol.order import Ending
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.recording.summary import Metric, Summary
from offloop.bus.types.commands import Command, Outcome
from offloop.bus.types.event import Event
from offloop.bus.types.timestamp import Timestamp
from offloop.consumers import Runner
from offloop.consumers.api.logger import Row, RunContext
from offloop.consumers.callbacks import LRMonitor, SpeedMonitor, TrainerMetrics
from offloop.consumers.dashboard.view import metrics as view_metrics
from offloop.consumers.dashboard.view import run_view
from offloop.consumers.dashboard.view.phases import PHASES, RankPhases
from offloop.consumers.dashboard.view.run_view import RunView
from offloop.consumers.dashboard.view.series import Clock, Series

SECOND = 1_000_000_000
START = 1_700_000_000 * SECOND
VALUES = st.floats(allow_nan=True, allow_infinity=True, width=64)

EVERY_KIND = [2.0, math.inf, 9.0, math.nan, 1.0, -math.inf, 5.0, math.inf, 4.0]
"""Values of which none that stands out is the first or the last."""


def batch_of(
    batch: int, per_epoch: int = 10, samples: int = 8, tokens: int = 0, rank: int = 0, late_ns: int = 0, **fields: Any
) -> Snapshot:
    # As the trainer does it: the epoch is counted only when it is over, after its last batch.
    epoch, within = divmod(batch - 1, per_epoch)

    def at(count: int, place: int) -> Timestamp:
        numbers = [0, epoch, count, count * samples, count * tokens, 0, 0, place, place * samples, place * tokens]
        return Timestamp.from_values([*numbers, count * 1_000_000, 0, 0, 1_000_000])

    published = {"loss": 1 / batch, "lr": {"SGD": [0.1, 0.01 * batch]}, "dataloader_label": "train"} | fields
    return Snapshot.build(
        Event.BATCH_END,
        rank=rank,
        seq=batch,
        time_ns=START + batch * SECOND + late_ns,
        timestamp=at(batch, within + 1),
        previous_timestamp=at(batch - 1, within),
        max_duration="5ep",
        dataloader_len=per_epoch,
        **published,
    )


def spans_of(began: int, data: float = 0.1, publishing: float = 0.01) -> dict[str, Any]:
    plan = [("data", data), ("forward", 0.2), ("backward", 0.2), ("forward", 0.2), ("backward", 0.2)]
    plan.append(("publishing", publishing))
    spans, at = [], 0
    for phase, seconds in plan:
        spans.append([phase, at, round(seconds * SECOND)])
        at += round(seconds * SECOND)
    return {"began": began, "spans": spans, "device": False}


def points_of(view: RunView, name: str) -> dict[float, float]:
    points = view.series(name).points()
    return dict(zip(points.xs.tolist(), points.ys.tolist(), strict=True))


def series_of(points: list[tuple[float, float]]) -> Series:
    series = Series("metric", Clock(), threading.RLock())
    for step, value in points:
        series.append(step, value)
    return series


def same(left: list[float], right: list[float]) -> bool:
    return np.array_equal(np.array(left), np.array(right), equal_nan=True)


# -- what is drawn of a series ----------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 300), VALUES), min_size=1, max_size=200), st.integers(1, 20))
@example(list(enumerate(EVERY_KIND)), 1)
def test_a_drawn_series_hides_nothing(points: list[tuple[int, float]], width: int) -> None:
    drawn = series_of(points).points(width=width)
    held = dict(sorted(dict(points).items()))
    steps, values = np.array(list(held), dtype=float), np.array(list(held.values()))
    places = steps.searchsorted(drawn.xs)
    assert same(steps[places].tolist(), drawn.xs.tolist()), "only points that were logged"
    assert same(values[places].tolist(), drawn.ys.tolist())
    edges = np.linspace(steps[0], steps[-1], width + 1)[1:-1]
    for bucket in np.unique(edges.searchsorted(steps, "right")):
        everything = values[edges.searchsorted(steps, "right") == bucket]
        shown = drawn.ys[edges.searchsorted(drawn.xs, "right") == bucket]
        finite = np.isfinite(everything)
        if finite.any():
            assert shown[np.isfinite(shown)].min() == everything[finite].min()
            assert shown[np.isfinite(shown)].max() == everything[finite].max()
        assert {str(value) for value in everything[~finite]} == {str(value) for value in shown[~np.isfinite(shown)]}


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), VALUES), max_size=80), st.lists(st.booleans(), min_size=80, max_size=80))
def test_points_may_come_in_any_order_and_the_last_of_a_step_holds(
    points: list[tuple[int, float]], read_after: list[bool]
) -> None:
    series = series_of([])
    for (step, value), read in zip(points, read_after, strict=False):
        series.append(step, value)
        if read:
            len(series)
    held = dict(sorted(dict(points).items()))
    drawn = series.points()
    assert drawn.xs.tolist() == list(held)
    assert same(drawn.ys.tolist(), list(held.values()))
    assert series.last is None if not held else same([series.last or 0.0], [list(held.values())[-1]])
    assert series.version == len(points)


@settings(deadline=None)
@given(st.lists(VALUES, min_size=17, max_size=400))
def test_a_thinned_series_is_half_as_long_and_hides_nothing(values: list[float]) -> None:
    series = series_of(list(enumerate(values)))
    series.thin()
    shown = series.points(width=1000).ys.tolist()
    assert len(shown) <= len(values) * 7 / 16 + 7
    finite = [value for value in values if math.isfinite(value)]
    if finite:
        assert min(filter(math.isfinite, shown)) == min(finite)
        assert max(filter(math.isfinite, shown)) == max(finite)
    assert {str(value) for value in values if not math.isfinite(value)} == {
        str(value) for value in shown if not math.isfinite(value)
    }
    assert same([shown[0], shown[-1]], [values[0], values[-1]])


# -- the names and values of callbacks --------------------------------------------------------------------------------


def test_metrics_are_those_that_the_callbacks_metrics_lr_and_speed_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_metrics, "_SETTLE_EVERY", 64)
    stream: list[Snapshot] = []
    for batch in range(1, 301):
        metrics = {"accuracy": batch / 300, "per_class": [0.5, {"x": 1}], "name": "text"}
        told = {"train_metrics": metrics, "flops_per_batch": 5e9, "device_name": "NVIDIA H100", "precision": "amp_bf16"}
        logged = [[batch - 1, {"own/value": batch * 2, "own/name": "text"}]]
        stream.append(batch_of(batch, tokens=16, logged=logged, world_size=2, **told))
        if batch % 100 == 0:
            values = {"eval": {"accuracy": 0.9, "cases": {"hard": 0.1}}}
            stamp = stream[-1].timestamp
            more = {"eval_metrics": values, "dataloader_label": "eval", "train_metrics": {"accuracy": 0.25}}
            for event in (Event.EVAL_END, Event.EPOCH_END):
                stream.append(Snapshot.build(event, time_ns=stream[-1].time_ns, timestamp=stamp, **more))
    collector = Collector()
    Runner(stream, [TrainerMetrics(), LRMonitor(), SpeedMonitor()], [collector]).run()
    expected: defaultdict[str, dict[float, float]] = defaultdict(dict)
    for row in collector.rows:
        for name, value in row.metrics.items():
            if not isinstance(value, str):
                # An evaluation is beside the last batch before it.
                expected[name][row.step - name.startswith("metrics/eval")] = float(value)

    view = RunView("run")
    for number, snapshot in enumerate(stream):
        view.see(snapshot)
        if number in (5, 150):
            view.names()
    assert {"loss/train/total", "lr-SGD/group0", "lr-SGD/group1", "throughput/tokens_per_sec"} <= set(view.names())
    assert {"metrics/train/per_class/1/x", "metrics/eval/cases/hard", "own/value"} <= set(view.names())
    for name in view.names():
        assert points_of(view, name) == pytest.approx(expected[name], rel=1e-12), name
    left_out = {name for name in expected if name not in view.names()}
    assert {name for name in left_out if not name.startswith(("time/", "throughput/device/"))} == set()


@pytest.mark.parametrize("odd", ["text", [1, "x"]])
def test_fields_of_odd_forms_are_left_out_and_the_rest_is_taken(odd: Any) -> None:
    view = RunView("run")
    view.see(batch_of(1))
    fields = dict.fromkeys(("loss", "lr", "train_metrics", "phases", "logged", "flops_per_batch"), odd)
    view.see(batch_of(2, on_demand=["phases"], **fields))
    view.see(batch_of(3, phases=spans_of(START) | {"spans": odd}))
    assert {0, 2} <= points_of(view, "loss/train/total").keys()
    assert {1, 3} <= points_of(view, "lr-SGD/group0").keys()


def test_the_points_held_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_metrics, "_SETTLE_EVERY", 100)
    monkeypatch.setattr(Clock, "MAX_ROWS", 500)
    view = RunView("run", max_points=2000)
    for batch in range(1, 5001):
        view.see(batch_of(batch, loss=-1.0 if batch == 7 else math.nan if batch == 1234 else 5.0))
    assert sum(len(view.series(name)) for name in view.names()) <= 2000
    points = view.series("loss/train/total").points("time", width=10_000)
    assert points.ys[0] == 5.0
    assert np.nanmin(points.ys) == -1.0
    assert str(points.not_finite) == "[(1232.0, nan)]", "its place on the axis is what it was"


def test_names_are_bounded_which_the_log_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_metrics, "MAX_METRICS", 3)
    monkeypatch.setattr(run_view, "MAX_METRICS", 3)
    view = RunView("run")
    view.log_rows([Row(1, 0.0, {f"metric{number}": 1.0 for number in range(5)})])
    assert view.names() == ("metric0", "metric1", "metric2")
    for _ in range(2):
        assert [entry.text for entry in view.log()] == ["more than 3 metrics: metric3 and others are left out"]


@pytest.mark.parametrize("most", [500, 0])
def test_logged_values_keep_their_steps_and_have_names_that_no_column_has(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_metrics, "MAX_SERIES", most)
    view = RunView("run")
    for step in range(5):
        logged = {"metrics/val/acc": float(step), "metrics/val/whole": step, "step": float(step), "time": step}
        batch = batch_of(step + 1, logged=[[step, logged]])
        view.see(batch)
        view.log_rows([Row(step, 0.0, {"metrics/val/acc": float(step)})], batch)
    for name in ("metrics/val/acc", "metrics/val/whole", "log/step", "log/time"):
        assert points_of(view, name) == {step: step for step in range(5)}, name
    assert not {"step", "time"} & {*view.names()}


def test_of_very_many_metrics_those_that_are_looked_at_have_all_points() -> None:
    def logged(step: int) -> Snapshot:
        values = {f"part{number:04}/load": float(number - step) for number in range(2000)}
        return batch_of(step + 1, loss=1.0, logged=[[step, values]])

    view = RunView("run")
    for step in range(100):
        view.see(logged(step))
    assert len(view.names()) == 2003
    assert len(view.drawn) < 510
    series = view.series("part1999/load")
    before, last = len(series), series.last
    assert (last, series.span()) == (1900.0, (0.0, 99.0))
    assert before < 100, "of others some are kept"
    for step in range(100, 150):
        view.see(logged(step))
    assert view.series("part1999/load") is series
    assert (len(series), series.last) == (before + 50, 1850.0)
    with pytest.raises(KeyError):
        view.series("part2000/load")


def test_a_metric_of_a_summary_without_points_is_an_empty_series() -> None:
    view = RunView("run")
    view.load(Summary(0, "run", 1, None, metrics={f"part{number}": Metric() for number in range(1000)}), 0)
    assert len(view.series("part7")) == 0
    assert len(view.names()) == 1000


# -- phases and ranks -------------------------------------------------------------------------------------------------


def test_phases_of_the_measured_batches_add_up_to_the_step() -> None:
    view = RunView("run")
    for batch in (10, 20):
        view.see(batch_of(batch, phases=spans_of(START + (batch - 1) * SECOND), on_demand=["phases"]))
    phases = view.phases()
    assert phases.batches.tolist() == [10, 20]
    assert {name: values.tolist() for name, values in phases.seconds.items() if values.any()} == {
        "data": pytest.approx([0.1] * 2),
        "forward": pytest.approx([0.4] * 2),
        "backward": pytest.approx([0.4] * 2),
        "publishing": pytest.approx([0.01] * 2),
        "other": pytest.approx([0.09] * 2),
    }
    assert tuple(phases.seconds) == PHASES
    shares = phases.shares()
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["forward"] == pytest.approx(0.4)
    publishing = view.publishing()
    assert (publishing.microseconds, publishing.share) == (pytest.approx(10_000), pytest.approx(0.01))


def test_what_publishing_costs_is_that_of_all_batches_where_the_training_tells_it() -> None:
    view = RunView("run")
    for batch in (10, 20, 30):
        field = spans_of(START + (batch - 1) * SECOND, publishing=0.1) | {"publishing": [20_000_000, 10]}
        view.see(batch_of(batch, phases=field))
    assert view.phases().seconds["publishing"].tolist() == pytest.approx([0.002] * 3)
    publishing = view.publishing()
    # A batch that is measured takes a second with 0.1 s of publishing: others 0.902 s.
    assert (publishing.microseconds, publishing.share) == (pytest.approx(2000), pytest.approx(0.002 / 0.902))


def test_the_phases_held_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankPhases, "MAX_ROWS", 8)
    view = RunView("run")
    for batch in range(1, 101):
        view.see(batch_of(batch, phases=spans_of(START + (batch - 1) * SECOND)))
    batches = view.phases().batches.tolist()
    assert len(batches) <= 8
    assert batches[-1] == 100
    assert view.publishing().microseconds == pytest.approx(10_000)


def view_of_ranks(last: list[int], world_size: int) -> RunView:
    view = RunView("run")
    for batch, slow in enumerate(last, 1):
        for rank in range(world_size):
            field = spans_of(START + (batch - 1) * SECOND, 0.3 if rank == slow else 0.1)
            view.see(batch_of(batch, rank=rank, phases=field))
    return view


def test_the_rank_that_arrives_last_is_found_from_the_events_of_one_host() -> None:
    assert view_of_ranks([1, 1, 1], 3).rank_map().waiting is None, "too few"
    view = view_of_ranks([*[0, 1] * 50, *[1] * 20], 3)
    view.see(batch_of(121))
    ranks = view.rank_map()
    rows = [ranks.row(cell) for cell in range(3)]
    assert [one.rank for one in rows] == [0, 1, 2]
    assert [one.batch for one in rows] == [120, 120, 120]
    assert [one.seconds_per_batch for one in rows] == pytest.approx([1, 1, 1])
    assert [one.last_share for one in rows] == [0, 1, 0]
    assert rows[1].late == pytest.approx(0.2)
    assert ranks.waiting is not None
    assert (ranks.waiting.cell, ranks.waiting.seconds) == (1, pytest.approx(0.2))
    # Counted from zero again.
    for batch in range(1, 4):
        for rank in range(3):
            view.see(batch_of(batch, rank=rank, late_ns=1000 * SECOND))
    assert view.rank_map().row(0).batch == 3


# -- progress, state, log ---------------------------------------------------------------------------------------------


def test_the_state_follows_the_run_and_its_commands() -> None:
    outcomes: list[Outcome] = []
    view = RunView("run")
    view.open(RunContext("run", 1, None, answered=lambda: outcomes))
    assert view.status == "waiting"
    view.see(batch_of(1))
    assert view.status == "live"
    outcomes.append(Outcome(Command("pause", id="a"), "batch_checkpoint", 1))
    assert view.status == "paused"
    view.see(Snapshot.build(Event.EPOCH_CHECKPOINT, time_ns=START + 2 * SECOND, timestamp=batch_of(1).timestamp))
    assert view.status == "paused", "events that belong to the batch do not end a pause"
    outcomes.append(Outcome(Command("resume", id="b"), "batch_checkpoint", 1))
    assert view.status == "live"
    outcomes.append(Outcome(Command("pause", id="c"), "batch_checkpoint", 1))
    outcomes.append(Outcome(Command("set", ("lr", 1), "d"), "batch_checkpoint", 1, "there is no 'lr'"))
    assert view.status == "paused"
    view.see(batch_of(2))
    assert view.status == "live", "a batch was trained"
    view.take_outcome(outcomes[0])
    assert [entry.text for entry in view.log() if entry.kind == "command"] == [str(outcome) for outcome in outcomes]
    view.end(None)
    assert view.status == "live", "it goes on without us"
    view.end(Ending("failed", "ValueError: no"))
    assert (view.status, view.error) == ("failed", "ValueError: no")
    assert view.log()[-1].text == "the run failed: ValueError: no"


def test_a_command_that_is_answered_late_has_its_effect() -> None:
    view = RunView("run")
    view.see(batch_of(1))
    pause = Command("pause", id="1")
    view.take_outcome(Outcome(pause, None, None))
    assert view.status == "live"
    for _ in range(2):
        view.take_outcome(Outcome(pause, "batch_checkpoint", 1))
    assert view.status == "paused"
    assert [entry.text for entry in view.log()] == [
        "'pause' was sent and has not taken effect yet",
        "'pause' took effect at batch 1 (batch_checkpoint)",
    ]


def test_events_are_told_in_words_once_and_not_those_of_every_batch() -> None:
    view = RunView("run")
    for snapshot in snapshots_of_training(8, 4):
        view.see(snapshot)
    assert [entry.text for entry in view.log()] == [
        "the trainer is set up",
        "training begins",
        "epoch 0 begins",
        "epoch 1 begins",
        "evaluation 'eval': accuracy 0.75",
        "training ends at batch 8",
    ]


def test_the_log_is_bounded_and_can_be_asked_for_what_is_new() -> None:
    view = RunView("run")
    for number in range(2100):
        view.note("note", f"line {number}\nof two")
    entries = view.log()
    assert len(entries) == 2000
    assert entries[0].text == "line 100 of two"
    assert [entry.number for entry in view.log(after=2098)] == [2099, 2100]
    assert view.log(after=2100) == []


def test_it_can_be_asked_while_it_is_fed() -> None:
    view, over = RunView("run"), threading.Event()
    trouble: list[Exception] = []

    def ask() -> None:
        try:
            while not over.is_set():
                for name in view.names():
                    points = view.series(name).points("time", width=50)
                    assert (np.diff(points.xs) >= 0).all()
                view.phases(width=5), view.publishing(), view.rank_map(), view.progress(), view.log()
        except Exception as error:  # noqa: BLE001  shown below
            trouble.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    for batch in range(1, 3001):
        view.see(batch_of(batch, phases=spans_of(START + batch * SECOND)))
    over.set()
    thread.join()
    assert trouble == []
    assert len(view.series("loss/train/total")) == 3000
