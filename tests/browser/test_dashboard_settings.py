"""How people set the charts of the page, and what these then show: settings that last, units, outliers, smoothing."""

import itertools
import math
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Dashboard, Visit, running, ui_of, visit

from offloop.bus import Event, Publisher

pytestmark = pytest.mark.timeout(180)

LOSS, RATE = "loss/train/total", "lr-SGD/group0"
MEMORY, NOISE = "system/memory_used_bytes", "a_group_with_a_name/that_is_rather_long/noise"
STEADY, RARE = "system/steady", "system/rare"
BATCHES, SPIKE = 2_000, 1_200
LARGE = {"width": 1280, "height": 1800}
"""All charts can be seen at once."""


@pytest.fixture(scope="module")
def served() -> Iterator[Dashboard]:
    """A page of a run with a constant rate, a loss that has one spike, noise, memory in bytes, a constant, and four
    values of another metric."""
    where = Path(tempfile.mkdtemp(prefix="ol-", dir="/tmp"))
    chance = random.Random(1)
    with Publisher("spiky", runs_dir=where) as publisher:
        publisher.publish(Event.FIT_START, max_duration=f"{BATCHES}ba")
        for batch in range(BATCHES):
            loss = 1e4 if batch == SPIKE else 2.5 * math.exp(-batch / 300) + 0.05 * chance.random()
            logged = {MEMORY: (7 + batch / BATCHES) * 2**30, NOISE: chance.gauss(0, 1), STEADY: 0.1}
            if batch % 500 == 0:
                logged[RARE] = chance.gauss(0, 1)
            at = {"batch": batch + 1, "sample": 8 * batch + 8, "batch_size": 8, "epoch": batch // 100}
            at["max_duration"] = f"{BATCHES}ba"
            publisher.publish(Event.BATCH_END, **at, loss=loss, lr={"SGD": [0.1]}, logged=[[batch, logged]])
        publisher.close("finished")
    with ui_of("spiky", "--runs-dir", str(where)) as started:
        yield started
    shutil.rmtree(where)


def _sees_the_whole_run(there: Visit, *charts: str) -> None:
    for chart in charts or (LOSS, RATE, MEMORY, NOISE):
        there.waits_for(lambda chart=chart: there.points(chart) and there.points(chart)[-1][0] >= BATCHES - 1, chart)
        there.waits_for(lambda chart=chart: there.pixels(chart) > 0, f"{chart} drawn")


def _smoothed(there: Visit, chart: str) -> list[float]:
    return [y for _, y in there.drawn(chart, "0 smoothed")]


def test_settings_survive_a_reload_and_are_in_the_link(served, browser):
    with visit(browser, served.url, viewport=LARGE) as there:
        page = there.page
        _sees_the_whole_run(there)
        page.get_by_role("button", name="epoch", exact=True).click()
        for key in ("s", "s", "l", "d"):
            page.keyboard.press(key)
        page.get_by_role("button", name="lr 1", exact=True).click()
        page.get_by_role("button", name="Make larger: loss").click()
        page.get_by_label("Find charts by name").fill("o")

        def are_set(there: Visit) -> None:
            there.page.get_by_role("button", name="Make smaller: loss").wait_for()
            assert there.page.get_by_role("button", name="epoch", exact=True).get_attribute("aria-pressed") == "true"
            assert there.page.get_by_role("slider", name="Smoothing").get_attribute("aria-valuenow") == "0.2"
            assert there.page.get_by_role("switch", name="log scale").get_attribute("aria-checked") == "true"
            assert there.page.get_by_label("Find charts by name").input_value() == "o"
            group = there.page.get_by_role("button", name="lr 1", exact=True)
            assert group.get_attribute("aria-expanded") == "false"
            there.waits_for(lambda: there.drawn(LOSS, "0 smoothed"), "a smoothed line")
            assert there.points(LOSS)[-1][0] == (BATCHES - 1) // 100, "epochs"

        are_set(there)
        page.evaluate(
            "() => { window.skipped = new Promise((done) => addEventListener('hashchange', () => done(true))); }"
        )
        page.get_by_role("link", name="Skip to the charts").focus()
        page.keyboard.press("Enter")
        assert page.evaluate("() => window.skipped")
        page.reload()
        are_set(there)
        page.locator("body.body--dark").wait_for()
        assert page.get_by_role("button", name="Link for viewers").count() == 0, "without tokens there is none"
        with visit(browser, page.url, viewport=LARGE) as other:
            are_set(other)
            assert other.page.locator("body.body--dark").count() == 0, "a theme is of who looks"


def test_a_link_with_nonsense_in_it_opens_the_page_as_usual(served, browser):
    with visit(
        browser, served.url + "#x=<b>&smoothing=no&log=2&theme=pink&closed=&wide=nothing&%", viewport=LARGE
    ) as there:
        _sees_the_whole_run(there)
        assert there.page.get_by_role("button", name="batch", exact=True).get_attribute("aria-pressed") == "true"
        assert not there.drawn(LOSS, "0 smoothed")


def test_plus_makes_a_chart_as_wide_as_the_page(served, browser):
    with visit(browser, served.url, viewport=LARGE) as there:
        _sees_the_whole_run(there)
        assert there.box(LOSS)["width"] < 700
        there.page.get_by_role("button", name="Make larger: loss").click()
        there.waits_for(lambda: there.box(LOSS)["width"] > 1200, "a wide chart")
        there.page.get_by_role("button", name="Make smaller: loss").click()
        there.waits_for(lambda: there.box(LOSS)["width"] < 700, "it as before")


def test_typed_text_stays_while_the_page_is_drawn_anew(runs_dir, browser):
    with running("typed"), ui_of("typed", "--wait") as served, visit(browser, served.url) as there:
        there.waits_for(lambda: len(there.points(LOSS)) > 5, "points")
        search = there.page.get_by_label("Find charts by name")
        search.focus()
        text = "loss/train/total"
        for place, letter in enumerate(text, 1):
            before = there.points(LOSS)[-1][0]
            there.page.keyboard.type(letter)
            if place % 4 == 0:
                there.waits_for(lambda before=before: there.points(LOSS)[-1][0] > before, "a frame")
            assert search.input_value() == text[:place]
        there.waits_for(lambda: there.page.locator(".chart").count() == 1, "one chart")
        there.page.get_by_role("button", name="Theme: as the system has it").click()
        assert search.input_value() == text


def test_the_average_of_a_constant_is_that_constant(served, browser):
    with visit(browser, served.url + "#smoothing=0.6", viewport=LARGE) as there:
        _sees_the_whole_run(there)
        there.waits_for(lambda: _smoothed(there, STEADY), "the smoothed line")
        assert len(set(_smoothed(there, STEADY))) == 1
        assert {y for _, y in there.points(STEADY)} == set(_smoothed(there, STEADY))
        scale = there.board("shownScale", STEADY)
        assert scale["min"] < 0.099 < 0.101 < scale["max"]


def test_neither_learning_rates_nor_lines_of_few_points_are_smoothed(served, browser):
    with visit(browser, served.url + "#smoothing=0.6", viewport=LARGE) as there:
        _sees_the_whole_run(there, NOISE, RATE)
        there.waits_for(lambda: len(there.points(RARE)) == 4 and there.pixels(RARE), "the rare values")
        there.waits_for(lambda: _smoothed(there, NOISE), "the smoothed line")
        for chart in (RATE, RARE):
            (series,) = there.plot(chart, "chart.getOption().series")
            assert series["lineStyle"]["opacity"] == 1


@pytest.mark.parametrize("position", [0.05, 0.1, 0.2, 0.3, 0.6, 0.99])
def test_every_part_of_the_slider_smooths_more_than_the_one_before(served, browser, position):
    def roughness(smoothing: float) -> float:
        with visit(browser, f"{served.url}#smoothing={smoothing}", viewport=LARGE) as there:
            _sees_the_whole_run(there)
            there.waits_for(lambda: _smoothed(there, NOISE), "a smoothed line")
            line = _smoothed(there, NOISE)
            return sum(abs(one - other) for one, other in itertools.pairwise(line)) / len(line)

    assert roughness(position) < 0.85 * roughness(position / 2)


def test_one_spike_does_not_flatten_a_line_and_a_double_click_shows_it(served, browser):
    with visit(browser, served.url, viewport=LARGE) as there:
        _sees_the_whole_run(there)
        assert [SPIKE, 1e4] in [list(point) for point in there.points(LOSS)]
        assert 2.5 <= there.board("shownScale", LOSS)["max"] < 5
        assert there.plot(LOSS, "chart.getOption().series.find((one) => one.id == '0 cut off').data.length") == 1
        box = there.box(LOSS)

        def double_click() -> None:
            there.page.mouse.dblclick(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)

        there.page.get_by_role("button", name="outlier: 10,000").wait_for()
        double_click()
        there.waits_for(lambda: there.board("shownScale", LOSS)["max"] >= 1e4, "everything")
        double_click()
        there.waits_for(lambda: there.board("shownScale", LOSS)["max"] < 5, "it as before")
        there.page.get_by_role("button", name="outlier: 10,000").click()
        there.waits_for(lambda: there.board("shownScale", LOSS)["max"] >= 1e4, "everything")
        # The average leaves out what is cut off.
        there.page.get_by_role("button", name="all values").click()
        there.page.keyboard.press("s")
        there.waits_for(lambda: _smoothed(there, LOSS), "the smoothed line")
        assert max(_smoothed(there, LOSS)) < 3


def test_labels_have_units_and_none_is_there_twice(served, browser):
    with visit(browser, served.url, viewport=LARGE) as there:
        _sees_the_whole_run(there)
        memory = there.labels(MEMORY)
        assert {"7.0 GiB", "7.5 GiB", "8.0 GiB"} <= set(memory)
        chart = there.page.locator(f'[data-chart="{MEMORY}"]')
        assert chart.locator(".value").inner_text() == "7.9995 GiB"
        assert chart.locator(".title").inner_text() == "memory_used_bytes"
        assert chart.locator(".title").get_attribute("title") == MEMORY
        there.page.get_by_role("button", name="time", exact=True).click()

        def over_time() -> list[str]:
            return [text for text in there.labels(MEMORY) if text.endswith("s")]

        there.waits_for(lambda: len(over_time()) > 1, "seconds on the axis")
        for chart_id in (LOSS, RATE, MEMORY, NOISE):
            values = [text for text in there.labels(chart_id) if not text.endswith("s")]
            assert len(values) == len(set(values)) > 1, chart_id
            assert len(over_time()) == len(set(over_time())), over_time()


def test_a_value_is_not_cut_however_long_the_name_before_it_is(served, browser):
    with visit(browser, served.url, viewport={"width": 390, "height": 844}) as there:
        there.page.locator(f'[data-chart="{NOISE}"]').scroll_into_view_if_needed()
        there.waits_for(lambda: there.page.locator(f'[data-chart="{NOISE}"] .value').count() == 1, "values")
        fits = """() => [...document.querySelectorAll(".latest")].every((one) => {
            const card = one.closest(".chart").getBoundingClientRect(), own = one.getBoundingClientRect();
            return one.scrollWidth <= one.clientWidth + 1 && own.right <= card.right && own.left >= card.left;
        })"""
        assert there.page.evaluate(fits)
