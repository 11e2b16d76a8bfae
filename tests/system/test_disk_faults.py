"""A disk that is full, read-only, or gone: the live stream goes on, the record resumes when it can, gaps have names."""

import contextlib
import ctypes
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from helpers import wait_for

from offloop.bus import Event, Publisher, Recording, Subscriber, find_run
from offloop.bus.protocol.order import Gap

NOISE = random.Random(4)


class Follower(threading.Thread):
    """A subscriber on a thread that keeps the numbers of what comes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.subscriber = Subscriber("r")
        self.got: list[int] = []
        connected = self.subscriber._following._heard
        self.start()
        # What is sent before the stream has taken the subscription can be had from the recording alone.
        wait_for(lambda: self.subscriber._following._heard > connected, "the broker's first sign of life")

    def run(self) -> None:
        with self.subscriber:
            for snapshot in self.subscriber:
                self.got.append(snapshot.seq)


def publish(publisher: Publisher, count: int) -> int:
    """Publishes so many events that cannot be compressed, and returns the number of the last one."""
    for _ in range(count):
        publisher.publish(Event.BATCH_END, noise=NOISE.randbytes(100))
    publisher.poll()
    return publisher.statistics().published


def on_disk(publisher: Publisher, number: int) -> None:
    wait_for(lambda: publisher.poll() or publisher.statistics().acknowledged >= number, f"event {number} on disk")


def warned(publisher: Publisher, log: pytest.LogCaptureFixture) -> None:
    wait_for(lambda: publisher.poll() or "not recorded at the moment" in log.text, "the trainer to be told")


def broker_of(publisher: Publisher) -> psutil.Process:
    return psutil.Process(json.loads((publisher.run_dir / "broker.json").read_text())["pid"])


@contextlib.contextmanager
def full_disk(publisher: Publisher, room: int = 0) -> Iterator[None]:
    """The broker cannot write more than ``room`` bytes further into the recording, and into nothing else if that is
    smaller."""
    pid = broker_of(publisher).pid
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (publisher.recording.stat().st_size + room, hard))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))


@pytest.mark.parametrize("room", [0, 1, 1000])
def test_what_was_published_while_the_disk_was_full_is_recorded_afterwards(
    runs_dir: Path, caplog: pytest.LogCaptureFixture, room: int
) -> None:
    with Publisher("r") as publisher:
        follower = Follower()
        on_disk(publisher, publish(publisher, 100))
        with full_disk(publisher, room):
            last = publish(publisher, 100)
            warned(publisher, caplog)
            last = publish(publisher, 1000)
            wait_for(lambda: publisher.poll() or len(follower.got) == last, "all of it, live")
            assert publisher.statistics().acknowledged < last
        on_disk(publisher, last)
        on_disk(publisher, publish(publisher, 100))
    follower.join(30)
    recording = Recording(publisher.run_dir)
    assert follower.got == [snapshot.seq for snapshot in recording] == list(range(1, last + 101))
    assert (recording.gaps, recording.damage, str(recording.ending)) == ((), None, "finished")
    assert (find_run("r").status, find_run("r").last.error) == ("finished", None)
    assert caplog.text.count("not recorded at the moment") == 1
    assert "events after 100 are not recorded at the moment: [Errno 27] File too large" in caplog.text
    assert caplog.text.count("is recorded again") == 1
    said = (publisher.run_dir / "broker.log").read_text()
    assert (said.count("not recorded at the moment"), said.count("recorded again")) == (1, 1)


def test_what_the_ring_could_not_hold_while_the_disk_was_full_is_a_named_gap(
    runs_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Publisher("r", backlog_bytes=100_000) as publisher:
        follower = Follower()
        on_disk(publisher, publish(publisher, 100))
        with full_disk(publisher):
            last = publish(publisher, 100)
            warned(publisher, caplog)
            while last < 3000:
                last = publish(publisher, 100)
                wait_for(lambda: publisher.poll() or len(follower.got) == last, "all of it, live")  # noqa: B023  called before the next turn
        on_disk(publisher, last)
        late = Follower()
        last = publish(publisher, 100)
        on_disk(publisher, last)
    for one in (follower, late):
        one.join(30)
    assert follower.got == list(range(1, last + 1))
    assert follower.subscriber.gaps == ()
    recording = Recording(publisher.run_dir)
    recorded = [snapshot.seq for snapshot in recording]
    (gap,) = recording.gaps
    assert gap == Gap(0, 101, gap.last)
    assert 2000 < gap.last < 3000
    assert recorded == late.got == [*range(1, 101), *range(gap.last + 1, last + 1)]
    assert late.subscriber.gaps == recording.gaps
    assert str(recording.ending) == "finished"
    named = f"events 101 to {gap.last} are not recorded"
    assert named in (publisher.run_dir / "broker.log").read_text()
    assert named in caplog.text


def test_a_training_whose_disk_stays_full_ends_in_order(runs_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    publisher = Publisher("r")
    follower = Follower()
    broker = broker_of(publisher)
    on_disk(publisher, publish(publisher, 100))
    with full_disk(publisher):
        publish(publisher, 1000)
        warned(publisher, caplog)
        assert not publisher.recorded_all
        publisher.close()
        follower.join(30)
        broker.wait(30)
    assert follower.got == list(range(1, 1101))
    assert str(follower.subscriber.ending) == "finished"
    assert "may not be recorded" not in caplog.text
    assert caplog.text.count("not recorded at the moment") == 1
    run = find_run("r")
    assert run.status == "finished"
    assert str(run.last.error).startswith("the recording is incomplete: [Errno 27] File too large")
    recording = Recording(publisher.run_dir)
    assert [snapshot.seq for snapshot in recording] == list(range(1, 101))
    assert recording.damage is None


MOUNT = ("unshare", "--user", "--map-root-user", "--mount")
FILL = """
import contextlib, os, sys
from offloop.bus import Event, Publisher
from helpers import wait_for
publisher = Publisher("r")
for _ in range(100):
    publisher.publish(Event.BATCH_END)
wait_for(lambda: publisher.poll() or publisher.statistics().acknowledged == 100, "the events on disk")
with contextlib.suppress(OSError), open(publisher.run_dir.parent / "other", "wb", buffering=0) as other:
    while True:
        other.write(bytes(4096))
for _ in range(1000):
    publisher.publish(Event.BATCH_END, noise=os.urandom(100))
publisher.close(*sys.argv[1:])
"""


@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run([*MOUNT, "true"], stderr=subprocess.DEVNULL).returncode != 0,
    reason="no file system of its own can be mounted here",
)
@pytest.mark.parametrize("ending", [("finished",), ("failed", "OSError: no space")])
def test_a_run_whose_file_system_has_no_byte_left_says_how_it_ended_and_what_is_missing(
    runs_dir: Path, ending: tuple[str, ...]
) -> None:
    runs_dir.mkdir(exist_ok=True)
    steps = (
        f'mount -t tmpfs -o size=3m none "{runs_dir}"',
        f'"{sys.executable}" -c "$0" "$@"',
        f'"{sys.executable}" -m offloop.bus show r --json',
    )
    done = subprocess.run(
        [*MOUNT, "sh", "-c", " && ".join(steps), FILL, *ending],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    error = ending[1] if len(ending) > 1 else "the recording is incomplete: [Errno 28] No space left on device"
    assert (said["status"], said["error"]) == (ending[0], error)
    assert said["details"]["events"] == {"batch_end": 100}
    assert said["details"]["gaps"] == [{"rank": 0, "first": 101, "last": 1100}]
    assert "cannot be written down" not in done.stderr


def test_a_run_is_not_begun_on_a_full_disk(runs_dir: Path) -> None:
    script = """
import resource
from offloop.bus import OffloopError, Publisher
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
try:
    Publisher("r")
except OffloopError as error:
    print(f"{type(error).__name__}: {error}")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.startswith("RunDirectoryError: the r")
    assert "cannot be" in done.stdout
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


def take_away_recording(run_dir: Path) -> None:
    (run_dir / "recording-1.mcap").unlink()


@pytest.mark.parametrize("take_away", [take_away_recording, shutil.rmtree])
def test_a_recording_that_is_deleted_ends_the_record_and_nothing_else(
    runs_dir: Path, caplog: pytest.LogCaptureFixture, take_away: Callable[[Path], None]
) -> None:
    publisher = Publisher("r")
    follower = Follower()
    broker = broker_of(publisher)
    on_disk(publisher, publish(publisher, 100))
    wait_for(lambda: len(follower.got) == 100, "all of it, live")
    take_away(publisher.run_dir)
    begin = time.monotonic()
    # Long enough for everybody to look into the directory again.
    while time.monotonic() - begin < 1:
        last = publish(publisher, 10)
        wait_for(lambda: publisher.poll() or len(follower.got) == last, "all of it, live")  # noqa: B023  called before the next turn
    warned(publisher, caplog)
    publisher.close()
    follower.join(30)
    broker.wait(30)
    assert follower.got == list(range(1, last + 1))
    assert caplog.text.count("not recorded at the moment: the recording") == 1
    assert "may not be recorded" not in caplog.text


def test_a_recording_that_is_moved_back_goes_on(runs_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Publisher("r") as publisher:
        on_disk(publisher, publish(publisher, 100))
        away = publisher.recording.rename(runs_dir / "away.mcap")
        publish(publisher, 100)
        warned(publisher, caplog)
        publish(publisher, 100)
        away.rename(publisher.recording)
        on_disk(publisher, 300)
    recording = Recording(publisher.run_dir)
    assert [snapshot.seq for snapshot in recording] == list(range(1, 301))
    assert (recording.gaps, recording.damage) == ((), None)


TRAINER = """
import json, logging, sys
from offloop.bus import Event, Publisher
logging.basicConfig(stream=sys.stdout)
with Publisher("r") as publisher:
    print(json.loads((publisher.run_dir / "broker.json").read_text())["pid"], flush=True)
    while sys.stdin.readline() == "more\\n":
        for _ in range(100):
            publisher.publish(Event.EPOCH_END)
"""


def obey_modes() -> None:
    """Takes from root what lets it write where the modes of files forbid it."""
    if os.geteuid() == 0:
        drop_from_bounding_set, override, read_search = 24, 1, 2
        for capability in (override, read_search):
            ctypes.CDLL(None).prctl(drop_from_bounding_set, capability)


def test_a_directory_that_becomes_read_only_costs_neither_record_nor_stream(runs_dir: Path) -> None:
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        preexec_fn=obey_modes,
    )
    assert trainer.stdin is not None
    assert trainer.stdout is not None
    broker = psutil.Process(int(trainer.stdout.readline()))
    follower = Follower()
    trainer.stdin.write("more\n")
    wait_for(lambda: len(follower.got) == 100, "all of it, live")
    (runs_dir / "r").chmod(0o500)
    trainer.stdin.write("more\n")
    wait_for(lambda: len(follower.got) == 200, "all of it, live")
    out, _ = trainer.communicate("end\n", timeout=100)
    assert trainer.returncode == 0
    follower.join(30)
    broker.wait(30)
    assert str(follower.subscriber.ending) == "finished"
    recording = Recording(runs_dir / "r" / "recording-1.mcap")
    assert follower.got == [snapshot.seq for snapshot in recording] == list(range(1, 201))
    assert (str(recording.ending), recording.damage) == ("finished", None)
    assert out.count("cannot be written down") == 1
