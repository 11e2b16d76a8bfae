"""The stream in another language: the client in ``examples/node``, which was written from ``docs/protocol.md``, against
ours. What the two do not agree on is wrong in the document."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest
from brokers import broker_pid
from helpers import wait_for
from paths import ROOT

from offloop.bus import Event, Publisher, Recording, Subscriber, find_run

pytestmark = pytest.mark.needs("node", "node_modules")

MAIN = ROOT / "examples" / "node" / "main.mjs"
FIELDS = {"loss": 0.5, "flag": True, "none": None, "text": "grüße", "list": [1, -2, 2**40], "bytes": b"\0\xff"}


@contextlib.contextmanager
def node(*arguments):
    """The client, doing what the arguments say; killed at the end."""
    process = subprocess.Popen(
        ["node", str(MAIN), *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHON": sys.executable},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def answers(process):
    return [json.loads(line) for line in process.stdout]


def assert_published(run, told, events):
    assert told["published"] == events + 1
    recording = Recording(find_run(run).path)
    snapshots = list(recording)
    assert [(one.seq, int(one.timestamp.batch)) for one in snapshots] == [(n, n) for n in range(1, events + 1)]
    assert [one.loss for one in snapshots] == [1 / n for n in range(1, events + 1)]
    assert (recording.ending.status, recording.gaps, recording.damage) == ("finished", (), None)
    assert [attempt.status for attempt in find_run(run).attempts] == ["finished"]


def test_the_client_restarts_a_killed_broker(runs_dir):
    with node("serve", runs_dir, "r", 1000) as publisher:
        assert json.loads(publisher.stdout.readline()) == {"ready": 1}
        subscriber = Subscriber("r")
        following = iter(subscriber)
        assert [next(following).seq for _ in range(100)] == list(range(1, 101))
        os.kill(broker_pid(find_run("r").path), signal.SIGKILL)
        assert [one.seq for one in following] == list(range(101, 1001))
        subscriber.close()
        told = answers(publisher)[-1]
    assert told["restarts"] == 1
    assert_published("r", told, 1000)


def test_the_client_attaches_to_a_running_training(runs_dir):
    publisher = Publisher("r")

    def publish(first, last):
        for batch in range(first, last + 1):
            # Each tenth is too large for the stream.
            publisher.publish(Event.BATCH_END, batch=batch, **FIELDS, weight="x" * (50_000 if batch % 10 == 0 else 1))

    def recorded(number):
        wait_for(lambda: publisher.poll() or publisher.statistics().acknowledged >= number, f"event {number} on disk")

    publish(1, 500)
    recorded(500)
    with node("follow", runs_dir, "r") as follower:
        first = json.loads(follower.stdout.readline())
        assert (first["event"], first["batch"]) == ("batch_end", 1)
        assert {name: first["fields"][name] for name in FIELDS if name != "bytes"} == {
            name: value for name, value in FIELDS.items() if name != "bytes"
        }
        publish(501, 700)
        recorded(700)
        publish(701, 1000)
        recorded(1000)
        publisher.close()
        told = answers(follower)
    assert [(one["seq"], one["batch"], len(one["fields"].get("weight", ""))) for one in told[:-1]] == [
        (n, n, 50_000 if n % 10 == 0 else 1) for n in range(2, 1001)
    ]
    assert (told[-1]["event"], told[-1]["fields"]["status"]) == ("$end", "finished")


def test_the_client_sends_and_receives_commands(runs_dir):
    with Publisher("ours") as ours, node("stop", ours.address, "ours") as commander:
        batch = 0

        def is_stopped():
            nonlocal batch
            batch += 1
            ours.publish(Event.BATCH_END, batch=batch)
            return ours.stop_requested

        wait_for(is_stopped, "the stop")
        assert answers(commander)[0]["error"] is None
    with node("serve", runs_dir, "theirs", 100_000) as publisher:
        publisher.stdout.readline()
        wait_for(lambda: (runs_dir / "theirs" / "broker.json").exists(), "the first event")
        done = subprocess.run(
            [sys.executable, "-m", "offloop.bus", "send", "theirs", "stop"],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "published" in answers(publisher)[-1]
    assert find_run("theirs").status == "stopped"
