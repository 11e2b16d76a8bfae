"""A run that is read from JetStream gives what it gives on the training's own machine."""

import asyncio
import os
import shlex
import signal
import subprocess
import sys

import nats
import pytest
from helpers import wait_for
from nats_servers import NatsServer, wait_for_copy
from safetensors.torch import load_file

from offloop.bus import BrokerError, ConfigurationError, Event, Publisher, Recording, RunNotFoundError, Subscriber
from offloop.bus.protocol.frames import decode_control, encode_control, split_frame
from offloop.bus.runs.bridged import read_bridge
from offloop.bus.types.timeouts import Timeouts

PYTHON = (sys.executable, "-m")


@pytest.fixture
def bridge(nats_server, runs_dir):
    """Starts the bridge of a run, by the command."""
    begun = []

    def begin(run):
        arguments = (
            *PYTHON,
            "offloop.bus",
            "server",
            "bridge",
            run,
            "--runs-dir",
            str(runs_dir),
            "--stream",
            nats_server.address,
        )
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


def attach(nats_server, run):
    """A subscriber, as soon as the bridge has said that there is such a run."""

    def there():
        try:
            return Subscriber(run, stream=nats_server.address)
        except RunNotFoundError:
            return None

    return wait_for(there, "the run in the stream")


def test_attached_early_late_and_afterwards_it_gives_what_the_recording_has(nats_server, bridge, runs_dir):
    with Publisher("r", runs_dir=runs_dir) as publisher:
        publish(publisher, 1)
        copying = bridge("r")
        with attach(nats_server, "r") as early:
            following = iter(early)
            got = [next(following)]
            publish(publisher, 2000)
            on_disk(publisher)
            got += [next(following) for _ in range(1000)]
            with attach(nats_server, "r") as middle:
                publish(publisher, 500)
                publisher.close()
                got += list(following)
                assert list(middle) == got
    assert copying.wait(60) == 0
    with attach(nats_server, "r") as late:
        assert not late.live
        assert list(late) == got
    assert got == list(Recording(runs_dir / "r"))
    assert len(got) == 2501
    assert {str(one.ending) for one in (early, middle, late)} == {"finished"}


def test_what_is_asked_for_and_commanded_reaches_the_training(nats_server, bridge, runs_dir):
    commands = []
    with Publisher("r", runs_dir=runs_dir, on_command=commands.append) as publisher:
        publish(publisher, 1)
        bridge("r")
        with (
            attach(nats_server, "r"),
            Subscriber("r", stream=nats_server.address, events=[Event.BATCH_END, Event.AFTER_FORWARD]) as subscriber,
        ):
            following = iter(subscriber)
            assert next(following).event is Event.BATCH_END
            wait_for(lambda: publisher.poll() or Event.AFTER_FORWARD in publisher.requested_events, "the demand")
            publisher.publish(Event.AFTER_FORWARD)
            publisher.poll()
            assert next(following).event is Event.AFTER_FORWARD
            # What NATS delivers twice takes effect once.
            said = {"run": "r", "id": "1" * 16, "command": "stop", "arguments": []}
            answers = asyncio.run(delivered(nats_server, "ol.q.r.command", encode_control("command", said), times=2))
            assert [(answer.kind, answer.content["id"]) for answer in answers] == [("accepted", said["id"])] * 2
            wait_for(lambda: publisher.poll() or commands, "the command")
            assert subscriber.command("stop", wait=0).error is None
            wait_for(lambda: publisher.poll() or len(commands) > 1, "the next command")
            assert [command.id == said["id"] for command in commands] == [True, False]


async def delivered(nats_server, subject, request, times):
    """The answers to a request that is sent so many times."""
    client = await nats.connect(nats_server.address)
    try:
        inbox = client.new_inbox()
        answers = await client.subscribe(f"{inbox}.>")
        for _ in range(times):
            await client.publish(subject, request, reply=f"{inbox}.command.1")
        return [decode_control(split_frame((await answers.next_msg(10)).data)[1]) for _ in range(times)]
    finally:
        await client.close()


def test_without_its_bridge_a_line_says_what_is_read_and_what_to_do(nats_server, bridge, runs_dir):
    with Publisher("r", runs_dir=runs_dir) as publisher:
        publish(publisher, 10)
        copying = bridge("r")
        attach(nats_server, "r").close()
        copying.kill()
        copying.wait()
        sent = subprocess.run(
            [*PYTHON, "offloop.bus", "send", "r", "stop", "--stream", nats_server.address],
            capture_output=True,
            text=True,
            check=False,
        )
        assert (sent.returncode, sent.stdout) == (1, "")
        assert "this run has no bridge that answers" in sent.stderr
        assert "start 'offloop server bridge' on its host" in sent.stderr
        read = [*PYTHON, "offloop.consumers", "--callbacks", "lr", "--stream", nats_server.address]
        with subprocess.Popen(read, stderr=subprocess.PIPE, text=True) as consumer:
            try:
                said = consumer.stderr.readline()
                assert said.startswith("run r has no bridge that answers: this reads what is in the servers, and waits")
                assert "'offloop server bridge r' on its host copies the rest" in said
                bridge("r")
                publisher.close()
                assert consumer.wait(30) == 0
                assert "run r finished: 10 events handled" in consumer.stderr.read()
            finally:
                consumer.kill()


def test_the_same_files_from_the_directory_the_broker_and_the_stream(nats_server, bridge, runs_dir, tmp_path):
    command = (
        "offloop.trainer",
        "digits",
        "--max-duration",
        "2ep",
        "--run-name",
        "d",
        "--runs-dir",
        runs_dir,
        "--no-progress",
    )
    subprocess.run([*PYTHON, *map(str, command)], check=True, capture_output=True)
    assert bridge("d").wait(60) == 0

    def logged(name, *where):
        path = tmp_path / name
        chosen = ("--callbacks", "speed,lr,metrics", "-l", "jsonl", "-o", f"jsonl.path={path}", "--run", "d")
        subprocess.run([*PYTHON, "offloop.consumers", *chosen, *where], check=True, capture_output=True)
        return path.read_bytes()

    there = logged("directory.jsonl", "--runs-dir", str(runs_dir))
    assert there
    assert logged("stream.jsonl", "--stream", nats_server.address) == there
    listed = subprocess.run(
        [*PYTHON, "offloop.bus", "runs", "--stream", nats_server.address], check=True, capture_output=True, text=True
    )
    assert "finished" in listed.stdout


def test_mistakes_are_told_in_a_line(nats_server):
    with pytest.raises(BrokerError, match="no NATS server answers at nats://127"):
        Subscriber("r", stream="nats://127.0.0.1:9")
    with pytest.raises(ConfigurationError, match="'localhost' is not the address of a NATS server"):
        Subscriber("r", stream="localhost")
    with pytest.raises(RunNotFoundError, match="has no run 'r'"):
        Subscriber("r", stream=nats_server.address)


def test_a_bridge_that_is_killed_is_followed_by_another(nats_server, bridge, runs_dir):
    with Publisher("r", runs_dir=runs_dir) as publisher:
        for _ in range(5):
            copying = bridge("r")
            publish(publisher, 300)
            on_disk(publisher)
            copying.kill()
        last = bridge("r")
        publish(publisher, 100)
    assert last.wait(60) == 0
    with attach(nats_server, "r") as subscriber:
        assert list(subscriber) == list(Recording(runs_dir / "r"))


def test_with_the_variable_each_run_is_copied_without_further_ado(nats_server, runs_dir, monkeypatch, caplog):
    monkeypatch.setenv("OFFLOOP_STREAM", nats_server.address)
    with Publisher("r", runs_dir=runs_dir, timeouts=Timeouts(copy=60.0)) as publisher:
        publish(publisher, 300)

        def copying():
            found = read_bridge(runs_dir / "r")
            return found if found is not None and found.copied else None

        first = wait_for(copying, "the bridge")
        os.kill(first.pid, signal.SIGKILL)
        publish(publisher, 300)
        wait_for(lambda: publisher.poll() or getattr(copying(), "pid", first.pid) != first.pid, "the next bridge")
    wait_for_copy(runs_dir / "r")
    assert "sends the rest" not in caplog.text
    with attach(nats_server, "r") as subscriber:
        assert list(subscriber) == list(Recording(runs_dir / "r"))
    shown = subprocess.run(
        [*PYTHON, "offloop.bus", "show", "r", "--details", "--runs-dir", str(runs_dir)],
        check=True,
        capture_output=True,
        text=True,
    )
    assert f"done, to {nats_server.address}" in shown.stdout


def test_a_run_whose_servers_never_come_says_what_sends_it_later(runs_dir, tmp_path, caplog):
    away = NatsServer(tmp_path, start=False)

    def info():
        shown = [*PYTHON, "offloop.bus", "show", "r", "--details", "--runs-dir", str(runs_dir)]
        return subprocess.run(shown, check=True, capture_output=True, text=True).stdout

    with Publisher("r", runs_dir=runs_dir, stream_to=away.address, timeouts=Timeouts(copy=60.0)) as publisher:
        publish(publisher, 300)
        command = f"'offloop server bridge {publisher.run_dir} --stream {away.address}' sends the rest"
        wait_for(
            lambda: publisher.poll() or "at the moment (no server answers)" in caplog.text, "the training's report"
        )
        assert command in caplog.text
        caplog.clear()
    (said,) = [record.message for record in caplog.records]
    assert said.startswith(f"run r is not all in NATS at {away.address} yet (no server answers)")
    assert said.endswith(command)
    assert f"missing: {command}" in info()
    waiting = read_bridge(publisher.run_dir)
    os.kill(waiting.pid, signal.SIGKILL)
    wait_for(lambda: not waiting.is_running, "the end of its bridge")
    try:
        away.start()
        subprocess.run([*PYTHON, *shlex.split(command.split("'")[1])], check=True, timeout=100)
        with attach(away, "r") as subscriber:
            assert list(subscriber) == list(Recording(publisher.run_dir))
    finally:
        away.kill()
    assert "sends the rest" not in info()


def test_several_readers_share_a_connection(nats_server, bridge, runs_dir):
    with Publisher("r", runs_dir=runs_dir) as publisher:
        publish(publisher, 10)
    bridge("r").wait(60)

    async def read():
        async with Subscriber("r", stream=nats_server.address) as subscriber:
            return [snapshot async for snapshot in subscriber]

    with attach(nats_server, "r") as first, attach(nats_server, "r") as second:
        assert first._nats is second._nats
        first.close()
        assert len(list(second)) == len(asyncio.run(read())) == 10


def test_a_training_is_the_same_whatever_becomes_of_the_servers(nats_server, runs_dir, tmp_path):
    def weights(name, stream=None, during=None):
        folder = tmp_path / name
        options = ("--max-duration", "1ep", "--seed", "3", "--run-name", name, "--runs-dir", runs_dir, "--no-progress")
        where = ("--stream", stream) if stream else ()
        command = ("offloop.trainer", "digits", *options, "--save-folder", folder, *where)
        with subprocess.Popen([*PYTHON, *map(str, command)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as job:
            if during is not None:
                wait_for(lambda: read_bridge(runs_dir / name), "the bridge")
                during()
            errors = job.communicate(timeout=100)[1]
            assert job.returncode == 0, errors
        tensors = load_file(sorted(folder.rglob("*.safetensors"))[-1])
        return {name: values.numpy().tobytes() for name, values in tensors.items() if "model" in name}

    off = weights("off")
    assert off
    assert weights("on", nats_server.address) == off
    assert weights("killed", nats_server.address, nats_server.kill) == off
    nats_server.start()
    assert weights("stopped", nats_server.address, lambda: nats_server.signal(signal.SIGSTOP)) == off
    nats_server.signal(signal.SIGCONT)
    for name in ("on", "killed", "stopped"):
        wait_for_copy(runs_dir / name)
