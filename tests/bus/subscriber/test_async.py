"""Receiving in an event loop: the same as without one, beside other tasks, and nothing stays open."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterable

import pytest

from offloop.bus import BASE_EVENTS, ClosedError, ConfigurationError, Event, Publisher, Snapshot, Subscriber, Timestamp


def publish(publisher: Publisher, first: int, last: int) -> None:
    for batch in range(first, last + 1):
        publisher.publish(Event.BATCH_END, batch=batch, loss=1 / batch)
    publisher.poll()  # the last ones may be waiting for company


def batches(snapshots: Iterable[Snapshot]) -> list[int]:
    return [int(snapshot.timestamp.batch) for snapshot in snapshots]


def what_is_open() -> tuple[int, list[str], int]:
    """How many descriptors, which threads, and how many tasks."""
    threads = sorted(thread.name for thread in threading.enumerate())
    return len(os.listdir("/dev/fd")), threads, len(asyncio.all_tasks())


@pytest.fixture
async def training(runs_dir: object) -> AsyncIterator[Publisher]:
    """Start a run that publishes nothing by itself, and listens to commands."""
    with Publisher("r") as publisher:

        async def listen() -> None:
            while True:
                publisher.poll()
                await asyncio.sleep(0.01)

        listening = asyncio.create_task(listen())
        yield publisher
        listening.cancel()


async def test_async_iteration_yields_every_event_and_does_not_block_the_loop(runs_dir: object) -> None:
    seen = []

    async def follow(subscriber: Subscriber) -> None:
        async for snapshot in subscriber:
            seen.append(snapshot)

    publisher = Publisher("r")
    with Subscriber("r") as subscriber:
        following = asyncio.create_task(follow(subscriber))
        publish(publisher, 1, 100)
        ticks = 0
        async with asyncio.timeout(100):
            while not seen or ticks < 5:
                await asyncio.sleep(0.005)
                ticks += 1
        publish(publisher, 101, 200)
        await asyncio.to_thread(publisher.close)
        await asyncio.wait_for(following, 100)
    assert batches(seen) == list(range(1, 201))


async def test_a_timed_out_task_leaves_nothing_open_and_the_stream_continues(
    runs_dir: object,
) -> None:
    seen: list[Snapshot] = []

    async def follow(subscriber: Subscriber) -> None:
        async for snapshot in subscriber:
            seen.append(snapshot)

    async def enter_and_follow() -> None:
        async with Subscriber("r") as subscriber:
            await follow(subscriber)

    with Publisher("r") as publisher:
        publish(publisher, 1, 3)
        before = what_is_open()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(enter_and_follow(), 0.5)
        assert what_is_open() == before
        seen.clear()
        async with Subscriber("r") as subscriber:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(follow(subscriber), 0.5)
            publish(publisher, 4, 6)
            await asyncio.to_thread(publisher.close)
            await asyncio.wait_for(follow(subscriber), 100)
    assert batches(seen) == list(range(1, 7))
    with pytest.raises(ClosedError):
        await anext(aiter(subscriber))


# -- commands ---------------------------------------------------------------------------------------------------------


async def test_a_command_of_another_thread_is_done_while_the_stream_is_read(training: Publisher) -> None:
    seen = []

    async def follow(stream: Subscriber) -> None:
        async for snapshot in stream:
            seen.append(snapshot)

    async with asyncio.timeout(100), Subscriber("r", events=[Event.BATCH_END]) as stream:
        following = asyncio.create_task(follow(stream))
        publish(training, 1, 7)
        outcome = await asyncio.to_thread(stream.command, "stop", reason="enough")
        assert (outcome.event, outcome.batch, outcome.error, outcome.command.reason) == ("batch_end", 7, None, "enough")
        assert training.stop_requested
        with pytest.raises(ConfigurationError, match="'stap' is unknown: did you mean stop"):
            stream.command("stap")
        refused = await asyncio.to_thread(stream.command, "pause")
        assert refused.error == "this training loop accepts only the command 'stop'"
        publish(training, 8, 9)
        await asyncio.to_thread(training.close)
        await following
        assert [one.command.name for one in stream.answered()] == ["stop", "pause"]
        with pytest.raises(ConfigurationError, match="is not live"):
            stream.command("stop")
    assert batches(seen) == list(range(1, 10))


async def test_lists_of_snapshots_end_before_a_checkpoint(training: Publisher) -> None:
    seen: list[list[int] | str] = []
    with Subscriber("r") as subscriber:
        subscriber.on_checkpoint = lambda mark: seen.append(mark.action)
        publish(training, 1, 100)
        training.mark_checkpoint("save", Timestamp(batch=100).values)
        publish(training, 101, 103)
        training.close()
        async for snapshots in subscriber.read(BASE_EVENTS, {}):
            seen.append(batches(snapshots))
        assert subscriber.statistics().given == 103
    place = seen.index("save")
    assert [batch for found in seen[:place] for batch in found] == [*range(1, 101)]
    assert [batch for found in seen[place + 1 :] for batch in found] == [101, 102, 103]
    assert max(map(len, seen)) > 1
