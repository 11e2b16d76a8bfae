"""A run is the same, read from JetStream or on the training's own machine."""

import asyncio
import os
import shlex
import signal
import subprocess
import sys

import nats
import pytest
from click.testing import CliRunner
from helpers import wait_for
from nats_servers import NatsServer, attach, wait_for_copy
from training import Act, gold_trainer

from offloop.bus import Event, Publisher, Recording
from offloop.bus.cli.main import bus
from offloop.bus.jetstream.channel import StreamChannel
from offloop.bus.jetstream.connection import NatsServers
from offloop.bus.jetstream.nats_connection import NatsConnection
from offloop.bus.protocol.frames import decode_control, encode_control, split_frame
from offloop.bus.runs.bridged import read_bridge
from offloop.bus.types.timeouts import Timeouts

PYTHON = (sys.executable, "-m")


@pytest.fixture
def bridge(runs_dir):
    begun = []

    def begin(run, server):
        words = ("server", "bridge", run, "--runs-dir", str(runs_dir), "--stream", server.address)
        begun.append(subprocess.Popen((*PYTHON, "offloop.bus", *words), stderr=subprocess.PIPE, text=True))
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


def test_attached_early_late_and_afterwards_it_gives_what_the_recording_has(server, bridge, runs_dir):
    with Publisher("r", runs_dir=runs_dir) as publisher:
        publish(publisher, 1)
        copying = bridge("r", server)
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


def test_a_run_elsewhere_is_shown_and_a_command_that_is_delivered_twice_takes_effect_once(server, bridge, runs_dir):
    commands = []

    def shown():
        publisher.poll()
        return CliRunner().invoke(bus, ["show", "asked", "--stream", server.address]).output

    with Publisher("asked", runs_dir=runs_dir, on_command=commands.append) as publisher:
        publish(publisher, 1)
        bridge("asked", server)
        with attach(server, "asked") as subscriber:
            wait_for(lambda: f"copying, to {server.address}" in shown(), "the run as it is")
            said = {"run": "asked", "id": "1" * 16, "command": "stop", "arguments": []}
            answers = asyncio.run(delivered(server, "ol.q.asked.command", encode_control("command", said), times=2))
            assert [(answer.kind, answer.content["id"]) for answer in answers] == [("accepted", said["id"])] * 2
            wait_for(lambda: publisher.poll() or commands, "the command")
            assert subscriber.command("stop", wait=0).error is None
            wait_for(lambda: publisher.poll() or len(commands) > 1, "the next command")
            assert [command.id == said["id"] for command in commands] == [True, False]


async def delivered(server, subject, request, times):
    """Return the answers to a request that is sent so many times."""
    client = await nats.connect(server.address)
    try:
        inbox = client.new_inbox()
        answers = await client.subscribe(f"{inbox}.>")
        for _ in range(times):
            await client.publish(subject, request, reply=f"{inbox}.command.1")
        return [decode_control(split_frame((await answers.next_msg(60)).data)[1]) for _ in range(times)]
    finally:
        await client.close()


def test_without_its_bridge_a_line_says_what_is_read_and_what_to_do(server, bridge, runs_dir):
    with Publisher("alone", runs_dir=runs_dir) as publisher:
        publish(publisher, 10)
        copying = bridge("alone", server)
        attach(server, "alone").close()
        copying.kill()
        copying.wait()
        sent = CliRunner().invoke(bus, ["send", "alone", "stop", "--stream", server.address]).exception
        assert "has no bridge that answers" in str(sent)
        read = [*PYTHON, "offloop.consumers", "--run", "alone", "--callbacks", "lr", "--stream", server.address]
        with subprocess.Popen(read, stderr=subprocess.PIPE, text=True) as reader:
            try:
                assert reader.stderr.readline().startswith("run alone has no bridge that answers")
                bridge("alone", server)
                publisher.close()
                assert reader.wait(100) == 0
                assert "run alone finished: 10 events handled" in reader.stderr.read()
            finally:
                reader.kill()


def test_with_the_variable_each_run_is_copied_without_further_ado(server, runs_dir, monkeypatch, caplog):
    monkeypatch.setenv("OFFLOOP_STREAM", server.address)
    with Publisher("variable", runs_dir=runs_dir, timeouts=Timeouts(flush=60.0, copy=60.0)) as publisher:
        publish(publisher, 300)

        def copying():
            found = read_bridge(runs_dir / "variable")
            return found if found is not None and found.copied else None

        first = wait_for(copying, "the bridge")
        os.kill(first.pid, signal.SIGKILL)
        publish(publisher, 300)
        wait_for(lambda: publisher.poll() or getattr(copying(), "pid", first.pid) != first.pid, "the next bridge")
    wait_for_copy(runs_dir / "variable")
    assert "sends the rest" not in caplog.text
    with attach(server, "variable") as subscriber:
        assert list(subscriber) == list(Recording(runs_dir / "variable"))


def test_one_rank_of_a_host_says_that_its_run_is_not_copied(runs_dir, tmp_path, caplog):
    away = NatsServer(tmp_path, start=False)
    ranks = {"runs_dir": runs_dir, "world_size": 2, "timeouts": Timeouts(copy=0.1)}
    with (
        Publisher("r", stream_to=away.address, **ranks) as first,
        Publisher("r", broker=first.address, rank=1, **ranks) as second,
    ):
        publish(first, 10)
        publish(second, 10)

        def warnings():
            first.poll()
            second.poll()
            return [record for record in caplog.records if "is not copied to NATS" in record.message]

        wait_for(warnings, "the warning")
        bridge = read_bridge(first.run_dir)
        for _ in range(20):  # the other rank would say it at the same time
            first.wait()
            second.wait()
        assert len(warnings()) == 1
    os.kill(bridge.pid, signal.SIGKILL)


def test_a_run_whose_servers_never_come_says_what_sends_it_later(runs_dir, tmp_path, caplog):
    away = NatsServer(tmp_path, start=False)
    with Publisher("r", runs_dir=runs_dir, stream_to=away.address, timeouts=Timeouts(copy=60.0)) as publisher:
        publish(publisher, 300)
        command = f"'offloop server bridge {publisher.run_dir} --stream {away.address}' sends the rest"
    assert caplog.records[-1].message.endswith(command)
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


def test_a_training_is_the_same_whatever_becomes_of_the_servers(nats_server, runs_dir):
    def weights(name, stream=None, during=lambda: None):
        def hurt(event, state, logger):
            if int(state.timestamp.batch) == 20:
                wait_for(lambda: stream is None or read_bridge(runs_dir / name), "the bridge")
                during()

        options = {"publish": True, "run_name": name, "runs_dir": runs_dir, "stream_to": stream}
        with gold_trainer(48, 6, max_duration="8ep", algorithms=[Act(hurt, Event.BATCH_END)], **options) as trainer:
            trainer.fit()
            return {name: values.numpy().tobytes() for name, values in trainer.state.model.state_dict().items()}

    off = weights("off")
    assert weights("killed", nats_server.address, nats_server.kill) == off
    nats_server.start()
    assert weights("stopped", nats_server.address, lambda: nats_server.signal(signal.SIGSTOP)) == off
    nats_server.signal(signal.SIGCONT)
    for name in ("killed", "stopped"):
        wait_for_copy(runs_dir / name)


def test_without_a_bridge_a_request_is_refused_and_a_demand_waits_for_it(server):
    connection = NatsConnection(NatsServers.parse(server.address))
    channel = StreamChannel(connection)
    channel.send("demand", {"run": "early", "demand": {}})
    channel.send("command", {"run": "early", "id": "a"})
    answer = wait_for(lambda: channel.wait(0.1) and channel.receive(), "the answer to the later one")
    assert (answer.kind, answer.content["id"]) == ("refused", "a")
    channel.close()
    connection.close()
