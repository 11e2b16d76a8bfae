"""What the terminal dashboard draws, as text: for any run and any size of a terminal."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offloop.bus.protocol.order import Ending
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.event import Event
from offloop.bus.types.metrics import groups_of
from offloop.bus.types.timestamp import Timestamp
from offloop.consumers.api.logger import Row
from offloop.consumers.dashboard.terminal.frame import Shown, frame, sparkline
from offloop.consumers.dashboard.view.run_view import RunView
from offloop.consumers.dashboard.view.series import Points

SECOND = 1_000_000_000


def batch_end(batch: int, rank: int = 0, data: float = 0.25, **fields: Any) -> Snapshot:
    spans = [["data", 0, round(data * SECOND)], ["backward", round(data * SECOND), round((0.75 - data) * SECOND)]]
    spans.append(["publishing", round(0.75 * SECOND), SECOND // 100])
    return Snapshot.build(
        Event.BATCH_END,
        rank=rank,
        time_ns=batch * SECOND,
        timestamp=Timestamp(batch=batch, batch_in_epoch=batch),
        phases={"began": (batch - 1) * SECOND, "spans": spans, "device": False},
        **({"loss": 1 / batch, "lr": {"SGD": [0.1]}, "max_duration": "100ba"} | fields),
    )


def trained(batches: int = 40, ranks: int = 1, slow: int | None = None, **fields: Any) -> RunView:
    view = RunView("digits-3")
    for batch in range(1, batches + 1):
        for rank in range(ranks):
            view.see(batch_end(batch, rank, 0.6 if rank == slow else 0.25, world_size=ranks, **fields))
    return view


def drawn(view: RunView, shown: Shown | None = None, width: int = 80, height: int = 24) -> list[str]:
    lines = frame(view, shown or Shown(), width, height)
    assert len(lines) <= height
    assert all(line.cell_len <= width for line in lines)
    return [line.plain for line in lines]


def points(*values: float) -> Points:
    return Points(np.arange(len(values), dtype=float), np.array(values))


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(1, 60), st.sampled_from(["run", "log"]), st.integers(0, 100))
def test_any_size_has_a_frame_that_fits(width: int, height: int, page: str, scroll: int) -> None:
    for view in (WAITING, RUNNING):
        drawn(view, Shown(page=page, scroll=scroll), width, height)


WAITING, RUNNING = RunView("run"), trained(30, ranks=9, slow=1, loss=math.nan)
RUNNING.log_rows([Row(1, 0.0, {f"group{number % 7}/metric{number}": number for number in range(50)})])


def test_a_usual_terminal_shows_everything_at_once() -> None:
    lines = drawn(trained(), Shown())
    text = "\n".join(lines)
    assert lines[0].startswith("● live  digits-3")
    assert lines[0].endswith("epoch 0  batch 40  39.0s")
    assert lines[1].endswith(" 40% of 100ba  1m00s left")
    assert lines[1].count("━") == pytest.approx(0.4 * lines[1].count("─") / 0.6, abs=2)
    assert any(line.split()[:2] == ["loss", "0.025"] for line in lines)
    assert "step  1 s" in text
    assert "publishing 10000 µs, 1.0%" in text
    assert "b backward 50%  d data 25%  . other 24%" in text
    assert "d" * 20 + "b" * 40 + "p" + "." * 19 in lines
    assert lines[-1].split("  ")[:3] == ["q quit", "↑↓ scroll", "e log"]
    assert "p pause" in lines[-1]


@pytest.mark.parametrize(("ending", "begins"), [("finished", "✓"), ("failed", "✗")])
def test_how_a_run_ended_stands_first(ending: str, begins: str) -> None:
    view = trained()
    view.end(Ending(ending, "ValueError: \x1b[31m no" if ending == "failed" else None))
    line = drawn(view)[0]
    assert line.startswith(f"{begins} {ending}  digits-3")
    assert (r"ValueError: \x1b[31m no" in line) == (ending == "failed")
    assert "left" not in drawn(view)[1]
    assert "S stop" not in drawn(view)[-1]


def test_what_stands_out_among_ranks_is_said() -> None:
    lines = drawn(trained(ranks=2, slow=1), height=40)
    place = next(number for number, line in enumerate(lines) if line.startswith("── 2 ranks "))
    assert lines[place + 1] == "the others wait for rank 1: 350 ms a batch"
    assert "ranks" not in "\n".join(drawn(trained(ranks=1), height=40))


@settings(deadline=None)
@given(st.lists(st.floats(width=32), min_size=1, max_size=100), st.integers(1, 50))
def test_a_curve_in_a_line_is_as_long_as_it_may_be_and_shows_what_is_not_finite(
    values: list[float], width: int
) -> None:
    curve = sparkline(points(*values), width).plain
    assert len(curve) == min(len(values), width)
    assert ("!" in curve) == any(not math.isfinite(value) for value in values)


def test_what_people_look_at_first_comes_first_and_norms_last() -> None:
    view = trained()
    names = ["l2_norm/grad/global", "throughput/batches_per_sec", "metrics/eval/Accuracy", "mine", "loss/train/a"]
    view.log_rows([Row(1, 0.0, dict.fromkeys(names, 1.0))])
    assert [name for group in groups_of(view.names()).values() for name in group] == [
        "loss/train/total",
        "loss/train/a",
        "metrics/eval/Accuracy",
        "lr-SGD/group0",
        "throughput/batches_per_sec",
        "mine",
        "l2_norm/grad/global",
    ]


def test_that_an_evaluation_began_is_told_only_while_it_goes_on() -> None:
    view = trained()
    evaluation = {"dataloader_label": "eval", "timestamp": Timestamp(batch=40), "time_ns": 41 * SECOND}
    for _ in range(3):
        view.see(Snapshot.build(Event.EVAL_START, **evaluation))
        assert drawn(view)[-2].endswith("evaluation 'eval' begins")
        view.see(Snapshot.build(Event.EVAL_END, **evaluation, eval_metrics={"eval": {"Accuracy": 0.5}}))
    assert not any("begins" in line for line in drawn(view, Shown(page="log")))
    assert sum("evaluation 'eval': Accuracy 0.5" in line for line in drawn(view, Shown(page="log"))) == 3


def test_a_stopped_run_says_why_and_how_much_of_what_was_planned_it_reached() -> None:
    view = trained()
    view.see(batch_end(41, planned_duration="400ba", max_duration="41ba"))
    view.end(Ending("stopped", reason="early-stop: Accuracy not better than 0.5 for 2 epochs"))
    first, second, *_ = drawn(view)
    assert first.startswith("■ stopped  digits-3  early-stop: Accuracy not better than 0.5 for 2 epochs")
    assert second.endswith(" batch 41,  10% of 400ba")
