"""What one replica of a stream lacks or has under other numbers, a reader gets from the leader."""

import asyncio
import random
from types import SimpleNamespace

import pytest
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js.client import JetStreamContext
from run_folders import WrittenRun

from offloop.bus import Recording, Subscriber
from offloop.bus.jetstream import bridge, copied, names

FETCH = JetStreamContext.PullSubscription.fetch
MESSAGES = 8

LACKING = {
    "the first": lambda number: number > 2,
    "one": lambda number: number != 4,
    "some": lambda number: number not in (3, 5, 6),
    "what came since": lambda number: number < 5,
    "all": lambda number: False,
}


@pytest.fixture
def run(tmp_path, nats_server, monkeypatch):
    """The folder of a run that is in the servers, in so many messages; its bridge has ended."""
    monkeypatch.setattr(bridge, "_LOOK_SECONDS", 0.01)
    run, noise = WrittenRun(tmp_path, "r"), random.Random(1)

    async def copy():
        async with asyncio.TaskGroup() as tasks:
            copying = bridge.Bridge(run.path, nats_server.servers, say=lambda text: None)
            tasks.create_task(copying.copy())
            for number in range(MESSAGES):
                for _ in range(5):
                    run.send("batch_end", {"number": number, "noise": noise.randbytes(10_000)})
                run.writer.flush()
                while copying.status.copied < run.writer.size:
                    await asyncio.sleep(0.01)
            run.end()

    asyncio.run(copy())
    return run.path


@pytest.fixture
def from_replica(monkeypatch):
    """Has readers get from a replica only what ``has`` says, and what has it again under such numbers."""
    monkeypatch.setattr(copied, "_FETCH_SECONDS", 0.2)

    def read_from(has=lambda number: True, renumber=lambda number: number):
        async def fetch(subscription, *arguments, **options):
            messages = await FETCH(subscription, *arguments, **options)
            if names.OFFSET not in (messages[0].headers or {}):
                return messages
            given = [message for message in messages if has(message.metadata.sequence.stream)]
            if not given:
                raise NatsTimeoutError
            return [_with_number(message, renumber(message.metadata.sequence.stream)) for message in given]

        monkeypatch.setattr(JetStreamContext.PullSubscription, "fetch", fetch)

    return read_from


def _with_number(message, number):
    metadata = SimpleNamespace(sequence=SimpleNamespace(stream=number))
    return SimpleNamespace(headers=message.headers, data=message.data, metadata=metadata)


def read(nats_server):
    with Subscriber("r", stream=nats_server.address) as subscriber:
        got = list(subscriber)
    return got, subscriber.gaps, subscriber.damage


@pytest.mark.parametrize("has", LACKING.values(), ids=LACKING)
def test_what_a_replica_lacks_comes_from_the_leader(run, nats_server, from_replica, has):
    from_replica(has)
    assert read(nats_server) == (list(Recording(run)), (), None)


@pytest.mark.parametrize(
    "renumber", [lambda number: number + 3, lambda number: max(number - 3, 1)], ids=["later", "earlier"]
)
def test_what_a_replica_has_under_other_numbers_is_read_once(run, nats_server, from_replica, renumber, monkeypatch):
    """Also what has to be fetched a second time, by its number."""
    monkeypatch.setattr(copied, "_KEPT_BYTES", 1)
    from_replica(renumber=renumber)
    assert read(nats_server) == (list(Recording(run)), (), None)
