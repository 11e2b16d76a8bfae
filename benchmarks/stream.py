"""The stream: events a second through a recording broker, latency, and replay speed.

Publisher, broker and subscriber are three processes on one machine, and share its cores."""

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
from common import Report, argument_parser, run, wait_until

from offloop.bus import Event, Publisher, Recording, Subscriber

COUNTER = """
import itertools, sys, time
from offloop.bus import Subscriber
with Subscriber(sys.argv[1]) as subscriber:
    print("ready", flush=True)
    count = sum(1 for _ in itertools.islice(subscriber, int(sys.argv[2])))
    at = time.monotonic()
    print(at, count + sum(1 for _ in subscriber), subscriber.gaps, flush=True)
"""
TIMESTAMP = (0, 3, 1000, 32000, 0, 3, 0, 100, 3200, 0, 12345678, 12345678, 345678, 1234)
FIELDS = {"loss": 0.3, "lr": {"SGD": [0.1]}, "batch_size": 32}
CONTEXT = Publisher.pack_context(
    {"max_duration": "5ep", "dataloader_label": "train", "dataloader_len": 45, "world_size": 1}
)


def publish(publisher: Publisher, loss: float) -> None:
    FIELDS["loss"] = loss
    publisher.send(Event.BATCH_END, TIMESTAMP, TIMESTAMP, FIELDS, CONTEXT)


def throughput(runs_dir: Path, events: int, followed: bool) -> tuple[float, float]:
    with Publisher("flood" if followed else "record", runs_dir=runs_dir) as publisher:
        broker = psutil.Process(json.loads((publisher.run_dir / "broker.json").read_text())["pid"])
        if followed:
            command = [sys.executable, "-c", COUNTER, str(publisher.run_dir), str(events)]
            follower = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            follower.stdout.readline()
        busy = sum(broker.cpu_times()[:2])
        begin = time.monotonic()
        for index in range(events):
            publish(publisher, 1 / (index + 1))
        while publisher.statistics().acknowledged < events:
            publisher.wait()
        recorded = time.monotonic() - begin
        busy = (sum(broker.cpu_times()[:2]) - busy) * 1e6 / events
        if publisher.statistics().dropped:
            raise SystemExit("events were dropped")
    if not followed:
        return events / recorded, busy
    out, _ = follower.communicate(timeout=120)
    received_at, _, found = out.partition(" ")
    if found != f"{events} ()\n":
        raise SystemExit(f"the subscriber got {out!r} of {events} events")
    return events / (float(received_at) - begin), busy


def latency(runs_dir: Path, events: int, rate: int, max_delay: float) -> list[float]:
    sender = """
import sys, time
sys.path.insert(0, sys.argv[2])
from stream import Publisher, publish
publisher = Publisher("pace", runs_dir=sys.argv[1], clock=time.monotonic_ns, max_delay=float(sys.argv[5]))
print("ready", flush=True)
sys.stdin.readline()
next_time = time.monotonic()
for index in range(int(sys.argv[3])):
    next_time += 1 / int(sys.argv[4])
    while time.monotonic() < next_time:
        time.sleep(max(0, next_time - time.monotonic()))
    publish(publisher, 0.5)
publisher.close()
"""
    command = [
        sys.executable,
        "-c",
        sender,
        str(runs_dir),
        str(Path(__file__).parent),
        str(events),
        str(rate),
        str(max_delay),
    ]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    process.stdout.readline()
    delays = []
    with Subscriber("pace", runs_dir=runs_dir) as subscriber:
        process.stdin.write("go\n")
        process.stdin.flush()
        for snapshot in subscriber:
            delays.append((time.monotonic_ns() - snapshot.time_ns) / 1000)
    process.communicate(timeout=60)
    return sorted(delays[events // 20 :])


def replay(path: Path) -> float:
    begin = time.perf_counter()
    recording = Recording(path)
    count = 0
    for _ in recording:
        count += 1
    return count / (time.perf_counter() - begin)


def consumer_replay(path: Path, events: int) -> float:
    command = [sys.executable, "-m", "offloop.consumers", "--replay", str(path), "--callbacks", "speed,lr"]
    begin = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    return events / (time.perf_counter() - begin)


def measure_throughput(report: Report, runs_dir: Path, quick: bool) -> None:
    events, rounds = (2_000, 1) if quick else (200_000, 5)
    recorded, followed = [], []
    for turn in report.rounds("throughput", rounds):
        recorded.append(throughput(runs_dir / str(turn), events, followed=False))
        followed.append(throughput(runs_dir / str(turn), events, followed=True))
    for name, found in (("publish, record", recorded), ("publish, record, receive", followed)):
        report.add(name, [speed for speed, _ in found], "events/s", 250_000, at_least=True)
        report.add(f"{name}: the broker's processor time for an event", [busy for _, busy in found], "us", 4.0)


def measure_latency(report: Report, runs_dir: Path, quick: bool) -> None:
    for max_delay, name in ((0.05, "in bursts"), (0.0, "each at once")):
        report.progress(f"latency {name}")
        delays = latency(runs_dir / name, 400 if quick else 20_000, 2000, max_delay)
        report.add(f"publish to subscriber at 2,000/s, {name}: median", delays[len(delays) // 2], "us")
        report.add(f"publish to subscriber at 2,000/s, {name}: 99 %", delays[int(len(delays) * 0.99)], "us")


def measure_replay(report: Report, runs_dir: Path, quick: bool) -> None:
    events, rounds = (2_000, 1) if quick else (200_000, 5)
    throughput(runs_dir, events, followed=False)
    recording = runs_dir / "record"
    wait_until(lambda: (recording / "run.json").exists(), "the record")
    replays = [replay(recording) for _ in report.rounds("replay", rounds)]
    report.add("replay", replays, "events/s", 300_000, at_least=True)
    replays = [consumer_replay(recording, events) for _ in report.rounds("consumer --replay", rounds)]
    report.add("consumer --replay, speed,lr", replays, "events/s")


PARTS = {"throughput": measure_throughput, "latency": measure_latency, "replay": measure_replay}

if __name__ == "__main__":
    run("stream", PARTS, argument_parser(__doc__, PARTS).parse_args())
