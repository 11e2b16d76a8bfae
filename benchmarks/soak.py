"""Millions of events through broker and two consumers: nothing may be lost, and memory must stay flat.

The publisher pauses only when its ring is half full, so a lost event was lost on the way. Memory is flat if its median
over the last fifth of the samples is at most 64 MiB above that over the second fifth (rings and buffers fill in the
first one). The exit code is 1 when something was lost or grew."""

import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil
from common import Report, argument_parser, run
from stream import publish

from offloop.bus import Publisher, find_run

RING_BYTES = 16 * 1024 * 1024
# The queue of a stalled consumer is not growth: see offloop.bus.net.sockets.STREAM_QUEUE.
GROWTH_BYTES = 64 * 1024 * 1024
SAMPLE_SECONDS = 0.1
BURST = 512
PATIENCE_SECONDS = 60.0

CONSUMER = """
import sys
from offloop.bus import Subscriber
with Subscriber(sys.argv[1], runs_dir=sys.argv[2], name=sys.argv[3]) as subscriber:
    print("ready", flush=True)
    count = 0
    for snapshot in subscriber:
        count += 1
        if snapshot.seq != count:
            sys.exit(f"event {snapshot.seq} came as number {count}")
    print(count, subscriber.gaps, subscriber.ending, flush=True)
"""


class Memory:
    def __init__(self, processes: dict[str, int]) -> None:
        self._processes = {name: psutil.Process(pid) for name, pid in processes.items()}
        self.samples: dict[str, list[int]] = {name: [] for name in processes}
        self._next = 0.0

    def look(self) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + SAMPLE_SECONDS
        for name, process in self._processes.items():
            try:
                resident = process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
            # A process that has exited and was not waited for has none.
            if resident:
                self.samples[name].append(resident)

    def fifths(self, name: str) -> tuple[float, float, float]:
        samples = self.samples[name] or [0]
        size = max(1, len(samples) // 5)
        return (
            statistics.median(samples[size : 2 * size] or samples),
            statistics.median(samples[size:] or samples),
            statistics.median(samples[-size:]),
        )


def start_consumer(run: str, runs_dir: Path, name: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", CONSUMER, run, str(runs_dir), name]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None  # it is a pipe
    process.stdout.readline()
    return process


def flood(publisher: Publisher, events: int, memory: Memory, report: Report) -> None:
    for number in range(1, events + 1):
        publish(publisher, 1 / number)
        if number % BURST == 0:
            memory.look()
            if number % (BURST * 64) == 0:
                report.progress(f"{number:,} of {events:,} events")
            if publisher.statistics().backlog_bytes > RING_BYTES // 2:
                drain(publisher, memory, RING_BYTES // 4)
    drain(publisher, memory, 0)


def drain(publisher: Publisher, memory: Memory, size: int) -> None:
    acknowledged, deadline = -1, 0.0
    while publisher.statistics().backlog_bytes > size:
        publisher.poll()
        memory.look()
        if publisher.statistics().acknowledged > acknowledged:
            acknowledged, deadline = publisher.statistics().acknowledged, time.monotonic() + PATIENCE_SECONDS
        elif time.monotonic() > deadline:
            raise SystemExit(f"the broker has stood still at event {acknowledged} for {PATIENCE_SECONDS:g} s")
        time.sleep(0.001)


def soak(report: Report, runs_dir: Path, events: int) -> None:
    wrong = []
    with Publisher("soak", runs_dir=runs_dir, backlog_bytes=RING_BYTES) as publisher:
        broker = next(child for child in psutil.Process().children() if "offloop.bus.broker" in child.cmdline())
        consumers = [start_consumer("soak", runs_dir, name) for name in ("first", "second")]
        memory = Memory(
            {"publisher": psutil.Process().pid, "broker": broker.pid}
            | {f"consumer {number}": process.pid for number, process in enumerate(consumers, 1)}
        )
        begin = time.perf_counter()
        flood(publisher, events, memory, report)
        recorded = time.perf_counter() - begin
        sent = publisher.statistics()
    while any(process.poll() is None for process in consumers):
        memory.look()
        time.sleep(SAMPLE_SECONDS)
    received = time.perf_counter() - begin
    size = find_run("soak", runs_dir).recording.stat().st_size
    if sent.dropped or sent.acknowledged != events:
        wrong.append(f"of {events} events {sent.dropped} were dropped and {sent.acknowledged} recorded")
    for number, process in enumerate(consumers, 1):
        out, _ = process.communicate()
        if out != f"{events} () finished\n":
            wrong.append(f"consumer {number} got {out.strip() or 'an event out of order'} of {events} events")
    report.add("events", events, "")
    report.add("publish, record", events / recorded, "events/s")
    report.add("publish, record, receive twice", events / received, "events/s")
    report.add("cost to the publishing thread", sent.nanoseconds_per_event / 1000, "us an event")
    report.add("recording", size / events, "bytes an event")
    for name in memory.samples:
        before, middle, after = (value / 2**20 for value in memory.fifths(name))
        report.add(f"memory of the {name}: after the start", before, "MiB")
        report.add(f"memory of the {name}: median", middle, "MiB")
        report.add(f"memory of the {name}: at the end", after, "MiB")
        if after - before > GROWTH_BYTES / 2**20:
            wrong.append(f"the memory of the {name} grew from {before:.0f} to {after:.0f} MiB")
    if wrong:
        raise SystemExit("; ".join(wrong))
    print("nothing lost, memory flat")


def main() -> None:
    parts = {"soak": soak}
    parser = argument_parser(__doc__, parts)
    parser.add_argument("--events", type=int, metavar="N", help="default: 10,000,000, with --quick 2,000")
    options = parser.parse_args()
    run("soak", parts, options, options.events or (2_000 if options.quick else 10_000_000))


if __name__ == "__main__":
    main()
