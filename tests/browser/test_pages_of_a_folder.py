"""A consumer with its dashboard, and ``offloop ui`` of runs and of folders, lead to the same pages."""

import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from browser import Visit, commanded, ui_of, visit
from click.testing import CliRunner
from helpers import wait_for

from offloop.bus import Event, Publisher
from offloop.bus.index.annotations import read_annotations
from offloop.bus.index.store import INDEX_FOLDER
from offloop.consumers.dashboard.web.command import ui
from offloop.consumers.dashboard.web.places import AllRuns, Places
from offloop.consumers.runner.places import FolderRuns

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
    return commanded(sys.executable, "-m", "offloop.consumers", "--callbacks", "dashboard", *options)


def dashboard_at(runs: Path, name: str):
    return ui_of(name, "--runs-dir", str(runs))


@pytest.mark.parametrize("served_by", [consumer_of, dashboard_at])
def test_from_the_page_of_a_run_a_link_leads_to_all_runs_of_its_folder_and_to_each(runs, browser, served_by):
    with served_by(runs, "one") as served:
        shutil.rmtree(runs / INDEX_FOLDER, ignore_errors=True)
        with visit(browser, served.url) as there:
            there.waits_for(lambda: len(there.points(LOSS)) == 3, "its own page")
            assert there.page.get_by_role("article").count() == 1
            # What nobody opens is not looked for.
            assert not (runs / INDEX_FOLDER).exists()
            there.page.get_by_role("link", name="all runs").click()
            there.waits_for(lambda: names(there) == ["one", "three", "two"], "all of them")
            assert there.page.url == f"{served.url}all"
            there.page.get_by_role("link", name="two", exact=True).click()
            there.page.get_by_role("article", name="Run two", exact=True).wait_for()
            there.waits_for(lambda: [y for _, y in there.points(LOSS)] == pytest.approx([2.0, 1.0, 2 / 3]), "its loss")
            there.page.get_by_role("link", name="all runs").click()
            there.waits_for(lambda: len(names(there)) == 3, "all of them again")
        assert served.leave() in (0, 130)


def test_a_recording_that_lies_elsewhere_leads_to_no_folder(runs, tmp_path, browser):
    shutil.copy(runs / "one" / "recording-1.mcap", tmp_path / "alone.mcap")
    command = (sys.executable, "-m", "offloop.consumers", "--callbacks", "dashboard", "-o", "dashboard.port=0")
    with (
        commanded(*command, "--replay", str(tmp_path / "alone.mcap")) as served,
        visit(browser, served.url) as there,
    ):
        there.waits_for(lambda: len(there.points(LOSS)) == 3, "its page")
        assert there.page.get_by_role("link", name="all runs").count() == 0


def test_several_folders_are_one_table(runs, tmp_path, browser):
    text = tmp_path / "text"
    record(text, "one", 9.0)
    with (
        ui_of(str(runs), str(text)) as served,
        visit(browser, served.url, viewport={"width": 1600, "height": 900}) as there,
    ):

        def row(name: str):
            return there.page.locator("tbody tr", has=there.page.get_by_label(f"Select {name}", exact=True))

        there.waits_for(lambda: names(there) == ["one", "one", "three", "two"], "all of them")
        row("text/one").get_by_role("button", name="Add a tag").click()
        there.page.keyboard.type("mine")
        there.page.keyboard.press("Enter")
        there.waits_for(lambda: read_annotations(text / "one").tags == ("mine",), "the tag")
        assert not read_annotations(runs / "one").tags
        there.page.get_by_label("Search or filter runs").fill("run ~ one")
        there.waits_for(lambda: names(there) == ["one", "one"], "those")
        there.page.get_by_label("Select all runs that are found").check()
        there.page.get_by_role("link", name="Compare").click()
        there.waits_for(lambda: there.page.get_by_role("article").count() == 2, "both on one page")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (("--wait",), "name them, as in 'offloop ui NAME --wait'"),
        ((".", "one"), "'one' is a run and '.' a folder of runs"),
    ],
)
def test_options_that_contradict_each_other_are_refused(wrong, said):
    error = CliRunner().invoke(ui, wrong, standalone_mode=False).exception
    assert isinstance(error, click.UsageError)
    assert said in str(error)


@pytest.fixture
def shown_by(runs, tmp_path, monkeypatch):
    """Gives the folders and the names of the runs that ``offloop ui`` with these arguments would serve."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OFFLOOP_RUNS_DIR", str(runs))
    for name in ("one", "later"):
        (tmp_path / name).mkdir()
    shown = []

    class Recorded:
        def __init__(self, listening, places, runs, every):
            folders = [place.directory and os.path.relpath(place.directory) for place in places]
            shown.append((folders, None if runs is None else [run.run_name for run in runs]))

        def start(self):
            pass

        def wait(self, seconds):
            return False

        stop = start

    monkeypatch.setattr("offloop.consumers.dashboard.web.site.Site", Recorded)

    def show(*arguments):
        CliRunner().invoke(ui, arguments, standalone_mode=False, catch_exceptions=False)
        return shown.pop()

    return show


def test_an_argument_is_a_run_or_a_folder_of_runs(runs, shown_by):
    where = os.path.relpath(runs)
    assert shown_by() == ([None], None)
    assert shown_by("--runs-dir", str(runs)) == ([where], None)
    assert shown_by(str(runs), "later") == ([where, "later"], None)
    assert shown_by(str(runs), "--runs-dir", "later") == ([where, "later"], None)
    assert shown_by("two", "three", "two") == ([None], ["two", "three"])
    assert shown_by(str(runs / "two"), str(runs / "one" / "recording-1.mcap")) == ([None], ["two", "one"])
    # Folders of the current directory that are named like a run, and like one that may come.
    assert shown_by("one") == ([None], ["one"])
    assert shown_by("./one") == (["one"], None)
    assert shown_by("later", "--wait") == ([None], ["later"])


def test_a_table_that_nobody_looks_at_any_more_is_left(runs, monkeypatch):
    monkeypatch.setattr("offloop.consumers.dashboard.web.places.KEEP_SECONDS", 0.05)
    every = AllRuns(Places([FolderRuns(runs)]))

    def threads() -> list[str]:
        return [one.name for one in threading.enumerate() if one.name == "offloop-library"]

    for _ in range(2):
        every.open()
        every.open()
        wait_for(lambda: len(every.table.entries) == 3, "the runs")
        every.close()
        assert threads(), "one still looks"
        every.close()
        wait_for(lambda: not threads() and not every.table.entries, "nothing to be left")
    every.stop()
