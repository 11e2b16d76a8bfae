"""What a browser is sent of the charts, without a browser."""

import math

import pytest

from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.event import Event
from offloop.bus.types.timestamp import Timestamp
from offloop.bus.types.units import number_text, scale_of
from offloop.consumers.api.logger import Row
from offloop.consumers.dashboard.view.run_view import ProgressView, PublishingView, RunView, labels_of
from offloop.consumers.dashboard.web.charts import Chart, Lines, Look, charts_of
from offloop.consumers.dashboard.web.page import facts, rest_after

CHARTS = {"loss": Chart("loss", "metric", "loss")}
LOOK = Look("batch", None, {"loss": 400})


class Browser:
    """Puts together what it is sent, as the page does."""

    def __init__(self) -> None:
        self.runs = [RunView("run")]
        self.view = self.runs[0]
        self.lines = Lines()
        self.held: dict[float, float] = {}
        self.whole = 0

    def log(self, first: int, values: list[float]) -> None:
        self.view.log_rows([Row(step, 0.0, {"loss": value}) for step, value in enumerate(values, first)])

    def look(self, look: Look = LOOK) -> int:
        self.view.names()
        count = 0
        for line in self.lines.news(CHARTS, self.runs, look):
            if not line["a"]:
                self.held.clear()
                self.whole += 1
            self.held = {x: y for x, y in self.held.items() if not line["a"] or x < line["x"][0]}
            self.held.update(zip(line["x"].tolist(), line["y"].tolist(), strict=True))
            count += len(line["x"])
        return count


def test_only_what_is_new_is_sent():
    browser = Browser()
    browser.log(0, [1.0, 2.0, 3.0])
    assert browser.look() == 3
    assert browser.look() == 0
    browser.log(3, [4.0, 5.0])
    assert browser.look() == 3
    assert browser.held == {0: 1, 1: 2, 2: 3, 3: 4, 4: 5}
    assert browser.whole == 1


def test_a_value_that_is_corrected_gets_to_the_browser():
    browser = Browser()
    browser.log(0, [1.0, 2.0, 3.0])
    browser.look()
    browser.log(2, [9.0, 4.0])
    browser.look()
    assert browser.held == {0: 1, 1: 2, 2: 9, 3: 4}


def test_a_line_that_has_grown_much_is_sent_anew_and_stays_small():
    browser = Browser()
    for step in range(0, 20_000, 100):
        browser.log(step, [1 / (1 + batch) for batch in range(step, step + 100)])
        browser.look()
        assert len(browser.held) < 2_000
    assert 1 < browser.whole < 60
    assert max(browser.held) == 19_999


@pytest.mark.parametrize(
    ("told", "seconds"),
    [
        (0, 0.5),
        (0.15, 1.0),
        (10**400, 4.0),
        (math.nan, 0.5),
    ],
)
def test_the_longer_a_browser_draws_the_longer_it_rests(told, seconds):
    assert rest_after(told) == pytest.approx(seconds)


def test_charts_are_grouped_by_prefix_and_phases_have_their_own():
    view = RunView("run")
    runs = [view]
    names = ("metrics/eval/Accuracy", "loss/train/total", "lr-SGD/group0", "lonely")
    view.log_rows([Row(1, 0.0, dict.fromkeys(names, 1.0))])
    spans = [["data", 0, 10_000_000], ["forward", 10_000_000, 20_000_000]]
    field = {"began": 1_000_000_000, "spans": spans, "device": False}
    view.see(Snapshot.build(Event.BATCH_END, timestamp=Timestamp(batch=1), time_ns=1_050_000_000, phases=field))
    groups = charts_of(runs, labels_of(runs), Look())
    assert [title for title, _ in groups][:3] == ["loss/train", "metrics/eval", "lr"]
    assert groups[-1][0] == "step"
    charts = {chart.id: chart for _, members in groups for chart in members}
    assert charts["loss/train/total"].title == "loss"
    assert [chart.kind for chart in charts.values()].count("phases") == 1


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("loss/train/total", 0.123456789, "0.12346"),
        ("loss/train/total", None, ""),
        ("loss/train/total", math.nan, "NaN"),
        ("loss/train/total", 2_345_678.0, "2.3457M"),
        ("lr-AdamW/group0", 4.3235e-5, "4.3235e-5"),
        ("system/memory_used_bytes", 17_179_869_184, "16 GiB"),
        ("system/disk_read_bytes_per_sec", 1_572_864, "1.5 MiB/s"),
        ("throughput/flops_per_sec", 1.25e12, "1.25 TFLOP/s"),
        ("time/remaining_estimate", 0.01, "36 s"),
        ("time/phase/forward", 0.0025, "2.5 ms"),
    ],
)
def test_values_are_shown_in_their_units(name, value, text):
    assert number_text(value, scale_of(name, {"time/remaining_estimate_unit": "hours"})) == text


def test_facts_are_told_in_words():
    progress = ProgressView(3, 1234, 9999, 0, 125.0, 0.5, 3700.0, "10ep")
    told = facts(progress, PublishingView(12.4, 0.0005), "live")
    assert told == (
        "epoch 3 of 10 · batch 1,234 · 2m05s elapsed · about 1h01m left · "
        "publishing costs 12 µs a batch (0.05% of a step)"
    )
    told = facts(progress._replace(max_duration="8325ba"), PublishingView(None, None), "live")
    assert told == "epoch 3 · batch 1,234 of 8,325 · 2m05s elapsed · about 1h01m left"
    assert facts(progress, PublishingView(None, None), "waiting") == "no event has come yet"
