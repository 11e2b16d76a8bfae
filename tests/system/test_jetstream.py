"""A run that is read from JetStream gives what it gives on the training's own machine."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest
from helpers import wait_for
from nats_servers import NatsServer

from bus import BrokerError, ConfigurationError, Event, Publisher, Recording, RunNotFoundError, Subscriber
from bus.runs.bridged import read_bridge

PYTHON = (sys.executable, "-m")


@pytest.fixture
def server(tmp_path):
    folder = tmp_path / "nats"
    folder.mkdir()
    made = NatsServer(folder)
    yield made
    made.kill()


@pytest.fixture
def bridge(server, runs_dir):
    """Starts the bridge of a run, by the command."""
    begun = []

    def begin(run):
        arguments = (*PYTHON, "bus", "bridge", run, "--runs-dir", str(runs_dir), "--stream", server.address)
        begun.append(subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True))
        return begun[-1]

    yield begin
    for one in begun:
        one.kill()
        one.communicate()


def publish(publisher, count):
    for _ in range(count):
        publisher.publish(Event.BATCH_END, loss=1 / 3, noise=bytes(200))
    publisher.poll()


def on_disk(publisher):
    last = publisher.statistics().published
    wait_for(lambda: publisher.poll() or publisher.statistics().acknowledged >= last, f"event {last} on disk")


def attach(server, run):
    """A subscriber, as soon as the bridge has said that there is such a run."""

    def there():
        try:
            return Subscriber(run, stream=server.address)
        except RunNotFoundError:
            return None

    return wait_for(there, "the run in the stream")


def test_attached_early_late_and_afterwards_it_gives_what_the_recording_has(server, bridge, runs_dir):
    with Publisher("r", runs_dir=runs_dir) as publisher:
        publish(publisher, 1)
        copying = bridge("r")
        with attach(server, "r") as early:
            following = iter(early)
            got = [next(following)]
            publish(publisher, 2000)
            on_disk(publisher)
            got += [next(following) for _ in range(1000)]
            with attach(server, "r") as middle:
                publish(publisher, 500)
                publisher.close()
                got += list(following)
                assert list(middle) == got
    assert copying.wait(60) == 0
    with attach(server, "r") as late:
        assert not late.live
        assert list(late) == got
    assert got == list(Recording(runs_dir / "r"))
    assert len(got) == 2501
    assert {str(one.ending) for one in (early, middle, late)} == {"finished"}


def test_what_is_asked_for_and_commanded_reaches_the_training(server, bridge, runs_dir):
    with Publisher("r", runs_dir=runs_dir) as publisher:
        publish(publisher, 1)
        bridge("r")
        with (
            attach(server, "r"),
            Subscriber("r", stream=server.address, events=[Event.BATCH_END, Event.AFTER_FORWARD]) as subscriber,
        ):
            following = iter(subscriber)
            assert next(following).event is Event.BATCH_END
            wait_for(lambda: publisher.poll() or Event.AFTER_FORWARD in publisher.wanted, "the demand")
            publisher.publish(Event.AFTER_FORWARD)
            publisher.poll()
            assert next(following).event is Event.AFTER_FORWARD


def test_the_same_files_from_the_directory_and_from_the_stream(server, bridge, runs_dir, tmp_path):
    command = ("trainer", "digits", "--max-duration", "2ep", "--run-name", "d", "--runs-dir", runs_dir, "--no-progress")
    subprocess.run([*PYTHON, *map(str, command)], check=True, capture_output=True)
    assert bridge("d").wait(60) == 0

    def logged(name, *where):
        path = tmp_path / name
        chosen = ("--callbacks", "speed,lr,metrics", "-l", "jsonl", "-o", f"jsonl.path={path}", "--run", "d")
        subprocess.run([*PYTHON, "consumers", *chosen, *where], check=True, capture_output=True)
        return path.read_bytes()

    assert logged("stream.jsonl", "--stream", server.address) == logged("directory.jsonl", "--runs-dir", str(runs_dir))
    listed = subprocess.run(
        [*PYTHON, "bus", "runs", "--stream", server.address], check=True, capture_output=True, text=True
    )
    assert "finished" in listed.stdout


def test_mistakes_are_told_in_a_line(server):
    with pytest.raises(BrokerError, match="no NATS server answers at nats://127"):
        Subscriber("r", stream="nats://127.0.0.1:9")
    with pytest.raises(ConfigurationError, match="'localhost' is not the address of a NATS server"):
        Subscriber("r", stream="localhost")
    with pytest.raises(RunNotFoundError, match="has no run 'r'"):
        Subscriber("r", stream=server.address)


def test_a_bridge_that_is_killed_is_followed_by_another(server, bridge, runs_dir):
    with Publisher("r", runs_dir=runs_dir) as publisher:
        for _ in range(5):
            copying = bridge("r")
            publish(publisher, 300)
            on_disk(publisher)
            copying.kill()
        last = bridge("r")
        publish(publisher, 100)
    assert last.wait(60) == 0
    with attach(server, "r") as subscriber:
        assert list(subscriber) == list(Recording(runs_dir / "r"))


def test_with_the_variable_each_run_is_copied_without_further_ado(server, runs_dir, monkeypatch):
    monkeypatch.setenv("OFFLOOP_STREAM", server.address)
    with Publisher("r", runs_dir=runs_dir) as publisher:
        publish(publisher, 300)

        def copying():
            found = read_bridge(runs_dir / "r")
            return found if found is not None and found.copied else None

        first = wait_for(copying, "the bridge")
        os.kill(first.pid, signal.SIGKILL)
        publish(publisher, 300)
        wait_for(lambda: publisher.poll() or copying().pid != first.pid, "the next bridge")
    wait_for(lambda: copying().state == "done", "the end of the copy")
    with attach(server, "r") as subscriber:
        assert list(subscriber) == list(Recording(runs_dir / "r"))
    shown = subprocess.run(
        [*PYTHON, "bus", "info", "r", "--runs-dir", str(runs_dir)], check=True, capture_output=True, text=True
    )
    assert f"done, to {server.address}" in shown.stdout


def test_several_readers_share_a_connection(server, bridge, runs_dir):
    with Publisher("r", runs_dir=runs_dir) as publisher:
        publish(publisher, 10)
    bridge("r").wait(60)

    async def read():
        async with Subscriber("r", stream=server.address) as subscriber:
            return [snapshot async for snapshot in subscriber]

    with attach(server, "r") as first, attach(server, "r") as second:
        assert first._gateway is second._gateway
        first.close()
        assert len(list(second)) == len(asyncio.run(read())) == 10
