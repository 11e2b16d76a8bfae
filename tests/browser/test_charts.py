"""What charts of a run show in a real browser, and what people do with them."""

import math
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Shared, Visit, visit

from offloop.bus import Event, Publisher
from offloop.bus.types.commands import Command
from offloop.bus.types.metrics import MetricNames
from offloop.bus.types.timestamp import Timestamp

pytestmark = pytest.mark.timeout(180)

LOSS, RATE, ACCURACY = "loss/train/total", "lr-SGD/group0", "metrics/eval/accuracy"
MEMORY, NOISE, STEADY, RARE = "system/memory_used_bytes", "a_group/noise", "system/steady", "system/rare"
PHASES = "phases/0"
BATCHES, PER_EPOCH, SAMPLES, BEST, SPIKE, NAN = 2_000, 100, 8, 1_500, 1_200, 1_700
HAPPENED = [(400, "pause"), (400, "resume"), (500, "evaluation"), (700, "set"), (1_000, "checkpoint")]
MILLISECOND = 1_000_000
LARGE = {"width": 1280, "height": 2600}
"""All charts can be seen at once."""


def record(where: Path) -> None:
    chance, batch = random.Random(1), 0

    def clock() -> int:
        """Steps are as long as they say, on a busy machine, too."""
        return (1_700_000_000_000 + 10 * batch) * MILLISECOND

    with Publisher("marked", runs_dir=where, clock=clock) as publisher:
        at = {"batch": 0, "sample": 0, "epoch": 0, "dataloader_len": PER_EPOCH, "max_duration": f"{BATCHES}ba"}
        publisher.publish(Event.FIT_START, **at)
        for batch in range(1, BATCHES + 1):
            at |= {"batch": batch, "sample": SAMPLES * batch, "epoch": (batch - 1) // PER_EPOCH}
            loss = {BEST + 1: 0.125, SPIKE + 1: 1e4, NAN + 1: math.nan}.get(batch, 2 + math.cos(batch / 100))
            logged = {MEMORY: (7 + batch / BATCHES) * 2**30, NOISE: chance.gauss(0, 1), STEADY: 0.1}
            if batch % 500 == 1:
                logged[RARE] = chance.gauss(0, 1)
            more: dict[str, Any] = {"batch_in_epoch": (batch - 1) % PER_EPOCH + 1, "batch_size": SAMPLES}
            if batch % 50 == 0:
                length = 30_000 if batch == BATCHES // 2 else 10
                spans = [["data", 0, MILLISECOND], ["forward", MILLISECOND, (length - 1) * MILLISECOND]]
                more["phases"] = {"began": clock(), "spans": spans, "device": False}
            publisher.log(logged, batch - 1)
            publisher.publish(Event.BATCH_END, **at, **more, loss=loss, lr={"SGD": [1000.0 + batch]})
            now = Timestamp(batch=batch).values
            for kind in (kind for place, kind in HAPPENED if place == batch):
                if kind == "evaluation":
                    metrics = {"eval": {"accuracy": 0.75}}
                    publisher.publish(Event.EVAL_END, **at, dataloader_label="eval", eval_metrics=metrics)
                elif kind == "checkpoint":
                    publisher.mark_checkpoint("save", now)
                else:
                    arguments = ("lr", 0.1) if kind == "set" else ()
                    publisher.answer(Command(kind, arguments, f"{kind} {batch}"), Event.BATCH_CHECKPOINT, now)
        publisher.close("finished")


@pytest.fixture(scope="module")
def url(shared_dashboard: Shared) -> str:
    record(shared_dashboard.runs_dir)
    return shared_dashboard.url_of("marked")


def _sees_the_whole_run(there: Visit, *charts: str) -> None:
    for chart in charts or (LOSS, RATE, MEMORY, NOISE):
        there.waits_for(lambda chart=chart: there.points(chart) and there.points(chart)[-1][0] >= BATCHES - 1, chart)
        there.waits_for(lambda chart=chart: there.drawn(chart), f"{chart} drawn")


def _choose(there: Visit, chart: str, item: str) -> None:
    """Chooses from the menu of a chart, by the keyboard."""
    there.page.get_by_role("button", name=f"Menu of {MetricNames([chart]).short(chart)}", exact=True).press("Enter")
    there.page.locator(".chart-menu .q-item").filter(has_text=item).press("Enter")
    there.page.locator(".chart-menu").wait_for(state="detached")


def test_marks_stand_at_their_place_on_each_axis_say_what_happened_and_can_be_left_out(url, browser):
    def marks() -> list[tuple[float, str]]:
        return [(round(mark["x"], 3), mark["kind"]) for mark in there.drawn(LOSS)["marks"]]

    with visit(browser, url, viewport=LARGE) as there:
        page = there.page
        _sees_the_whole_run(there)
        there.waits_for(lambda: marks() == HAPPENED, "marks")
        there.point_at(LOSS, 700, there.drawn(LOSS)["ends"][1])
        # The symbol is above the plot, where it covers no curve.
        page.mouse.move(there.box(LOSS)["x"] + there.board("pixelsOf", LOSS, 700, 1)[0], there.box(LOSS)["y"] + 9)
        there.waits_for(lambda: "'set lr 0.1' took effect at batch 700" in "".join(there.tip()), "what happened")
        assert re.search(r"batch 700 · .*\d\d:\d\d:\d\d", "".join(there.tip()))
        assert "'set lr 0.1' took effect" in str(page.locator(f'[data-plot="{LOSS}"]').get_attribute("aria-label"))
        for axis, per_batch in (("sample", SAMPLES), ("epoch", 1 / PER_EPOCH), ("batch", 1)):
            page.get_by_role("button", name=axis, exact=True).click()
            expected = [(round(batch * per_batch, 3), kind) for batch, kind in HAPPENED]
            there.waits_for(lambda expected=expected: marks() == expected, f"marks by {axis}")
        page.get_by_role("switch", name="marks").click()
        there.waits_for(lambda: not marks(), "no marks")
        page.reload()
        _sees_the_whole_run(there, LOSS)
        assert not marks()


def test_one_spike_does_not_flatten_a_line_and_nan_and_long_steps_are_named(url, browser):
    with visit(browser, url, viewport=LARGE) as there:
        _sees_the_whole_run(there)
        assert [SPIKE, 1e4] in [list(point) for point in there.points(LOSS)]
        assert 3 <= there.drawn(LOSS)["ends"][1] < 4
        assert [one["x"] for one in there.drawn(LOSS)["cut"]] == [SPIKE]
        assert [one["x"] for one in there.drawn(LOSS)["odd"]] == [NAN]
        there.sees("1 not finite")
        box = there.box(LOSS)
        there.page.get_by_role("button", name="outlier: 10,000").wait_for()
        there.page.mouse.dblclick(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        there.waits_for(lambda: there.drawn(LOSS)["ends"][1] >= 1e4, "everything")
        there.page.get_by_role("button", name="all values").click()
        there.waits_for(lambda: there.drawn(LOSS)["ends"][1] < 4, "it as before")
        there.sees("1 step is cut off: 30 s")
        assert 0.01 <= there.drawn(PHASES)["ends"][1] < 0.02
        assert [one["x"] for one in there.drawn(PHASES)["cut"]] == [BATCHES // 2]
        there.point_at(PHASES, BATCHES // 2, 0.005)
        there.waits_for(lambda: any("forward" in line and "30 s" in line for line in there.tip()), "its phases")


def test_smoothing_is_an_average_with_weights_that_fall_with_the_distance(url, browser):
    amount = 0.6
    with visit(browser, f"{url}#smoothing={amount}", viewport=LARGE) as there:
        _sees_the_whole_run(there)
        points = there.points(NOISE)
        xs, ys = (np.array(values) for values in zip(*points, strict=True))
        distances = (xs[:, None] - xs[None, :]) / (xs[-1] - xs[0])
        reach = max(0.25 * amount**2, 2 * amount / (len(xs) - 1))
        weights = np.where(distances >= 0, np.exp(-np.maximum(distances, 0) / reach), 0)
        assert there.line(NOISE, "0 smoothed") == pytest.approx((weights @ ys / weights.sum(axis=1)).tolist(), abs=1e-6)
        assert there.line(NOISE, 0) == ys.tolist()
        # The average of a constant is that constant, and without what is cut off.
        assert set(there.line(STEADY, "0 smoothed")) == {y for _, y in there.points(STEADY)}
        assert max(y for y in there.line(LOSS, "0 smoothed") if y is not None) < 4
        assert not there.line(RATE, "0 smoothed"), "a learning rate is what somebody chose"
        assert not there.line(RARE, "0 smoothed"), "of few points"


def test_settings_survive_a_reload_and_are_in_the_link(url, browser):
    with visit(browser, url, viewport=LARGE) as there:
        page = there.page
        _sees_the_whole_run(there)
        page.get_by_role("button", name="epoch", exact=True).click()
        for key in ("s", "s", "l", "d"):
            page.keyboard.press(key)
        page.get_by_role("button", name="lr 1", exact=True).click()
        width = there.box(LOSS)["width"]
        page.get_by_role("button", name="Make larger: loss").click()
        there.waits_for(lambda: there.box(LOSS)["width"] > 1.8 * width, "a wide chart")
        for chart in (NOISE, LOSS, ACCURACY):
            _choose(there, chart, "Pin to the top")
        page.get_by_label("Find charts by name").fill("o")

        def are_set(there: Visit) -> None:
            there.page.get_by_role("button", name="Make smaller: loss").wait_for()
            assert there.page.get_by_role("button", name="epoch", exact=True).get_attribute("aria-pressed") == "true"
            assert there.page.get_by_role("slider", name="Smoothing").get_attribute("aria-valuenow") == "0.2"
            assert there.page.get_by_role("switch", name="log scale").get_attribute("aria-checked") == "true"
            assert there.page.get_by_label("Find charts by name").input_value() == "o"
            there.waits_for(lambda: there.line(LOSS, "0 smoothed"), "a smoothed line")
            pinned = there.page.get_by_role("region", name="pinned", exact=True).locator(".chart")
            assert [one.get_attribute("data-chart") for one in pinned.all()] == [NOISE, LOSS]
            assert there.points(LOSS)[-1][0] == pytest.approx((BATCHES - 1) / PER_EPOCH), "epochs"
            there.page.get_by_label("Find charts by name").fill("")
            there.waits_for(lambda: pinned.count() == 3, "all that are pinned")
            assert [one.get_attribute("data-chart") for one in pinned.all()] == [NOISE, LOSS, ACCURACY]
            group = there.page.get_by_role("button", name="lr 1", exact=True)
            assert group.get_attribute("aria-expanded") == "false"
            there.page.get_by_label("Find charts by name").fill("o")

        are_set(there)
        page.get_by_role("link", name="Skip to the charts").press("Enter")
        there.waits_for(lambda: page.evaluate("document.activeElement.id") == "charts", "the charts")
        page.reload()
        are_set(there)
        page.locator("body.body--dark").wait_for()
        with visit(browser, page.url, viewport=LARGE) as other:
            are_set(other)
            assert other.page.locator("body.body--dark").count() == 0, "a theme is of who looks"
