"""What works with a run of this machine works with one that is in JetStream: export, diff, the table of
all runs, what a training waits for, and tensors."""

import random
import re
import signal
import subprocess
import sys
from urllib.request import urlopen

import pytest
from click.testing import CliRunner
from helpers import wait_for

from offloop.bus import ConfigurationError, Event, Publisher, RunNotFoundError
from offloop.bus.cli.main import bus
from offloop.bus.jetstream.download import downloaded
from offloop.bus.jetstream.nats_connection import NatsConnection
from offloop.consumers.dashboard.view.library import RunLibrary
from offloop.consumers.dashboard.view.tables import TableStore
from offloop.consumers.dashboard.web.follow import FollowedRuns
from offloop.consumers.runner.places import NatsRuns

PYTHON = (sys.executable, "-m")


@pytest.fixture(scope="module")
def run(server, tmp_path_factory):
    """The directory of a run that is in the stream, named ``r``."""
    runs_dir, noise = tmp_path_factory.mktemp("runs"), random.Random(5)
    with Publisher("r", runs_dir=runs_dir) as made:
        made.log_table("samples", [{"text": "a"}, {"text": "b"}])
        for batch in range(1, 3001):
            made.publish(Event.BATCH_END, loss=1 / batch, noise=noise.randbytes(200))
    command("server", "bridge", "r", "--runs-dir", runs_dir, "--stream", server.address)
    return runs_dir / "r"


def command(*words):
    done = CliRunner().invoke(bus, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.output


def test_the_recording_is_rebuilt_byte_for_byte(server, run):
    with NatsConnection.shared(server.servers) as there:
        with downloaded(there.address, "r") as path:
            assert path.name == "r-1.mcap"
            assert path.read_bytes() == (run / "recording-1.mcap").read_bytes()
        assert not path.exists()
        with pytest.raises(RunNotFoundError), downloaded(there.address, "other"):
            pass


def test_export_and_compare_of_a_stream_equal_those_of_its_directory(server, run, tmp_path):
    here, there = tmp_path / "here.jsonl", tmp_path / "there.jsonl"
    command("export", run, "--to", "jsonl", "-o", here)
    command("export", "r", "--stream", server.address, "--to", "jsonl", "-o", there)
    assert there.read_bytes() == here.read_bytes()
    assert "the same in 3001 events" in command("compare", "r", "r", "--events", "--stream", server.address)


def test_a_page_reads_tables_from_the_stream(server, run):
    with NatsConnection.shared(server.servers) as there:
        followed = FollowedRuns(NatsRuns(there.address), every=10)
        followed.add("r", wait=False)
        followed.start()
        store = TableStore(followed.runs)
        wait_for(lambda: not (store.look(), store.describe())[1]["isBehind"], "the whole run")
        assert [(one["name"], one["rows"]) for one in store.describe()["tables"]] == [("samples", 2)]
        followed.stop()


def test_the_table_of_runs_has_those_in_nats(server, run):
    with NatsConnection.shared(server.servers) as there:
        place = NatsRuns(there.address)
        library = RunLibrary(place)
        library.look()
        assert (library.problem, [*library.table.entries]) == (None, ["r"])
        assert library.table.entries["r"].status == "finished"
        with pytest.raises(ConfigurationError):
            library.annotate("r", tags=["mine"])
    listed = command("runs", "--stream", server.address, "--where", "status == finished")
    assert listed.splitlines()[1].split()[:2] == ["r", "finished"]
    words = [*PYTHON, "offloop.bus", "ui", "--stream", server.address, "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            address = re.search(r"http://\S+", process.stdout.readline())[0]
            with urlopen(address) as page:
                assert "all runs" in page.read().decode()
        finally:
            process.send_signal(signal.SIGINT)
        process.stdout.read()
