"""The page of all runs while runs, the index and the server go away, and while others change the same things."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Dashboard, Visit, ui_of, visit
from helpers import wait_for
from playwright.sync_api import Error

from offloop.bus import Event, Publisher
from offloop.bus.index.annotations import annotate, read_annotations
from offloop.bus.index.index import RunIndex
from offloop.bus.index.store import INDEX_FOLDER

pytestmark = pytest.mark.timeout(180)

OFFLOOP = str(Path(sys.executable).with_name("offloop"))
LOSS = "loss/train/total"
NAMES = [f"run-{number}" for number in range(6)]
WIDE = {"viewport": {"width": 1700, "height": 900}}


@pytest.fixture(scope="module")
def template() -> Iterator[Path]:
    """Six runs that have ended."""
    where = Path(tempfile.mkdtemp(prefix="ol-", dir="/tmp"))
    for number, name in enumerate(NAMES):
        with Publisher(name, runs_dir=where) as publisher:
            publisher.publish(Event.FIT_START, max_duration="3ba", hyperparameters={"config": {"seed": number}})
            for batch in (1, 2, 3):
                publisher.publish(Event.BATCH_END, batch=batch, sample=8 * batch, batch_size=8, loss=1 / batch)
            publisher.close("finished")
    yield where
    shutil.rmtree(where)


@pytest.fixture
def runs(template: Path) -> Iterator[Path]:
    """The six, for one test alone."""
    where = Path(tempfile.mkdtemp(prefix="ol-", dir="/tmp"))
    shutil.copytree(template, where, dirs_exist_ok=True)
    yield where
    shutil.rmtree(where, ignore_errors=True)


@pytest.fixture
def served(runs: Path) -> Iterator[Dashboard]:
    """The page of them, of which nothing is a traceback in the terminal."""
    with ui_of(str(runs)) as started:
        yield started
    assert not [line for line in started.said if "Traceback" in line or "Error" in line], started.said


def names(there: Visit) -> set[str]:
    """The runs in the table; none while the page is loaded anew."""
    try:
        return set(there.page.locator("tbody .name a").all_inner_texts())
    except Error:
        return set()


def shows(there: Visit, *wanted: str) -> None:
    there.waits_for(lambda: names(there) == set(wanted), f"{wanted}", timeout=40)


def add_tag(there: Visit, run: str, tag: str) -> None:
    """Writes a tag, and leaves it to the caller to press Enter."""
    there.page.get_by_label(f"Add a tag to {run}").click()
    there.page.get_by_label(f"New tag of {run}").fill(tag)


def test_runs_that_are_removed_leave_the_table_and_their_pages_stay_until_they_are_loaded_anew(runs, served, browser):
    address = f"{served.url}runs?run={NAMES[0]}&run={NAMES[1]}"
    with visit(browser, served.url) as there, visit(browser, address) as page:
        shows(there, *NAMES)
        for run in (0, 1):
            page.waits_for(lambda run=run: len(page.points(LOSS, run)) == 3, "both")
        there.page.get_by_label(f"Select {NAMES[0]}").check()
        subprocess.run([OFFLOOP, "rm", "--yes", NAMES[0], "--runs-dir", str(runs)], check=True, capture_output=True)
        shutil.rmtree(runs / NAMES[1])
        shows(there, *NAMES[2:])
        assert len(page.points(LOSS, 0)) == len(page.points(LOSS, 1)) == 3
        page.page.reload()
        page.sees(f"There is no run '{NAMES[0]}'")
        page.sees(f"There is no run '{NAMES[1]}'")


def test_a_run_that_cannot_be_read_is_a_row_that_says_so_and_its_page_why(runs, served, browser):
    with visit(browser, served.url, **WIDE) as there:
        shows(there, *NAMES)
        record = json.loads((runs / NAMES[0] / "run.json").read_text())
        record["attempts"][0]["started"] = 1e300
        (runs / NAMES[0] / "run.json").write_text(json.dumps(record))
        there.page.locator(".status-unreadable").wait_for()
        shows(there, *NAMES)
        assert "run.json is damaged: Expected" in str(there.page.locator(".status-unreadable").get_attribute("title"))
        there.page.get_by_role("link", name=NAMES[0], exact=True).click()
        there.sees("run.json is damaged: Expected")


@pytest.mark.parametrize("fault", ["deleted", "damaged", "cut", "replaced", "no index at all"])
def test_whatever_becomes_of_the_index_the_table_is_right(runs, served, browser, fault):
    with visit(browser, served.url, **WIDE) as there:
        shows(there, *NAMES)
        index = runs / INDEX_FOLDER
        wait_for(lambda: len(list(index.glob("[!.]*"))) == len(NAMES), "the index")
        for file in index.iterdir():
            if fault == "damaged":
                file.write_bytes(os.urandom(file.stat().st_size))
            elif fault == "cut":
                os.truncate(file, 100)
        if fault not in ("damaged", "cut"):
            shutil.rmtree(index)
        if fault == "replaced":
            # By one that knows another run, and not these.
            other = Path(tempfile.mkdtemp(prefix="ol-", dir="/tmp"))
            shutil.copytree(runs / NAMES[0], other / "stranger")
            with RunIndex(other) as made:
                made.refresh()
            shutil.move(other / INDEX_FOLDER, index)
            shutil.rmtree(other)
        elif fault == "no index at all":
            index.write_text("this is no folder")
        annotate(runs / NAMES[0], add=["again"])
        shutil.copytree(runs / NAMES[1], runs / "another")
        shutil.rmtree(runs / NAMES[2])
        shows(there, "another", *(name for name in NAMES if name != NAMES[2]))
        there.sees("again")
        if fault == "no index at all":
            there.sees("cannot be used: Not a directory")
            index.unlink()
        there.page.locator(".notice").wait_for(state="detached")
        with RunIndex(runs) as made:
            assert made.refresh() == 0
            assert set(made.entries) == set(names(there))


def test_tags_that_two_browsers_and_two_servers_write_at_once_are_all_kept(runs, served, browser):
    with (
        ui_of(str(runs)) as second,
        visit(browser, served.url, **WIDE) as one,
        visit(browser, served.url, **WIDE) as other,
        visit(browser, second.url, **WIDE) as elsewhere,
    ):
        visits = (one, other, elsewhere)
        for number, there in enumerate(visits):
            shows(there, *NAMES)
            add_tag(there, NAMES[3], f"tag-{number}")
        for there in visits:
            # All of them before any answer.
            there.page.keyboard.press("Enter")
        for there in visits:
            for number in range(3):
                there.sees(f"tag-{number}")
        assert set(read_annotations(runs / NAMES[3]).tags) == {"tag-0", "tag-1", "tag-2"}
        elsewhere.page.get_by_label(f"Remove the tag tag-0 from {NAMES[3]}").click()
        for there in visits:
            there.waits_for(lambda there=there: there.page.get_by_text("tag-0").count() == 0, "one tag less")


def test_a_server_that_is_killed_and_started_again_has_the_page_back(runs, served, browser):
    with visit(browser, f"{served.url}#sort=run&find=seed+%3E+1", **WIDE) as there:
        shows(there, *NAMES[2:])
        port = served.port
        served.process.send_signal(signal.SIGKILL)
        there.sees("Connection lost")
        shutil.copytree(runs / NAMES[5], runs / "meanwhile")
        with ui_of(str(runs), "--port", str(port)) as again:
            assert again.port == port
            shows(there, *NAMES[2:], "meanwhile")
            assert there.page.get_by_text("Connection lost").is_visible() is False
            there.page.get_by_label("Search or filter runs").fill("meanwhile")
            shows(there, "meanwhile")
            # What the browser says of a server that is not there.
            there.errors.clear()
