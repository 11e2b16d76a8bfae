"""A consumer with its dashboard, and ``offloop ui`` of runs and of folders, lead to the same pages."""

import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Visit, commanded, visit
from run_folders import write_run

from offloop.bus.index.entry import STORED

pytestmark = pytest.mark.timeout(180)

LOSS = "loss/train/total"


@pytest.fixture(scope="module")
def runs() -> Iterator[Path]:
    where = Path(tempfile.mkdtemp(prefix="ol-", dir="/tmp"))
    for number, name in enumerate(("one", "two", "three"), 1):
        write_run(where, name, [number / batch for batch in (1, 2, 3)], config={"lr": number / 10})
    yield where
    shutil.rmtree(where)


def names(there: Visit) -> list[str]:
    return sorted(there.page.locator(".table-box tbody .name a").all_inner_texts())


def consumer_of(runs: Path, name: str):
    options = ("--replay", str(runs / name), "-o", "dashboard.port=0")
    return commanded(sys.executable, "-m", "offloop.consumers", "--callbacks", "dashboard", *options)


def test_from_the_page_of_a_run_a_link_leads_to_all_runs_of_its_folder_and_to_each(runs, browser):
    with consumer_of(runs, "one") as served:
        for path in runs.glob(f"*/{STORED}"):
            path.unlink()
        with visit(browser, served.url) as there:
            there.waits_for(lambda: len(there.points(LOSS)) == 3, "its own page")
            assert there.page.get_by_role("article").count() == 1
            # What nobody opens is not looked for.
            assert not list(runs.glob(f"*/{STORED}"))
            there.page.get_by_role("link", name="all runs").click()
            there.waits_for(lambda: names(there) == ["one", "three", "two"], "all of them")
            assert there.page.url == f"{served.url}all"
            there.page.get_by_role("link", name="two", exact=True).click()
            there.page.get_by_role("article", name="Run two", exact=True).wait_for()
            there.waits_for(lambda: [y for _, y in there.points(LOSS)] == pytest.approx([2.0, 1.0, 2 / 3]), "its loss")
            there.page.get_by_role("link", name="all runs").click()
            there.waits_for(lambda: len(names(there)) == 3, "all of them again")
        served.process.send_signal(signal.SIGINT)
        assert served.close() in (0, 130)
