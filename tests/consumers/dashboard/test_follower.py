"""How many histories are read at a time, and how many points the lines of many runs have."""

import threading
import time

import pytest
from helpers import wait_for

from offloop.bus import Event, Publisher, Recording
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.runs.directory import find_run
from offloop.bus.types.timestamp import Timestamp
from offloop.consumers import Runner
from offloop.consumers.callbacks import SpeedMonitor
from offloop.consumers.dashboard.view.follower import HistoryLimit
from offloop.consumers.dashboard.view.run_view import RunView
from offloop.consumers.dashboard.view.tap import MonitoredRun, RunTap, ViewDestination
from offloop.consumers.dashboard.web.cards import facts
from offloop.consumers.dashboard.web.follow import FollowedRuns
from offloop.consumers.runner.places import FolderRuns


def test_no_more_histories_are_read_at_a_time_than_there_are_turns():
    turns, counted, lock = HistoryLimit(2), [], threading.Lock()
    most, go_on = [0], threading.Event()

    def read() -> None:
        view = RunView("run")
        with turns.take(view, lambda: False) as turn:
            assert turn
            with lock:
                counted.append(1)
                most[0] = max(most[0], len(counted))
            # A history of which something comes again and again.
            while not go_on.wait(0.01):
                view.note("note", "more")
            with lock:
                counted.pop()

    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(counted) == 2, "two that read")
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert most == [2]
    assert not any(thread.is_alive() for thread in threads)


def test_a_run_of_which_nothing_comes_and_one_that_is_live_let_others_read():
    turns, live = HistoryLimit(1), RunView("live")
    with turns.take(live, lambda: False) as turn:
        assert turn
        live.see(Snapshot.build(Event.BATCH_END, time_ns=time.time_ns(), timestamp=Timestamp(batch=1)))
        with turns.take(RunView("silent"), lambda: False) as silent, turns.take(RunView("next"), bool) as other:
            assert silent
            assert other


@pytest.mark.parametrize(("ending", "max_duration"), [("finished", "5ba"), ("stopped", "2ep"), ("failed", "9ba")])
def test_a_run_that_has_ended_is_never_called_live(runs_dir, ending, max_duration):
    with Publisher("r") as publisher:
        for batch in range(1, 6):
            publisher.publish(Event.BATCH_END, batch=batch, sample=batch, loss=1.0, max_duration=max_duration)
        publisher.close(ending, error="it broke" if ending == "failed" else None)
    wait_for(lambda: find_run("r").last.reached, "the end in run.json")
    followed = FollowedRuns(FolderRuns(runs_dir), every=10)
    assert followed.add("r", wait=False)
    (run,) = followed.runs
    progress = run.view.progress()
    assert (run.view.status, progress.batch, progress.max_duration) == (ending, 5, max_duration)
    assert facts(progress, run.view.publishing(), run.view.status).startswith("epoch 0")

    said = []

    class Look(RunTap):
        def run_event(self, event, state, logger):
            super().run_event(event, state, logger)
            said.append((watched.view.status, watched.view.progress().batch))

    for callbacks in ([], [SpeedMonitor()]):
        watched = MonitoredRun(RunView("run"))
        Runner(Recording(find_run("r").recording), [Look(watched), *callbacks], [ViewDestination(watched)]).run()
    assert set(said) == {(ending, 5)}
    assert len(said) == 10
    assert watched.view.error == ("it broke" if ending == "failed" else None)


def test_who_is_told_to_leave_does_not_wait_for_a_turn():
    turns = HistoryLimit(1)
    busy = RunView("busy")
    with turns.take(busy, lambda: False), turns.take(RunView("left"), lambda: True) as turn:
        assert not turn


@pytest.mark.parametrize(("lines", "parts"), [(1, 512), (2, 512), (10, 320), (50, 64), (5000, 64)])
def test_many_lines_of_a_chart_have_fewer_points_each(lines, parts):
    from offloop.consumers.dashboard.web.charts import Look

    assert Look(visible={"loss": 1000}).buckets("loss", lines) == parts
