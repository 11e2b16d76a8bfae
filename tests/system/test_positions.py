"""The file of a named consumer that is killed, started elsewhere, stopped and replaced is complete."""

import shutil
import signal
import subprocess
import sys

import pytest
from helpers import wait_for

from offloop.bus import Event, Publisher


@pytest.fixture
def begin(tmp_path):
    begun = []

    def begin(*words):
        home = tmp_path / f"home-{len(begun)}"
        home.mkdir()
        begun.append(
            subprocess.Popen(
                [sys.executable, *map(str, words)],
                cwd=home,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return begun[-1]

    yield begin
    for one in begun:
        one.kill()
        print(one.communicate()[0])


@pytest.fixture
def publisher(begin, server, runs_dir):
    with Publisher("r", runs_dir=runs_dir) as publisher:
        publish(publisher, 1)
        begin("-m", "offloop.bus", "server", "bridge", "r", "--runs-dir", runs_dir, "--stream", server.address)
        yield publisher


def publish(publisher, count):
    for _ in range(count):
        batch = publisher.statistics().published + 1
        publisher.publish(Event.BATCH_END, loss=1 / batch, lr={"SGD": [0.1]})
    publisher.poll()


def lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def grown(publisher, path, more):
    """Wait until a file has so many more lines than now."""
    before = lines(path)
    wait_for(lambda: publisher.poll() or lines(path) >= before + more, f"{more} lines")


CONSUMER = """
from offloop.bus.jetstream import positions
from offloop.consumers.cli.main import main
positions.STALE_SECONDS, positions.RENEW_SECONDS = 2.0, 0.5
main()
"""


def consumer(begin, path, *source):
    words = ("--wait", "--run", "r", "--callbacks", "metrics,lr", "-l", "jsonl", "-o", f"jsonl.path={path}")
    return begin("-c", CONSUMER, *words, *source)


def named(begin, server, path):
    return consumer(begin, path, "--stream", server.address, "--name", "mine", "--commit-every", "50")


def test_the_file_of_a_killed_and_replaced_consumer_has_every_line_once(begin, publisher, server, runs_dir, tmp_path):
    path, copy = tmp_path / "once.jsonl", tmp_path / "copy.jsonl"
    first = named(begin, server, path)
    publish(publisher, 500)
    grown(publisher, path, 300)
    first.kill()
    first.wait()
    publish(publisher, 500)
    second = named(begin, server, path)
    # The first one may have written up to 501 lines, of which those behind its last commit are cut off.
    wait_for(lambda: publisher.poll() or lines(path) == 1001, "1001 lines")
    second.send_signal(signal.SIGSTOP)
    shutil.copy(path, copy)
    publish(publisher, 500)
    third = named(begin, server, copy)
    grown(publisher, copy, 200)
    second.send_signal(signal.SIGCONT)
    publish(publisher, 500)
    said = second.communicate(timeout=30)[0]
    assert f"consumer 'mine' of run 'r' was taken over by process {third.pid} of" in said
    assert second.returncode == 1
    publisher.close()
    said = third.communicate(timeout=60)[0]
    assert third.returncode == 0, said

    undisturbed = tmp_path / "undisturbed.jsonl"
    assert consumer(begin, undisturbed, "--runs-dir", runs_dir).wait(60) == 0
    assert copy.read_bytes() == undisturbed.read_bytes()
    assert lines(copy) == 2001
