"""What is asked of a training so that windows of its host can be made."""

import asyncio
import threading

import pytest
from helpers import wait_for

from offloop.bus import Event, Publisher
from offloop.bus.hosts.watch import watch_host
from offloop.bus.recording.host_windows import GrowingWindows, windows_path
from offloop.bus.runs.directory import read_run

STEP_NS = 3 * 10**8


@pytest.mark.parametrize("never", [{}, {"gradient_norm": "each rank has a part"}])
def test_gradient_norms_are_requested_once_a_window_where_they_are_available(runs_dir, never):
    now = 10**18

    def clock():
        return now

    info = {"unavailable": {"fields": never}}
    with Publisher("r", runs_dir=runs_dir, world_size=2, local_world_size=1, info=info, clock=clock) as publisher:
        publisher.publish(Event.INIT)
        path = runs_dir / "r"
        attempt = read_run(path).last
        watching = threading.Thread(target=lambda: asyncio.run(watch_host(path, attempt, "h")))
        watching.start()
        batch = 0

        def asked():
            nonlocal now, batch
            now, batch = now + STEP_NS, batch + 1
            publisher.publish(Event.BATCH_END, batch=batch, loss=1.0)
            publisher.poll()
            # Four batches are a window of more than a second.
            return set(publisher.demand.due_fields(Event.BATCH_END, 4, None))

        wait_for(lambda: "phases" in asked(), "the demand")
        assert asked() == {"phases", "gradient_norm"} - never.keys()
        assert not publisher.demand.due_fields(Event.BATCH_END, 3, None)
        windows = GrowingWindows(windows_path(attempt.recording, 1))
        measured = wait_for(lambda: asked() and [one.health for one in windows.windows() if one.health], "the health")
        assert measured[0].values["memory_percent"] > 0
        windows.close()
    watching.join()
