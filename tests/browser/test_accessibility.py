"""axe-core finds nothing serious on any view of the pages, dark and light, on a desk and on a phone."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from axe import LOOKS, has_nothing_serious
from browser import Dashboard, ui_of, visit
from run_folders import write_run

from offloop.bus.index.annotations import annotate

pytestmark = pytest.mark.timeout(180)

AT_A_DESK, ON_A_PHONE = ({"color_scheme": scheme, **size} for scheme, size in LOOKS)
NAMES = [f"rate-{rate}-seed-{seed}" for rate in (0.1, 0.01) for seed in (1, 2)]


@pytest.fixture(scope="module")
def served() -> Iterator[Dashboard]:
    where = Path(tempfile.mkdtemp(prefix="ol-", dir="/tmp"))
    for name in NAMES:
        rate, seed = float(name.split("-")[1]), int(name[-1])
        losses = [1 / batch + seed - rate for batch in range(1, 10)]
        status = "failed" if name == NAMES[1] else "finished"
        write_run(where, name, losses, rate + 0.1 * seed, status, config={"lr": rate, "seed": seed, "width": 32})
    annotate(where / NAMES[0], add=["baseline", "paper"], note="what we had before", pinned=True)
    annotate(where / NAMES[3], archived=True)
    with ui_of(str(where)) as started:
        yield started
    shutil.rmtree(where)


def test_the_table_of_all_runs(served, browser, look):
    with visit(browser, f"{served.url}#archived=1&run={NAMES[0]}&run={NAMES[1]}", **look) as there:
        there.sees("2 selected")
        there.waits_for(lambda: there.page.locator("tbody .name").count() == 4, "the runs")
        has_nothing_serious(there)
        there.page.get_by_label(f"Actions for {NAMES[0]}").click()
        there.page.get_by_role("menuitem", name="Archive").wait_for()
        has_nothing_serious(there)
        there.page.keyboard.press("Escape")
        there.page.get_by_role("button", name="Columns").click()
        there.page.get_by_role("dialog", name="Columns").wait_for()
        has_nothing_serious(there)


def test_the_page_of_a_run(served, browser):
    look = ON_A_PHONE
    with visit(browser, f"{served.url}runs?run={NAMES[0]}", **look) as there:
        there.waits_for(lambda: there.pixels("loss/train/total") > 0, "a chart")
        assert there.page.evaluate("document.documentElement.scrollWidth") <= look["viewport"]["width"]
        has_nothing_serious(there)


@pytest.mark.parametrize(("view", "look"), [("scatter", AT_A_DESK), ("parallel", ON_A_PHONE)])
def test_hyperparameters_against_a_metric(served, browser, look, view):
    with visit(browser, f"{served.url}#view={view}", **look) as there:
        there.page.locator(".home canvas").first.wait_for()
        has_nothing_serious(there)


def test_runs_in_groups_beside_a_baseline(served, browser):
    address = "&".join(f"run={name}" for name in NAMES[:3])
    address += f"&group=config/lr&baseline={NAMES[0]}"
    with visit(browser, f"{served.url}runs?{address}", **AT_A_DESK) as there:
        there.waits_for(lambda: there.pixels("loss/train/total") > 0, "a chart")
        has_nothing_serious(there)
