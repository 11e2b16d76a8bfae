"""Many runs over one another in a real browser: found by the pointer, in groups, and beside a baseline."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest
from browser import Dashboard, Visit, ui_of, visit
from run_folders import write_run

pytestmark = pytest.mark.timeout(180)

LOSS = "loss/train/total"
RATES = (0.1, 0.01, 0.001)
BATCHES = 20
NAMES = [f"rate-{rate:g}-seed-{seed}" for rate in RATES for seed in range(6)]
BASELINE = "rate-0.01-seed-3"
GROUP = "group lr = 0.1"
LARGE = {"width": 1280, "height": 1400}


@pytest.fixture(scope="module")
def served() -> Iterator[Dashboard]:
    """The page of a folder of 18 runs: the loss of each is constant, its rate and a hundredth of its seed."""
    where = Path(tempfile.mkdtemp(prefix="ol-", dir="/tmp"))
    for rate in RATES:
        for seed in range(6):
            config = {"config": {"lr": rate, "seed": seed}}
            write_run(where, f"rate-{rate:g}-seed-{seed}", [rate + seed / 100] * BATCHES, **config)
    with ui_of(str(where)) as started:
        yield started
    shutil.rmtree(where)


def address(served: Dashboard, **more: str) -> str:
    return f"{served.url}runs?{urlencode([*(('run', name) for name in NAMES), *more.items()])}"


def lines(there: Visit) -> dict[str, tuple[list[float], list[float]]]:
    """What each line of the chart holds: places and values."""
    return {str(line["run"]): (line["x"], line["y"]) for line in there.board("pointsOf", LOSS) or []}


def sees_all(there: Visit) -> None:
    there.waits_for(lambda: len(lines(there)) == len(NAMES), "a line of each run")
    there.waits_for(lambda: len(there.drawn(LOSS).get("lines", ())) == len(NAMES), "all drawn")


def test_the_pointer_and_the_list_of_runs_let_one_of_many_lines_stand_out(served, browser):
    with visit(browser, address(served), viewport=LARGE) as there:
        sees_all(there)
        nearest = there.page.locator(".chart-tip .nearest", has_text="rate-0.1-seed-5")
        there.waits_for(lambda: there.point_at(LOSS, 10, 0.15) or nearest.count() == 1, "the line at the pointer")
        assert there.tip()[-1] == "and 10 more"
        there.page.mouse.move(2, 2)
        there.waits_for(lambda: not there.tip(), "nothing at the pointer")
        focused = "getElement(Number(document.querySelector('.board').id.slice(1))).focused"
        there.page.get_by_role("heading", name="rate-0.001-seed-3").hover()
        there.waits_for(lambda: there.page.evaluate(focused) == NAMES.index("rate-0.001-seed-3"), "its line")


def test_the_wheel_zooms_all_charts_and_what_is_seen_is_asked_for(served, browser):
    with visit(browser, address(served), viewport=LARGE) as there:
        sees_all(there)
        box = there.box(LOSS)
        there.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        there.page.keyboard.down("Control")
        for _ in range(4):
            there.page.mouse.wheel(0, -100)
        there.page.keyboard.up("Control")

        def span(chart: str) -> float:
            first, last = there.drawn(chart)["range"]
            return float(last - first)

        there.waits_for(lambda: span(LOSS) < BATCHES / 2, "a part of the axis")
        there.waits_for(lambda: span("lr-SGD/group0") == span(LOSS), "the same in another chart")
        told = "JSON.parse(getElement(Number(document.querySelector('.board').id.slice(1))).told).range"
        there.waits_for(lambda: there.page.evaluate(told), "the server to be asked")
        there.page.get_by_role("button", name="Reset zoom").click()
        there.waits_for(lambda: span(LOSS) >= BATCHES - 1, "everything")


def test_runs_are_grouped_and_their_mean_is_drawn_and_the_address_keeps_it(served, browser):
    with visit(browser, address(served), viewport=LARGE) as there:
        sees_all(there)
        there.page.get_by_label("group by").select_option(label="lr")
        groups = there.page.get_by_role("list", name="Groups").get_by_role("listitem")
        there.waits_for(lambda: groups.count() == 3, "three groups")
        assert groups.all_inner_texts()[-1] == "lr = 0.1 · 6 runs"
        there.waits_for(lambda: GROUP in lines(there), "their means")
        assert lines(there)[GROUP][1] == pytest.approx([0.125] * BATCHES)
        assert parse_qs(urlsplit(there.page.url).query)["group"] == ["config/lr"]
        there.page.reload()
        there.waits_for(lambda: groups.count() == 3, "the same groups")
        there.waits_for(lambda: len(lines(there)) == 3, "no single runs")
        there.page.get_by_label("single runs too").check()
        there.waits_for(lambda: len(lines(there)) == 3 + len(NAMES), "single runs")
        there.page.get_by_label("group by").select_option(label="nothing")
        there.waits_for(lambda: groups.count() == 0, "no groups")


def test_a_baseline_is_compared_with_all_others(served, browser):
    with visit(browser, address(served, group="lr", baseline=BASELINE), viewport=LARGE) as there:
        there.waits_for(lambda: GROUP in lines(there), "the groups")
        chart = there.page.locator(f'[data-chart="{LOSS}"]')
        worse, better = chart.locator(".apart.worse"), chart.locator(".apart.better")
        there.waits_for(lambda: (worse.count(), better.count()) == (1, 2), "what is worse, and what is better")
        assert worse.inner_text().startswith("+0.085")
        assert better.first.inner_text().startswith("-0.014")
        assert "worse" in worse.inner_text(), "not by its colour alone"
        assert there.page.get_by_role("cell", name="≠ 0.1").count() == 6
        there.page.get_by_label("baseline").select_option(label="none")
        there.waits_for(lambda: chart.locator(".apart").count() == 0, "no differences")
