"""What is known of a run that has ended before it is read, and how many points the lines of many runs have."""

import shutil

from helpers import wait_for
from run_folders import write_run

from offloop.bus import Event, Publisher, Recording
from offloop.bus.runs.directory import find_run
from offloop.consumers import Runner
from offloop.consumers.callbacks import SpeedMonitor
from offloop.consumers.dashboard.view.run_view import RunView
from offloop.consumers.dashboard.view.tap import RunTap
from offloop.consumers.dashboard.web.follow import ChosenRuns, FollowedRuns
from offloop.consumers.dashboard.web.page import facts
from offloop.consumers.runner.places import FolderRuns


def test_a_run_that_has_ended_is_never_called_live(runs_dir):
    with Publisher("r") as publisher:
        for batch in range(1, 6):
            publisher.publish(Event.BATCH_END, batch=batch, sample=batch, loss=1.0, max_duration="9ba")
        publisher.close("failed", error="it broke")
    wait_for(lambda: find_run("r").last.reached, "the end in run.json")
    followed = FollowedRuns(FolderRuns(runs_dir), every=10)
    assert followed.add("r", wait=False)
    (run,) = followed.runs
    progress = run.progress()
    assert (run.status, progress.batch, progress.max_duration) == ("failed", 5, "9ba")
    assert facts(progress, run.publishing(), run.status).startswith("epoch 0")

    said = []

    class Look(RunTap):
        def run_event(self, event, state, logger):
            super().run_event(event, state, logger)
            said.append((watched.status, watched.progress().batch))

    for callbacks in ([], [SpeedMonitor()]):
        watched = RunView("run")
        Runner(Recording(find_run("r").recording), [Look(watched), *callbacks], [watched]).run()
    assert set(said) == {("failed", 5)}
    assert len(said) == 10
    assert watched.error == "it broke"


def test_a_page_says_that_another_run_has_the_name_and_shows_it_when_opened_again(runs_dir):
    write_run(runs_dir, "r", [9.0] * 5, status="failed")
    chosen = ChosenRuns(FolderRuns(runs_dir))
    try:
        [old], _ = chosen.open(["r"])
        wait_for(lambda: old.progress().batch == 5, "the run")
        shutil.rmtree(runs_dir / "r")
        write_run(runs_dir, "r", [0.5, 0.25])
        wait_for(lambda: "another one has its name" in (old.trouble or ""), "the page to say so")
        [new], _ = chosen.open(["r"])
        wait_for(lambda: (new.status, new.progress().batch) == ("finished", 2), "the other run")
        assert (old.status, old.progress().batch) == ("failed", 5)
    finally:
        chosen.stop()
