"""The ways to the pages: a consumer with its dashboard, ``bus dashboard`` and ``bus ui`` lead to the same ones."""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Visit, commanded, dashboard_of, visit

from bus import Event, Publisher
from bus.index.index import INDEX_FILE

pytestmark = pytest.mark.timeout(180)

LOSS = "loss/train/total"


def record(where: Path, name: str, loss: float = 1.0) -> None:
    """A run of three batches that is over."""
    with Publisher(name, runs_dir=where) as publisher:
        publisher.publish(Event.FIT_START, max_duration="3ba", hyperparameters={"config": {"lr": loss / 10}})
        for batch in (1, 2, 3):
            publisher.publish(Event.BATCH_END, batch=batch, sample=8 * batch, loss=loss / batch, batch_size=8)
        publisher.close("finished")


@pytest.fixture(scope="module")
def runs() -> Iterator[Path]:
    """A folder with three runs."""
    where = Path(tempfile.mkdtemp(prefix="ol-", dir="/tmp"))
    for number, name in enumerate(("one", "two", "three"), 1):
        record(where, name, number)
    yield where
    shutil.rmtree(where)


def names(there: Visit) -> list[str]:
    return sorted(there.page.locator(".table-box tbody .name a").all_inner_texts())


def consumer_of(runs: Path, name: str):
    options = ("--replay", str(runs / name), "-o", "dashboard.port=0")
    return commanded(sys.executable, "-m", "consumers", "--callbacks", "dashboard", *options)


def dashboard_at(runs: Path, name: str):
    return dashboard_of(name, "--runs-dir", str(runs))


@pytest.mark.parametrize("door", [consumer_of, dashboard_at])
def test_from_the_page_of_a_run_a_link_leads_to_all_runs_of_its_folder_and_to_each(runs, browser, door):
    with door(runs, "one") as served:
        for file in runs.glob(f"{INDEX_FILE}*"):
            file.unlink()
        with visit(browser, served.url) as there:
            there.waits_for(lambda: len(there.points(LOSS)) == 3, "its own page")
            assert there.page.get_by_role("article").count() == 1
            # What nobody opens is not looked for.
            assert not (runs / INDEX_FILE).exists()
            there.page.get_by_role("link", name="all runs").click()
            there.waits_for(lambda: names(there) == ["one", "three", "two"], "all of them")
            assert there.page.url == f"{served.url}all"
            there.page.get_by_role("link", name="two", exact=True).click()
            there.page.get_by_role("article", name="Run two", exact=True).wait_for()
            there.waits_for(lambda: [y for _, y in there.points(LOSS)] == pytest.approx([2.0, 1.0, 2 / 3]), "its loss")
            there.page.get_by_role("link", name="all runs").click()
            there.waits_for(lambda: len(names(there)) == 3, "all of them again")
        with visit(browser, f"{served.url}view/all") as viewer:
            viewer.waits_for(lambda: len(names(viewer)) == 3, "all of them")
            assert viewer.page.locator(".tag-add, .more, button.note").count() == 0
        assert served.leave() in (0, 130)


def test_a_recording_that_lies_elsewhere_leads_to_no_folder(runs, tmp_path, browser):
    shutil.copy(runs / "one" / "recording-1.mcap", tmp_path / "alone.mcap")
    command = (sys.executable, "-m", "consumers", "--callbacks", "dashboard", "-o", "dashboard.port=0")
    with (
        commanded(*command, "--replay", str(tmp_path / "alone.mcap")) as served,
        visit(browser, served.url) as there,
    ):
        there.waits_for(lambda: len(there.points(LOSS)) == 3, "its page")
        assert there.page.get_by_role("link", name="all runs").count() == 0
