"""Several subscribers of one run as one stream: for hosts with a recording each."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from itertools import chain

from offloop.bus.protocol.host_windows import HostWindow
from offloop.bus.protocol.order import CheckpointMark, Ending, Gap, worst_of
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.protocol.stream import RunStream
from offloop.bus.subscriber.subscriber import Subscriber
from offloop.bus.types.commands import Outcome
from offloop.bus.types.demand import Demand
from offloop.bus.types.event import Event

PATIENCE = 1.0  # seconds to wait for a silent host before events of the others are returned


class MergedSubscriber(RunStream):
    """Events of several subscribers with different ranks of one run. The first subscriber must have the first rank.

    Each rank's events come in order. The host with the lowest batch number comes first. A host that is silent for
    :data:`PATIENCE` is skipped until it has an event. As a context manager it closes all subscribers."""

    def __init__(self, subscribers: Sequence[Subscriber]) -> None:
        self._subscribers = subscribers
        first = subscribers[0]
        self.run_name, self.run_id, self.attempt = first.run_name, first.run_id, first.attempt
        self.first_rank = first.first_rank
        first.on_checkpoint = lambda mark: self.on_checkpoint(mark)
        for one in subscribers:
            one.name_sender = lambda: self.name_sender()

    async def __aiter__(self) -> AsyncGenerator[Snapshot, None]:
        async with contextlib.AsyncExitStack() as stack:
            hosts = []
            for one in self._subscribers:
                events = await stack.enter_async_context(contextlib.aclosing(aiter(one)))
                hosts.append(_Host(events))
                stack.push_async_callback(hosts[-1].cancel)
            while hosts := [host for host in hosts if not host.has_ended]:
                if awaited := [host for host in hosts if not (host.is_late or host.following.done())]:
                    await asyncio.wait([host.following for host in awaited], timeout=PATIENCE)
                    for host in awaited:
                        host.is_late = not host.following.done()
                elif ready := [(host.snapshot(), host) for host in hosts if host.following.done()]:
                    snapshot, host = min(ready, key=lambda one: one[0].timestamp.batch)
                    yield snapshot
                    host.go_on()
                else:
                    every = [host.following for host in hosts]
                    await asyncio.wait(every, return_when=asyncio.FIRST_COMPLETED)

    @property
    def live(self) -> bool:
        return any(one.live for one in self._subscribers)

    @property
    def ending(self) -> Ending | None:
        endings = [one.ending for one in self._subscribers]
        known = [ending for ending in endings if ending is not None]
        return worst_of(known) if len(known) == len(endings) else None

    @property
    def gaps(self) -> tuple[Gap, ...]:
        return tuple(chain.from_iterable(one.gaps for one in self._subscribers))

    @property
    def damage(self) -> str | None:
        return "; ".join(one.damage for one in self._subscribers if one.damage) or None

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        return tuple(chain.from_iterable(one.outcomes for one in self._subscribers))

    @property
    def commander(self) -> Callable[..., Outcome]:
        return self._subscribers[0].commander

    def answered(self) -> tuple[Outcome, ...]:
        return tuple(chain.from_iterable(one.answered() for one in self._subscribers))

    def checkpoints(self) -> tuple[CheckpointMark, ...]:
        return self._subscribers[0].checkpoints()

    def host_windows(self) -> list[HostWindow]:
        return self._subscribers[0].host_windows()

    def ask_for(self, demand: Demand, barrier_events: Iterable[Event] = ()) -> None:
        barrier_events = list(barrier_events)
        for one in self._subscribers:
            one.ask_for(demand, barrier_events)

    def close(self) -> None:
        for one in self._subscribers:
            one.close()

    def __enter__(self) -> "MergedSubscriber":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Host:
    """The next event of one subscriber. The preceding one is handled first: a training may wait for that."""

    def __init__(self, events: AsyncGenerator[Snapshot, None]) -> None:
        self._events = events
        self.go_on()

    def go_on(self) -> None:
        self.is_late = False
        self.following = asyncio.create_task(self._next())

    async def _next(self) -> Snapshot | None:
        return await anext(self._events, None)

    @property
    def has_ended(self) -> bool:
        return self.following.done() and self.following.result() is None

    def snapshot(self) -> Snapshot:
        snapshot = self.following.result()
        assert snapshot is not None  # it has not ended
        return snapshot

    async def cancel(self) -> None:
        self.following.cancel()
        await asyncio.wait([self.following])
