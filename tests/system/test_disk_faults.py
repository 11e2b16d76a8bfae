"""A disk that is full, read-only, or gone: the live stream goes on, the record resumes when it can, gaps have names."""

import contextlib
import json
import os
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from brokers import broker_pid
from faults import ThreadFollower
from helpers import wait_for

from offloop.bus import Event, Publisher, Recording, find_run
from offloop.bus.protocol.order import Gap

NOISE = random.Random(4)


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
    return psutil.Process(broker_pid(publisher.run_dir))


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


LOOP = """
import json, os, signal, torch
import offloop

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = offloop.watch(model, optimizer, run_name="r", callbacks=["speed"])
for batch, data in enumerate(run.batches([torch.ones(3, 4)] * 20)):
    optimizer.zero_grad()
    model(data).sum().backward()
    optimizer.step()
    if batch == 10:  # a reason for a warning
        os.kill(json.load(open(os.environ["OFFLOOP_RUNS_DIR"] + "/r/broker.json"))["pid"], signal.SIGKILL)
assert not run.detached
"""


@pytest.mark.parametrize("redirections", ["", ">&- 2>&-"])
def test_a_training_continues_where_nothing_can_be_printed(runs_dir: Path, redirections: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as pipe:
        command = ("sh", "-c", f'exec "$@" {redirections}', "", sys.executable, "-c", LOOP)
        assert subprocess.run(command, stdout=pipe, stderr=pipe, timeout=100).returncode == 0
    assert [attempt.status for attempt in find_run("r").attempts] == ["finished"]


def test_on_a_full_disk_events_are_recorded_later_or_a_gap_beyond_the_send_buffer(
    runs_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Publisher("r", backlog_bytes=100_000) as publisher:
        follower = ThreadFollower("r")
        on_disk(publisher, publish(publisher, 100))
        with full_disk(publisher, 1000):
            last = publish(publisher, 100)
            warned(publisher, caplog)
            last = publish(publisher, 100)
            wait_for(lambda: publisher.poll() or len(follower.got) == last, "all of it, live")
            assert publisher.statistics().acknowledged < last
        on_disk(publisher, last)
        on_disk(publisher, recorded := publish(publisher, 100))
        assert caplog.text.count("not recorded at the moment") == caplog.text.count("is recorded again") == 1
        caplog.clear()
        with full_disk(publisher):
            last = publish(publisher, 100)
            warned(publisher, caplog)
            while last < 3000:
                last = publish(publisher, 100)
                wait_for(lambda: publisher.poll() or len(follower.got) == last, "all of it, live")  # noqa: B023  called before the next turn
        on_disk(publisher, last)
        late = ThreadFollower("r")
        last = publish(publisher, 100)
        on_disk(publisher, last)
    for one in (follower, late):
        one.join(100)
    assert follower.numbers == list(range(1, last + 1))
    assert follower.subscriber.gaps == ()
    recording = Recording(publisher.run_dir)
    seqs = [snapshot.seq for snapshot in recording]
    (gap,) = recording.gaps
    assert gap == Gap(0, recorded + 1, gap.last)
    assert 2000 < gap.last < 3000
    kept = [*range(1, recorded + 1), *range(gap.last + 1, last + 1)]
    assert seqs == late.numbers == kept
    assert late.subscriber.gaps == recording.gaps
    assert (recording.damage, str(recording.ending)) == (None, "finished")
    assert find_run("r").last.error == f"the recording lacks {gap.last - recorded} events"
    assert f"events {gap.first} to {gap.last} are not recorded" in caplog.text


MOUNT = ("unshare", "--user", "--map-root-user", "--mount")
FILL = """
import contextlib, os
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
publisher.close()
"""


@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run([*MOUNT, "true"], stderr=subprocess.DEVNULL).returncode != 0,
    reason="no file system of its own can be mounted here",
)
def test_a_run_on_a_full_file_system_reports_its_end_and_gaps(runs_dir: Path) -> None:
    runs_dir.mkdir(exist_ok=True)
    steps = (
        f'mount -t tmpfs -o size=3m none "{runs_dir}"',
        f'"{sys.executable}" -c "$0"',
        f'"{sys.executable}" -m offloop.bus show r --json',
        f'{{ "{sys.executable}" -m offloop.consumers --replay "{runs_dir}/r" --callbacks speed >&2; test $? = 3; }}',
    )
    done = subprocess.run(
        [*MOUNT, "sh", "-c", " && ".join(steps), FILL],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    error = "the recording is incomplete: [Errno 28] No space left on device"
    assert (said["status"], said["error"]) == ("finished", error)
    assert said["details"]["events"] == {"batch_end": 100}
    assert said["details"]["gaps"] == [{"rank": 0, "first": 101, "last": 1100}]
    assert "cannot be written down" not in done.stderr
    assert f"run r finished, {error}: 100 events handled" in done.stderr
