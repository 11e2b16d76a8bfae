"""What is known of a run that has ended before it is read, and how many points the lines of many runs have."""

from helpers import wait_for

from offloop.bus import Event, Publisher, Recording
from offloop.bus.runs.directory import find_run
from offloop.consumers import Runner
from offloop.consumers.callbacks import SpeedMonitor
from offloop.consumers.dashboard.view.run_view import RunView
from offloop.consumers.dashboard.view.tap import RunTap
from offloop.consumers.dashboard.web.follow import FollowedRuns
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
