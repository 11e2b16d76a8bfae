"""Plots of all runs in a real browser: hyperparameters against a metric."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axe import has_nothing_serious
from browser import Dashboard, Visit, ui_of, visit
from playwright.sync_api import Browser
from run_folders import write_run

pytestmark = pytest.mark.timeout(180)

WIDE = {"width": 1500, "height": 900}
RATES = (0.1, 0.01, 0.001)


def name_of(rate: float, seed: int) -> str:
    return f"rate-{rate}-seed-{seed}"


BEST = name_of(0.1, 4)


@pytest.fixture(scope="module")
def runs() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ol-", dir="/tmp") as folder:
        where = Path(folder)
        for rate in RATES:
            for seed in (1, 2, 3, 4):
                config = {"lr": rate, "seed": seed, "optimizer": "adam" if seed % 2 else "sgd"}
                write_run(where, name_of(rate, seed), accuracy=rate + 0.1 * seed, started=1.7e9 + seed, config=config)
        write_run(where, "unmeasured", config={"lr": 0.5, "seed": 1, "optimizer": "adam"})
        yield where


@pytest.fixture(scope="module")
def served(runs: Path) -> Iterator[Dashboard]:
    with ui_of(str(runs)) as started:
        yield started


def explore(there: Visit, method: str, *arguments: object) -> object:
    """Asks the view beside the table."""
    home = "getElement(Number(document.querySelector('.home').id.slice(1))).$refs.explore"
    return there.page.evaluate(f"([method, given]) => {home}?.[method](...given)", [method, list(arguments)])


def at(there: Visit, method: str, *arguments: object) -> tuple[float, float]:
    before: list[object] = [None]

    def rests() -> tuple[float, float] | None:
        on_plot: Any = explore(there, method, *arguments)
        box = there.page.locator(".explore-plot").bounding_box()
        before.append(on_plot and box and (box["x"] + on_plot[0], box["y"] + on_plot[1]))
        return before[-1] if before[-1] == before[-2] else None  # type: ignore[return-value]

    found: tuple[float, float] = there.waits_for(rests, f"{arguments} drawn, and at rest")
    return found


def selected(there: Visit) -> set[str]:
    names = "new URLSearchParams(location.hash.slice(1)).getAll('run')"
    return set(there.page.evaluate(names))


def test_a_point_of_the_scatter_plot_names_its_run_is_selected_and_opened(served: Dashboard, browser: Browser) -> None:
    with visit(browser, served.url, viewport=WIDE) as there:
        there.page.get_by_role("button", name="Scatter").click()
        there.sees("12 runs; 1 more has no value on both axes")
        place = at(there, "placeOf", BEST)
        has_nothing_serious(there)
        there.page.mouse.move(*place)
        tip = there.page.locator(".tip")
        tip.wait_for()
        assert tip.inner_text().split("\n")[0] == BEST
        there.page.mouse.click(*place)
        there.waits_for(lambda: selected(there) == {BEST}, "it selected")
        there.page.mouse.click(*place)
        there.waits_for(lambda: not selected(there), "it not selected")
        there.page.get_by_label("Search or filter runs").fill("optimizer == adam")
        there.sees("6 runs; 1 more has no value on both axes")
        there.page.get_by_role("combobox", name="x axis").click()
        there.page.keyboard.type("optim")
        there.page.locator(".q-menu").get_by_role("option", name="config/optimizer").click()
        over_optimizer = there.page.get_by_role("application", name="Scatter plot of best Accuracy over optimizer")
        over_optimizer.wait_for()
        there.page.reload()
        over_optimizer.wait_for()
        place = at(there, "placeOf", name_of(0.01, 3))
        there.page.mouse.dblclick(*place)
        there.page.wait_for_url(f"**/runs?run={name_of(0.01, 3)}*")


def test_ranges_on_axes_select_the_runs_in_all_of_them(served: Dashboard, browser: Browser) -> None:
    with visit(browser, served.url, viewport=WIDE) as there:
        there.page.get_by_role("button", name="Parallel").click()
        there.sees("12 runs; 1 more has no best Accuracy")
        has_nothing_serious(there)

        def draw(axis: str, start: float, end: float) -> None:
            low, high = at(there, "placeOn", axis, start), at(there, "placeOn", axis, end)
            there.page.mouse.move(*low)
            there.page.mouse.down()
            there.page.mouse.move(high[0], (low[1] + high[1]) / 2, steps=4)
            there.page.mouse.move(*high, steps=4)
            there.page.mouse.up()

        draw("config/lr", 0.0014, 0.2)
        there.sees("8 within the ranges")
        expected = {name_of(rate, seed) for rate in (0.1, 0.01) for seed in (1, 2, 3, 4)}
        there.waits_for(lambda: selected(there) == expected, "these selected")
        draw("config/seed", 1.5, 2.5)
        expected = {name_of(rate, 2) for rate in (0.1, 0.01)}
        there.waits_for(lambda: selected(there) == expected, "those in both")
        there.sees("2 within the ranges")
        there.page.get_by_role("button", name="Clear ranges").click()
        there.waits_for(lambda: not selected(there), "none selected")
        assert there.page.get_by_text("within the ranges").count() == 0
