"""Alert: rules, and who is told."""

import asyncio
import math
import time
from pathlib import Path

import msgpack
import pytest
from callback_calls import calls_of
from consumers_stream import batch_end
from run_folders import write_run

from offloop.bus.errors import ConfigurationError
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.recording.recording import Recording
from offloop.bus.runs.alerts import read_alerts
from offloop.bus.types.commands import Command, Outcome
from offloop.bus.types.event import Event
from offloop.bus.types.timestamp import Timestamp
from offloop.consumers import Logger, NaNMonitor, Runner
from offloop.consumers.api.logger import RunContext
from offloop.consumers.callbacks.alert import Alert, Notice


class Told:
    def __init__(self, *rules: str) -> None:
        self.alert = Alert(rules, console=False)
        self.notices: list[Notice] = []
        self.alert.act = lambda notice, run: self.notices.append(notice)  # type: ignore[method-assign]

    def losses(self, *losses: float) -> list[tuple[str, int]]:
        return self.over([batch_end(batch, loss=loss) for batch, loss in enumerate(losses, 1)])

    def over(self, snapshots: list[Snapshot]) -> list[tuple[str, int]]:
        calls_of(self.alert, snapshots)
        return [(notice.status, notice.batch) for notice in self.notices]


def test_alerts_are_kept_with_the_run_once_however_often_it_is_replayed(tmp_path: Path) -> None:
    run = write_run(tmp_path, "r", [1.0, 11.0, 2.0, math.nan, 1.0])
    for _ in range(2):
        callbacks = [Alert(["loss/train/total > 10"], console=False), NaNMonitor()]
        Runner(Recording(run), callbacks).run()
    found = [(alert.status, alert.batch, alert.text.split()[-1]) for alert in read_alerts(run)]
    assert found == [("firing", 2, "11)"), ("resolved", 3, "2)"), ("firing", 4, "0.1")]


@pytest.mark.parametrize(("duration", "batch"), [("1s", 6), ("2ep", 8), ("1min", None), ("0ba", 2)])
def test_durations_are_of_training_time_or_of_the_events_time(duration: str, batch: int | None) -> None:
    # Four batches a second, 8 samples each, four batches an epoch.
    told = Told(f"loss/train/total>10 for {duration}")
    assert told.losses(1, *[11] * 14) == ([] if batch is None else [("firing", batch)])


@pytest.mark.parametrize(
    ("condition", "fires_for"),
    [
        ("!= 2", [1, 3, math.inf, math.nan]),
        ("is nan", [math.nan]),
        ("is not finite", [math.inf, math.nan]),
    ],
)
def test_conditions(condition: str, fires_for: list[float]) -> None:
    fired = [loss for loss in (1, 2, 3, math.inf, math.nan) if Told(f"loss/train/total {condition}").losses(loss)]
    assert list(map(str, fired)) == list(map(str, fires_for))


def test_the_disk_is_measured_at_events_of_now(tmp_path: Path) -> None:
    told = Told("disk/free_gb < 1e9")
    logger = Logger(RunContext("r", 1, tmp_path, command=lambda *_: Outcome(Command("stop"))))
    for batch, seconds in ((1, time.time() - 3600), (2, time.time())):
        now = Snapshot.build(Event.BATCH_END, timestamp=Timestamp(batch=batch), time_ns=round(seconds * 1e9))
        told.alert.run_event(Event.BATCH_END, now, logger)
    assert [(notice.status, notice.batch) for notice in told.notices] == [("firing", 2)]


def test_nan_watches_the_loss_and_every_metric_each_by_itself() -> None:
    def evaluated(accuracy: float) -> Snapshot:
        metrics = {"eval": {"accuracy": accuracy}}
        return Snapshot.build(Event.EVAL_END, seq=9, dataloader_label="eval", eval_metrics=metrics)

    told = Told("nan")
    told.over([evaluated(math.nan), batch_end(1), batch_end(2, loss=math.inf), batch_end(3), evaluated(0.5)])
    assert [(notice.status, notice.metric) for notice in told.notices] == [
        ("firing", "metrics/eval/accuracy"),
        ("firing", "loss/train/total"),
        ("resolved", "loss/train/total"),
        ("resolved", "metrics/eval/accuracy"),
    ]


def test_fields_are_asked_for_and_looked_up() -> None:
    told = Told("gradient_norm > 100", "memory_stats[allocated_mem] > 7", "batch_size < 8")
    assert told.alert.fields == ("gradient_norm", "memory_stats")
    demand = Alert(["gradient_norm > 100"], every=10).demand()
    assert demand.to_wire()["batch_end"]["fields"] == {"gradient_norm": [10]}
    assert [event for event, request in demand.to_wire().items() if request["fields"]] == ["batch_end"]
    fields = {"gradient_norm": 101.0, "memory_stats": {"allocated_mem": 8}, "batch_size": 6}
    told.over([batch_end(1), batch_end(2, **fields), batch_end(3)])
    assert [(notice.metric, notice.value) for notice in told.notices] == [
        ("gradient_norm", 101.0),
        ("memory_stats[allocated_mem]", 8),
        ("batch_size", 6),
    ]


def test_a_logged_value_has_the_name_under_which_it_is_shown() -> None:
    told = Told("log/step > 100", "acc > 1")
    told.over([batch_end(1, logged=[[0, {"step": 101, "acc": 2}]])])
    assert [(notice.metric, notice.value) for notice in told.notices] == [("log/step", 101), ("acc", 2)]


def test_a_consumer_that_goes_on_tells_what_it_would_have_told() -> None:
    losses = [1.0, 11.0, 12.0, math.nan, 13.0, 14.0, 15.0, 16.0, 2.0, 11.0]
    rules = ("loss/train/total > 10 for 3ba", "nan", "throughput/batches_per_sec > 0")
    whole = Told(*rules)
    snapshots = [batch_end(batch, loss=losses[batch % 10]) for batch in range(1, 110)]
    whole.over(snapshots)
    assert len(whole.notices) > 20
    for place in (1, 3, 4, 8, 105):
        first, second = Told(*rules), Told(*rules)
        first.over(snapshots[:place])
        second.alert.load_state_dict(msgpack.unpackb(msgpack.packb(first.alert.state_dict())))
        second.over(snapshots[place:])
        assert list(map(str, first.notices + second.notices)) == list(map(str, whole.notices))


def test_the_next_attempt_is_told_again_what_still_holds() -> None:
    told, again = Told("loss > 10 for 2ba", "nan"), Told("loss > 10 for 2ba", "nan")
    assert told.over([batch_end(batch, loss=11.0) for batch in (1, 2, 3)]) == [("firing", 2)]
    again.alert.load_state_dict(msgpack.unpackb(msgpack.packb(told.alert.state_dict())))
    assert again.over([batch_end(batch, loss=11.0, attempt=2) for batch in (4, 5, 6)]) == [("firing", 5)]


def test_a_consumer_of_the_next_attempt_reports_a_loss_that_still_is_nan(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = NaNMonitor(), NaNMonitor()
    calls_of(first, [batch_end(1, loss=math.nan)])
    second.load_state_dict(msgpack.unpackb(msgpack.packb(first.state_dict())))
    calls_of(second, [batch_end(batch, loss=math.nan, attempt=2) for batch in (2, 3)])
    assert capsys.readouterr().err.count("the loss is nan") == 2


def test_a_misspelt_value_of_the_disk_is_named_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    Runner([batch_end(1)], [Alert(["disk/free_bytes < 1"])]).run()
    assert "rule 'disk/free_bytes < 1' was never judged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rule", "place", "expected"),
    [
        ("loss/train/total", 17, "one of <"),
        ("failed for 5s", 12, "which 'stalled' can have"),
        ("stalled for 5ba", 13, "a time such as 5min"),
        ("loss > 10 for 5ba or so", 19, "the end of the rule"),
    ],
)
def test_a_rule_that_cannot_be_read_says_where(rule: str, place: int, expected: str) -> None:
    with pytest.raises(ConfigurationError, match=f"at character {place} .*{expected}"):
        Alert(["nan", rule])


def test_the_console_shows_a_line_for_each_notice(capsys: pytest.CaptureFixture[str]) -> None:
    calls_of(Alert(["loss/train/total > 10"]), [batch_end(1, loss=11.5), batch_end(2, loss=1.0)])
    assert capsys.readouterr().err.splitlines() == [
        "ALERT: run run, epoch 0, batch 1: loss/train/total > 10 (loss/train/total is 11.5)",
        "resolved: run run, epoch 0, batch 2: loss/train/total > 10 (loss/train/total is 1)",
    ]


def fit_end() -> Snapshot:
    return Snapshot.build(Event.FIT_END, timestamp=Timestamp(batch=2))


def test_rules_that_were_never_judged_are_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = Alert(["gradient_norm > 9", "los > 3"]), Alert(["gradient_norm > 9", "los > 3", "new > 1"])
    calls_of(first, [batch_end(1, gradient_norm=1.0)])
    second.load_state_dict(msgpack.unpackb(msgpack.packb(first.state_dict())))
    calls_of(second, [fit_end(), fit_end()])
    asyncio.run(second.close(fit_end(), Logger()))
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(" was")[0] for line in said] == ["rule 'los > 3'", "rule 'new > 1'"]


def test_rules_name_metrics_in_full_or_in_short_also_those_of_monitors_that_are_not_there() -> None:
    told = Told(
        "eval/accuracy < 0.6", "accuracy < 0.6", "lr-SGD/group0 == 0.1", "loss > 2", "throughput/samples_per_sec < 100"
    )
    metrics = {"eval": {"accuracy": 0.5, "loss": 3.0}}
    evaluated = Snapshot.build(Event.EVAL_END, seq=999, dataloader_label="eval", eval_metrics=metrics)
    told.over([*(batch_end(batch) for batch in range(1, 102)), evaluated])
    assert [(notice.metric, notice.value) for notice in told.notices] == [
        ("lr-SGD/group0", 0.1),
        ("throughput/samples_per_sec", 32.0),
        ("metrics/eval/accuracy", 0.5),
        ("metrics/eval/accuracy", 0.5),
    ]


def test_a_rule_about_a_norm_of_sharded_weights_is_judged_for_all_ranks_together() -> None:
    def told(rank: int, batch: int, norm: float) -> Snapshot:
        value = {"shards": norm, "ranks": 0 if rank else 2}
        return batch_end(batch, rank=rank, gradient_norm=value, batch_size=6 + rank, on_demand=["gradient_norm"])

    norms = {1: (3.0, 3.9), 2: (3.0, 4.1), 3: (3.0, 3.9)}
    snapshots = [told(rank, batch, norms[batch][rank]) for batch in norms for rank in (batch % 2, 1 - batch % 2)]
    one = Told("gradient_norm > 5", "batch_size > 6")
    assert one.alert.all_ranks
    assert one.over(snapshots) == [("firing", 2), ("resolved", 3)]
    assert one.notices[0].value == pytest.approx(math.hypot(3.0, 4.1))
    assert len({notice.id for notice in one.notices}) == 2
