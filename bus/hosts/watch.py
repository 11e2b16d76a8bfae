"""Reads a run on its host, and writes the host's windows beside its recording."""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import closing
from pathlib import Path

from offloop.bus.errors import OffloopError
from offloop.bus.hosts.windows import LATE_NS, HostWindows
from offloop.bus.protocol.host_windows import HostWindow
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.recording.host_windows import WindowsWriter, windows_path
from offloop.bus.recording.recording import Recording
from offloop.bus.runs.directory import Attempt, read_run
from offloop.bus.subscriber.subscriber import Subscriber
from offloop.bus.types.demand import Demand, EventDemand
from offloop.bus.types.event import Event
from offloop.bus.types.health import HEALTH, Health
from offloop.bus.types.source import Source

PHASES_EVERY = 10  # one of so many batches of a window is measured, as often as the callback ``phases`` measures
_LOOK_SECONDS = 1.0
_AT_ONCE = 256  # events before other tasks run


async def watch_host(path: Path, attempt: Attempt, host: str, say: Callable[[str], None] = print) -> None:
    """Write the windows of an attempt until it has ended, or another one has begun; ``say`` shows an error."""
    try:
        # In a thread: it reads the existing windows, perhaps of days.
        opened = await asyncio.to_thread(WindowsWriter, windows_path(attempt.recording, attempt.number))
        with closing(opened) as writer:
            watching = _Watching(path, attempt, host, writer)
            if read_run(path).last.number == attempt.number:
                await watching.follow()
            else:
                await watching.read()
    except OffloopError as error:
        say(f"windows of this host are not written any more: {error}")


class _Watching:
    """Makes windows from an attempt's events, and appends them to the file."""

    def __init__(self, path: Path, attempt: Attempt, host: str, writer: WindowsWriter) -> None:
        self._path = path
        self._attempt = attempt
        self._writer = writer
        ranks = [publisher["rank"] for publisher in attempt.publishers if type(publisher.get("rank")) is int]
        self._windows = HostWindows(
            host,
            attempt.number,
            ranks,
            attempt.world_size,
            attempt.local_world_size,
            None if writer.last is None else writer.last.last,
        )
        self._heard = time.monotonic()
        self._now_ns = 0
        self._has_gpu = False
        self._never: set[str] = set()
        self._asked: int | None = None
        self._failure: OffloopError | None = None

    async def read(self) -> None:
        for number, snapshot in enumerate(Recording(self._attempt.recording).snapshots()):
            self._take(snapshot)
            if not number % _AT_ONCE:
                await asyncio.sleep(0)
        self._append(self._windows.finish())

    async def follow(self) -> None:
        demand = Demand({HEALTH: EventDemand(), Event.BATCH_END: EventDemand(1, {"phases": PHASES_EVERY})})
        events = [Event.INIT, Event.BATCH_END, HEALTH]
        async with Subscriber(self._path, events=events, demand=demand) as subscriber:
            waiting = asyncio.create_task(self._wait())
            try:
                async for snapshot in subscriber:
                    self._take(snapshot)
                    batches = self._windows.batches
                    if batches is not None and batches != self._asked and subscriber.live:
                        self._asked = batches
                        subscriber.ask_for(windows_demand(batches, self._has_gpu, self._never))
            finally:
                waiting.cancel()
        self._append(self._windows.finish())

    def _take(self, snapshot: Snapshot) -> None:
        self._heard, self._now_ns = time.monotonic(), snapshot.time_ns
        if snapshot.event is Event.INIT:
            self._never |= Source.of(snapshot.fields).fields.keys()
            self._has_gpu |= snapshot.get("device_name") not in (None, "cpu")
        elif snapshot.event is Event.BATCH_END:
            self._append(self._windows.take(snapshot))
        elif snapshot.event is HEALTH:
            self._windows.health = Health.of(snapshot.fields)

    async def _wait(self) -> None:
        """Close late windows while no rank publishes anything."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            quiet = time.monotonic() - self._heard
            if quiet > LATE_NS / 1e9:
                try:
                    self._append(self._windows.close_late(self._now_ns + round(quiet * 1e9)))
                except OffloopError as error:
                    self._failure = error  # raised at the next event
                    return

    def _append(self, windows: Iterable[HostWindow]) -> None:
        if self._failure is not None:
            raise self._failure
        for window in windows:
            self._writer.append(window)


def windows_demand(batches: int, has_gpu: bool, never: Collection[str] = ()) -> Demand:
    """Return the demand for windows of so many batches: memory and gradient norm once in each, at its end.

    Fields that are ``never`` available are left out: a request would warn the user, who did not make it."""
    fields: dict[str, int | str] = {"phases": min(batches, PHASES_EVERY), "gradient_norm": batches}
    if has_gpu:
        fields["memory_stats"] = batches
    requested = {name: every for name, every in fields.items() if name not in never}
    return Demand({HEALTH: EventDemand(), Event.BATCH_END: EventDemand(1, requested)})
