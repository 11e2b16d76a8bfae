"""What a loop of one's own logs: it arrives whole, under its steps, whoever comes when."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offloop.bus import ClosedError, ConfigurationError, Event, Publisher, Recording
from offloop.consumers.callbacks import TrainerMetrics
from offloop.consumers.testing import replay


def logged_by(publisher: Publisher) -> list[tuple[str, int, Any]]:
    """Return the name, the batch and the logged metrics of each event."""
    return [
        (snapshot.event.value, int(snapshot.timestamp.batch), snapshot.fields.get("logged"))
        for snapshot in Recording(publisher.recording)
    ]


def test_logged_metrics_travel_with_the_next_event(runs_dir: Path) -> None:
    with Publisher("r") as publisher:
        publisher.log({"warm-up": 1})
        publisher.log({"and": 2})
        for batch in (1, 2):
            publisher.log({"norm": batch / 2}, step=batch - 1)
            publisher.log({"rate": 0.5}, step=batch - 1)
            publisher.publish(Event.BATCH_END, batch=batch, loss=1.0)
        publisher.publish(Event.FIT_END, batch=2)
        publisher.log({"test": 0.9})
    assert logged_by(publisher) == [
        ("batch_end", 1, [[0, {"warm-up": 1, "and": 2, "norm": 0.5, "rate": 0.5}]]),
        ("batch_end", 2, [[1, {"norm": 1.0, "rate": 0.5}]]),
        ("fit_end", 2, None),
        ("iteration_checkpoint", 2, [[2, {"test": 0.9}]]),
    ]
    replayed = replay(TrainerMetrics(), publisher.recording)
    assert replayed.rows[0].metrics.items() >= {"warm-up": 1, "norm": 0.5, "loss/train/total": 1.0}.items()
    assert replayed.rows[-1].metrics == {"test": 0.9}


def test_very_many_metrics_of_a_step_arrive_whole_at_once_and_one_by_one(runs_dir: Path) -> None:
    values = {f"moe/layer_{part // 400:02}/expert_{part % 400:03}/load": part / 3 for part in range(20_000)}
    with Publisher("r") as publisher:
        publisher.log(values, step=0)
        for name, value in values.items():
            publisher.log({name: value}, step=1)
        for batch in (3, 4):
            publisher.log(values)
            publisher.publish(Event.BATCH_END, batch=batch)
    found: dict[int, dict[str, float]] = {}
    for _, _, logged in logged_by(publisher):
        for step, one in logged or ():
            found.setdefault(step, {}).update(one)
    assert list(found) == [0, 1, 2, 3]
    assert all(one == values for one in found.values())


def test_without_a_step_a_repeated_name_starts_the_next_step(runs_dir: Path) -> None:
    with Publisher("r") as publisher:
        publisher.publish(Event.FIT_START, max_duration="3ba")
        for number in range(3):
            publisher.log({"a": number})
            publisher.log({"b": number})
        publisher.poll()
        publisher.log({"c": 5})
    assert logged_by(publisher) == [
        ("fit_start", 0, None),
        ("batch_end", 1, [[0, {"a": 0, "b": 0}]]),
        ("batch_end", 2, [[1, {"a": 1, "b": 1}]]),
        ("batch_end", 3, [[2, {"a": 2, "b": 2}]]),
        ("batch_end", 4, [[2, {"c": 5}]]),
    ]


def test_metrics_of_a_loop_that_publishes_rarely_are_sent_by_time_and_by_number(runs_dir: Path) -> None:
    now = 0
    with Publisher("r", clock=lambda: now) as publisher:
        publisher.publish(Event.EPOCH_END, epoch=1, batch=10)
        publisher.log({"a": 1}, step=11)
        publisher.log({"a": 2}, step=12)
        now += 2 * 10**9
        publisher.log({"a": 3}, step=13)
        publisher.log({f"m{number}": 0 for number in range(1000)}, step=14)
        publisher.log({"a": 5}, step=15)
    events = [(event, batch, [step for step, _ in logged or ()]) for event, batch, logged in logged_by(publisher)]
    assert events == [
        ("epoch_end", 10, []),
        ("iteration_checkpoint", 10, [11, 12]),
        ("iteration_checkpoint", 10, [13, 14]),
        ("iteration_checkpoint", 10, [15]),
    ]


def test_numbers_and_single_element_tensors_can_be_logged(runs_dir: Path) -> None:
    loss = torch.tensor(0.5, requires_grad=True)
    with Publisher("r") as publisher:
        values = {"tensor": loss, "numpy": np.float32(0.25), "nan": math.nan, "inf": -math.inf, "bool": True, "int": 7}
        publisher.log(values, step=np.int64(3))
        publisher.log({}, step=4)
    [(_, _, [[step, logged]])] = logged_by(publisher)
    assert step == 3
    assert math.isnan(logged.pop("nan"))
    assert logged == {"tensor": 0.5, "numpy": 0.25, "inf": -math.inf, "bool": 1.0, "int": 7}


class OnGpu:
    is_cuda = True


def test_unsupported_metrics_are_refused_and_the_rest_is_kept(runs_dir: Path) -> None:
    refused: list[tuple[Any, Any]] = [
        *[({"other": 2, "a": value}, 0) for value in ("text", None, [1, 2], torch.zeros(3, 4), 10**400, OnGpu(), 1j)],
        *[({"other": 2, name: 1.0}, 0) for name in (5, "\ud800", "x" * 1001)],
        ({f"{number:0200}": 0 for number in range(20_000)}, 0),
        *[({"a": 1}, step) for step in (-1, 1.5, True)],
        *[(values, None) for values in (None, "loss", [("loss", 0.5)])],
    ]
    with Publisher("r") as publisher:
        publisher.log({"before": 1}, step=0)
        for values, step in refused:
            with pytest.raises(ConfigurationError):
                publisher.log(values, step)
        with pytest.raises(ConfigurationError, match="cannot be sent"):
            publisher.publish(Event.BATCH_END, batch=1, wrong=object())
        publisher.log({"large": 2**400}, step=0)
    with pytest.raises(ClosedError, match="is closed"):
        publisher.log({"a": 2})
    assert logged_by(publisher) == [("batch_end", 1, [[0, {"before": 1, "large": 2**400}]])]


def test_metrics_too_large_for_one_event_travel_with_several(runs_dir: Path) -> None:
    names = [f"{number:01000}" for number in range(20_000)]
    with Publisher("r") as publisher:
        for first in range(0, 20_000, 2000):
            publisher.log(dict.fromkeys(names[first : first + 2000], 1.0), step=1)
    logged = [name for _, _, entries in logged_by(publisher) for _, values in entries or () for name in values]
    assert logged == names


class Later:
    """A value that has arrived."""

    def __init__(self, value: Any) -> None:
        self.arrived = value

    def ready(self) -> bool:
        return True

    def value(self) -> Any:
        return self.arrived


def test_a_pending_value_that_turns_out_unsupported_is_left_out_reported_and_counted(
    runs_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Publisher("r") as publisher:
        for step, value in enumerate((None, "text", 1j, [1.0], 10**400)):
            publisher.log({"late": Later(value), "in time": Later(0.75), "now": 1}, step=step)
    assert [entries for _, _, entries in logged_by(publisher)] == [
        [[step, {"in time": 0.75, "now": 1}]] for step in range(5)
    ]
    assert publisher.statistics().values_left_out == 5
    assert len(caplog.records) == 2
    assert "late is left out, all else is published: 'late' cannot be logged" in caplog.text
    assert "5 values were left out, among them of late" in caplog.text
