"""How the charts of the web dashboard are drawn in a real browser: what, how often, and with which labels."""

import contextlib
import math
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Dashboard, Visit, running, ui_of, visit

from offloop.bus import Event, Publisher
from offloop.consumers.dashboard.web.page import FRAME_SECONDS, rest_after

pytestmark = pytest.mark.timeout(180)

LOSS, RATE, SPEED = "loss/train/total", "lr-SGD/group0", "throughput/samples_per_sec"
BATCHES, NAN = 3_000, 2_000
MILLISECOND = 1_000_000
PHASES = "phases/0"
LARGE = {"width": 1280, "height": 2000}
"""All charts can be seen at once."""


@pytest.fixture(scope="module")
def served() -> Iterator[Dashboard]:
    """A page of a run whose losses differ in their ninth digit; each step took 10 ms, the first one and one in its
    middle 30 s."""
    where = Path(tempfile.mkdtemp(prefix="ol-", dir="/tmp"))
    with Publisher("long", runs_dir=where) as publisher:
        publisher.publish(Event.FIT_START, max_duration=f"{BATCHES}ba")
        for batch in range(BATCHES):
            loss = math.nan if batch == NAN else 123_456 + math.sin(batch / 40) / 2
            more: dict[str, Any] = {"lr": {"SGD": [1000.0 + batch]}}
            if batch % 50 == 0:
                length = 30_000 if batch in (0, BATCHES // 2) else 10
                spans = [["data", 0, MILLISECOND], ["forward", MILLISECOND, (length - 1) * MILLISECOND]]
                more["phases"] = {"began": time.time_ns(), "spans": spans, "device": False}
            publisher.publish(Event.BATCH_END, batch=batch + 1, sample=8 * batch + 8, loss=loss, batch_size=8, **more)
        publisher.close("finished")
    with ui_of("long", "--runs-dir", str(where)) as started:
        yield started
    shutil.rmtree(where)


def _sees_the_whole_run(there: Visit) -> None:
    for chart in (LOSS, RATE):
        there.waits_for(lambda chart=chart: there.points(chart) and there.points(chart)[-1][0] >= BATCHES - 1, chart)
    there.waits_for(lambda: there.drawn(PHASES, "forward"), "the phases")


def test_the_pointer_over_one_chart_shows_its_values_and_its_place_in_the_others(served, browser):
    with visit(browser, served.url, viewport={"width": 900, "height": 2000}) as there:
        _sees_the_whole_run(there)
        box = there.box(LOSS)
        # It is the place on the axis that they share, not that on the screen.
        assert there.box(PHASES)["width"] > 1.5 * box["width"]
        tips = there.page.locator(".tip").filter(visible=True)

        line = "chart.getModel().getComponent('xAxis', 0).get(['axisPointer', 'status']) === 'show'"
        at = "chart.getModel().getComponent('xAxis', 0).get(['axisPointer', 'value'])"

        def heads() -> list[str]:
            there.page.mouse.move(box["x"] + 0.75 * box["width"], box["y"] + 100)
            return [tip.splitlines()[0] for tip in tips.all_inner_texts()]

        there.waits_for(
            lambda: all(there.plot(chart, line) for chart in (LOSS, RATE, PHASES) if heads()), "a line in each"
        )
        assert len(heads()) == 1, "the values of the chart below the pointer"
        assert all(abs(there.plot(one, at) - 0.75 * BATCHES) < 0.05 * BATCHES for one in (LOSS, RATE, PHASES))
        there.page.mouse.move(1, 1)
        there.waits_for(lambda: tips.count() == 0 and not there.plot(PHASES, line), "no place in any chart")


def test_smoothing_is_an_average_with_weights_that_fall_with_the_distance(served, browser):
    with visit(browser, served.url, viewport=LARGE) as there:
        _sees_the_whole_run(there)
        for _ in range(6):
            there.page.keyboard.press("s")
        amount = 0.6

        def is_drawn() -> bool:
            return there.page.get_by_role("slider", name="Smoothing").get_attribute("aria-valuenow") == str(amount)

        there.waits_for(is_drawn, "the slider")
        there.waits_for(lambda: there.drawn(LOSS, "0 smoothed"), "the smoothed line")
        points = there.points(LOSS)
        xs, ys = np.array([x for x, y in points if y is not None]), np.array([y for _, y in points if y is not None])
        assert NAN not in xs
        distances = (xs[:, None] - xs[None, :]) / (points[-1][0] - points[0][0])
        weights = np.where(distances >= 0, np.exp(-np.maximum(distances, 0) / (0.25 * amount**2)), 0)
        expected = weights @ ys / weights.sum(axis=1)

        def difference() -> float:
            smooth = there.drawn(LOSS, "0 smoothed")
            assert [x for x, _ in smooth] == [x for x, _ in points]
            return float(np.abs(np.array([y for _, y in smooth if y is not None]) - expected).max())

        there.waits_for(lambda: difference() < 1e-6, "what was computed here")
        assert np.abs(ys - expected).max() > 0.01
        assert [[x, y] for x, y in points] == [list(_pair(one)) for one in there.drawn(LOSS, "0")]


def _pair(drawn: Any) -> Any:
    """A point that has a symbol of its own holds its place in a field."""
    return drawn["value"] if isinstance(drawn, dict) else drawn


def test_labels_have_all_their_digits_and_separators(served, browser):
    with visit(browser, served.url, viewport=LARGE) as there:
        _sees_the_whole_run(there)
        assert {"1,000", "2,000", "4,000"} <= set(there.labels(RATE))
        assert {"123,455.5", "123,456.0", "123,456.5"} <= set(there.labels(LOSS))


def test_a_step_that_is_far_longer_than_others_leaves_them_visible_and_is_named(served, browser):
    with visit(browser, served.url, viewport=LARGE) as there:
        _sees_the_whole_run(there)
        there.sees("2 steps are cut off: up to 30 s")
        edge = "chart.getModel().getComponent('yAxis', 0).axis.scale.getExtent()[1]"
        # What is set is drawn with the next picture.
        there.waits_for(lambda: 0.01 <= there.plot(PHASES, edge) < 0.02, "an axis for the usual steps")
        assert [x for x, _ in there.drawn(PHASES, "cut off")] == [1, BATCHES // 2 + 1]
        box, place = there.box(PHASES), there.plot(PHASES, "chart.convertToPixel({xAxisIndex: 0}, 1)")
        tip = there.page.locator(".tip", has_text="forward").filter(visible=True)

        def is_told() -> bool:
            there.page.mouse.move(box["x"] + place, box["y"] + 80)
            return "batch 1: 30 s, cut off at the edge" in " ".join(tip.all_inner_texts())

        there.waits_for(is_told, "the value of the step that is cut off")
        there.page.mouse.move(1, 1)
        there.page.locator(f'[data-plot="{PHASES}"]').focus()
        there.page.keyboard.press("+")
        there.page.keyboard.press("ArrowRight")
        there.sees("1 step is cut off: 30 s")


def test_a_value_at_the_end_of_the_axis_is_not_beyond_it(runs_dir, browser):
    """12 * 0.0002, where the axis ends, is a little more than 0.0024."""
    with Publisher("rates", runs_dir=runs_dir) as publisher:
        for batch in range(90):
            rate = 0.003 if batch < 45 else 0.0024
            publisher.publish(Event.BATCH_END, batch=batch + 1, loss=1.0, lr={"SGD": [rate]})
        publisher.close("finished")
    with ui_of("rates", "--runs-dir", str(runs_dir)) as started, visit(browser, started.url) as there:
        there.waits_for(lambda: len(there.points(RATE)) > 80, "the rates")
        assert there.board("shownScale", RATE)["min"] == 0.0024
        assert there.page.locator(f'[data-chart="{RATE}"] .cut').count() == 0


def test_a_frame_sets_each_chart_once(runs_dir, browser):
    with running("often") as run, ui_of("often", "--wait") as served:
        with visit(browser, served.url, viewport=LARGE) as there:
            there.waits_for(lambda: there.points(SPEED), "every chart")
            there.count_frames()
            there.waits_for(lambda: there.counted()["begun"] >= 3, "frames", timeout=60)
            counted = there.counted()
            assert len(counted["set"]) == 4
            assert all(0 < times <= counted["begun"] for times in counted["set"].values()), counted
        assert run.process.poll() is None


def test_a_slow_browser_gets_fewer_frames_and_the_newest_points_and_holds_up_nobody(runs_dir, browser):
    with contextlib.ExitStack() as opened:
        opened.enter_context(running("seen"))
        served = opened.enter_context(ui_of("seen", "--wait"))
        fast, slow = (opened.enter_context(visit(browser, served.url, viewport=LARGE)) for _ in range(2))
        for there in (fast, slow):
            there.waits_for(lambda there=there: there.points(SPEED), "every chart")
            there.count_frames()
        slow.hold_frames(True)
        slow.waits_for(lambda: slow.counted()["begun"] > 0, "a frame that is never done")
        before = fast.counted()["begun"], slow.counted()["begun"]
        fast.waits_for(lambda: fast.counted()["begun"] >= before[0] + 2, "frames of the fast one", timeout=60)
        after = fast.counted()["begun"], slow.counted()["begun"]
        assert after[0] - before[0] > after[1] - before[1]
        newest = fast.points(LOSS)[-1][0]
        slow.hold_frames(False)
        slow.waits_for(lambda: slow.points(LOSS)[-1][0] >= newest, "the newest points in the slow one", timeout=60)


def test_a_browser_that_draws_slowly_rests_between_frames_but_its_texts_come_twice_a_second(runs_dir, browser):
    with contextlib.ExitStack() as opened:
        opened.enter_context(running("calm"))
        served = opened.enter_context(ui_of("calm", "--wait"))
        there = opened.enter_context(visit(browser, served.url, viewport=LARGE))
        there.waits_for(lambda: there.points(SPEED), "every chart")
        began = time.monotonic()
        there.count_frames(least_seconds=1.0)
        there.waits_for(lambda: len(there.counted()["told"]) >= 3, "frames", timeout=60)
        counted = there.counted()
        told = counted["told"]
        # Whatever frame was under way at first, those after it were sent in this time, but for the last.
        rests = [rest_after(seconds) - FRAME_SECONDS / 2 for seconds in told[1:-1]]
        assert 3 < sum(rests) <= time.monotonic() - began
        assert counted["text"] > 2 * len(rests)


OF_EVERY_OBJECT = ["__proto__", "constructor", "hasOwnProperty", "toString"]
"""What every object of a script has."""


@pytest.fixture
def odd_runs(runs_dir: Path) -> None:
    """Two runs with metrics of such names; the second one's loss becomes infinite, then NaN."""
    for number, name in enumerate(("fine", "odd")):
        with Publisher(name) as publisher:
            publisher.publish(Event.FIT_START)
            for batch in range(1, 101):
                loss = number and {60: math.inf}.get(batch, math.nan if batch > 80 else 0.0)
                logged = dict.fromkeys(OF_EVERY_OBJECT, number + batch / 100)
                publisher.publish(Event.BATCH_END, batch=batch, loss=loss or 1 / batch, logged=[[batch, logged]])


def test_a_metric_may_have_the_name_of_what_every_object_has(odd_runs, browser):
    with ui_of("fine", "odd") as served, visit(browser, served.url, viewport=LARGE) as there:
        for name in OF_EVERY_OBJECT:
            there.waits_for(lambda name=name: len(there.points(name, 1)) == 100, f"the points of {name}")
            chart = there.page.locator(f'[data-chart="{name}"]')
            chart.locator(".latest", has_text="2").wait_for()
            assert chart.locator("figcaption").inner_text().split() == [name, "1", "2", "+", "⋮"]
            chart.get_by_role("button", name=f"Values of {name}").click()
            assert chart.locator("tbody tr").last.inner_text().split() == [
                "odd",
                "2",
                "1.01",
                "@",
                "1",
                "2",
                "@",
                "100",
            ]


def test_marks_of_what_is_not_finite_cover_no_line_and_a_run_is_listed_once(odd_runs, browser):
    with ui_of("fine", "odd") as served, visit(browser, served.url, viewport=LARGE) as there:
        there.waits_for(lambda: len(there.not_finite(LOSS)) == 21, "the marks")
        marks = there.drawn(LOSS, "1 not finite")
        assert len(marks) == 21
        for mark in marks:
            is_above = mark["text"] == "inf"
            assert mark["value"][1] == is_above
            height, (_, down) = mark["symbolSize"][1], mark["symbolOffset"]
            assert (-down if is_above else down) >= height / 2
        box, tip = there.box(LOSS), there.page.locator(".tip", has_text="fine").filter(visible=True).first

        def rows(x: int) -> list[list[str]]:
            left = there.plot(LOSS, f"chart.convertToPixel({{xAxisIndex: 0}}, {x})")
            there.page.mouse.move(box["x"] + left, box["y"] + 100)
            return [row.split("\t")[:2] for row in tip.inner_text().splitlines()[1:]]

        for at, text in ((40, "0.0243902"), (89, "NaN"), (59, "inf")):
            there.waits_for(lambda at=at: tip.inner_text().startswith(f"batch {at}") if rows(at) else None, "the place")
            assert [name for name, _ in rows(at)] == ["fine", "odd"]
            assert rows(at)[1][1] == text
