"""Views of all runs in a real browser: hyperparameters against a metric, and what is saved by name."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Dashboard, Visit, home_of, visit
from playwright.sync_api import Browser
from run_folders import write_run

from bus.index.saved_views import VIEWS_FILE, read_views, save_view

pytestmark = pytest.mark.timeout(180)

WIDE = {"width": 1500, "height": 900}
RATES = (0.1, 0.01, 0.001)


def name_of(rate: float, seed: int) -> str:
    return f"rate-{rate}-seed-{seed}"


BEST = name_of(0.1, 4)


@pytest.fixture(scope="module")
def runs() -> Iterator[Path]:
    """A dozen runs, the better the greater their rate and seed, and one without an accuracy."""
    with tempfile.TemporaryDirectory(prefix="ol-", dir="/tmp") as folder:
        where = Path(folder)
        for rate in RATES:
            for seed in (1, 2, 3, 4):
                config = {"lr": rate, "seed": seed, "optimizer": "adam" if seed % 2 else "sgd"}
                write_run(where, name_of(rate, seed), accuracy=rate + 0.1 * seed, started=1.7e9 + seed, config=config)
        write_run(where, "unmeasured", config={"lr": 0.5, "seed": 1, "optimizer": "adam"})
        yield where


@pytest.fixture
def served(runs: Path) -> Iterator[Dashboard]:
    (runs / VIEWS_FILE).unlink(missing_ok=True)
    with home_of(str(runs)) as started:
        yield started


def shown(there: Visit) -> list[str]:
    names = "[...document.querySelectorAll('.table-box tbody .name a')].map((one) => one.innerText)"
    return list(there.page.evaluate(names))


def test_a_view_that_is_saved_is_there_in_another_browser_until_it_is_deleted(
    runs: Path, served: Dashboard, browser: Browser
) -> None:
    with visit(browser, f"{served.url}#find=seed+%3E%3D+3&sort=run&run={BEST}&theme=dark", viewport=WIDE) as there:
        there.waits_for(lambda: len(shown(there)) == 6, "six runs")
        there.page.get_by_role("button", name="Views").click()
        there.sees("No view is saved yet.")
        there.page.get_by_label("Name of the new view").fill("good <seeds>")
        there.page.keyboard.press("Enter")
        there.page.get_by_role("button", name="good <seeds>", exact=True).wait_for()
        assert read_views(runs) == {"good <seeds>": "find=seed+%3E%3D+3&sort=run"}
        order = shown(there)
    with visit(browser, f"{served.url}#theme=light", viewport=WIDE) as other:
        other.waits_for(lambda: len(shown(other)) == 13, "all runs")
        other.page.get_by_role("button", name="Views").click()
        other.page.get_by_role("button", name="good <seeds>", exact=True).click()
        other.waits_for(lambda: shown(other) == order, "the same runs in that order")
        assert other.page.url.endswith("#find=seed+%3E%3D+3&sort=run&theme=light")
        other.page.get_by_label("Search or filter runs").fill("seed == 1")
        other.waits_for(lambda: len(shown(other)) == 4, "others")
        other.page.get_by_role("button", name="Views").click()
        other.page.get_by_role("button", name="Replace the view good <seeds>").click()
        other.page.get_by_role("button", name="Replace", exact=True).click()
        other.waits_for(lambda: "seed+%3D%3D+1" in read_views(runs)["good <seeds>"], "it replaced")
        other.page.get_by_role("button", name="Delete the view good <seeds>").click()
        other.page.get_by_role("button", name="Delete", exact=True).click()
        other.sees("No view is saved yet.")
        assert read_views(runs) == {}


def test_viewers_open_views_and_change_none_and_a_damaged_file_is_said(
    runs: Path, served: Dashboard, browser: Browser
) -> None:
    save_view(runs, "one run", f"find={BEST}")
    with visit(browser, f"{served.url}view", viewport=WIDE) as viewer:
        viewer.waits_for(lambda: len(shown(viewer)) == 13, "all runs")
        viewer.page.get_by_role("button", name="Views").click()
        menu = viewer.page.get_by_role("dialog", name="Saved views")
        menu.get_by_role("button", name="one run").wait_for()
        assert menu.get_by_role("button").count() == 1
        home = "getElement(Number(document.querySelector('.home').id.slice(1)))"
        viewer.page.evaluate(f"{home}.$emit('dropview', 'one run')")
        viewer.page.evaluate(f"{home}.$emit('saveview', {{ name: 'mine', address: 'x' }})")
        menu.get_by_role("button", name="one run").click()
        viewer.waits_for(lambda: shown(viewer) == [BEST], "the one")
        assert read_views(runs) == {"one run": f"find={BEST}"}
        (runs / VIEWS_FILE).write_text('{"views": <b>"')
        viewer.page.get_by_role("button", name="Views").click()
        viewer.sees("is not a file of saved views")
        assert viewer.page.locator(".views-list").count() == 0
