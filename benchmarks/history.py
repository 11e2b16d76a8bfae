"""Reading the recording of ten million batches: by a consumer, a replay and a dashboard.

Two recordings are read: one of full chunks, as a fast loop writes them, and a shorter one of chunks of three events, as
a loop of sixteen batches a second writes them, since brokers write five times a second."""

import math
import multiprocessing
import os
import random
import resource
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from common import Report, argument_parser, run

from offloop.bus import Event, Recording
from offloop.bus.protocol.frames import END, Topic, event_encoder, pack_map
from offloop.bus.protocol.order import Ending
from offloop.bus.protocol.run_state import Reached
from offloop.bus.recording.summary import Summarizer, Summary
from offloop.bus.recording.writer import RecordingWriter
from offloop.bus.runs.writing import RunDirectory

EPOCH = 10_000
BEGAN = 1_790_000_000_000_000_000
CONTEXT = {"max_duration": "1000ep", "dataloader_label": "train", "dataloader_len": EPOCH, "world_size": 1}


def record(runs_dir: Path, name: str, events: int, per_chunk: int | None = None, metrics: int = 0) -> Path:
    directory = RunDirectory(runs_dir, name)
    attempt, path = directory.next_attempt()
    context, noise = pack_map(CONTEXT), random.Random(name).gauss
    topics = {event: Topic(name, event, 0) for event in (*(event.value for event in Event), END)}
    encoders = {event: (topic.encode(), event_encoder(topic, attempt)) for event, topic in topics.items()}
    epoch = batch = wct = began_epoch = seq = 0
    previous: tuple[int, ...] | None = None
    with closing(RecordingWriter(path, name, attempt, directory.run_id)) as writer:

        def send(event: str, fields: dict) -> tuple[int, ...]:
            nonlocal seq
            seq += 1
            topic, encode = encoders[event]
            in_epoch, time_ns = batch - epoch * EPOCH, BEGAN + 1000 * wct + seq
            counts = (0, epoch, batch, 32 * batch, 0, epoch, 0, in_epoch, 32 * in_epoch, 0)
            now = (*counts, wct, wct, wct - began_epoch, 60_000)
            frame = encode(seq, seq, time_ns, now, previous, fields, context)
            writer.append(topic[:-1], seq, seq, time_ns, frame[len(topic) :])
            if per_chunk is not None and seq % per_chunk == 0:
                writer.flush()
            return now

        send(Event.INIT, {})
        send(Event.FIT_START, {})
        while seq < events - 2:
            batch += 1
            wct += 60_000 + int(noise(0, 500))
            rate = 0.1 * (1 + math.cos(math.pi * batch / events)) / 2
            loss = 2 / batch**0.1 + noise(0, 0.05)
            fields = {"loss": loss, "lr": {"SGD": [rate]}, "batch_size": 32}
            if metrics:
                values = {
                    f"moe/layer_{part // 400:02}/expert_{part % 400:03}/load": noise(0, 1) for part in range(metrics)
                }
                fields["logged"] = [[batch - 1, values]]
            previous = send(Event.BATCH_END, fields)
            if batch % EPOCH == 0 and seq < events - 3:
                epoch, began_epoch = epoch + 1, wct
                previous = send(Event.EPOCH_END, {})
        send(Event.FIT_END, {})
        send(END, {"status": "finished", "error": None})
    directory.begin_attempt(path, attempt, {}, 1, BEGAN / 10**9)
    directory.end_attempt(Ending("finished"), reached=Reached(epoch, batch, 32 * batch, "1000ep"))
    directory.release()
    return directory.path


def consume(run: Path, name: str) -> tuple[float, float, int]:
    options = ("--replay", str(run), "--callbacks", "speed,lr", "--log", "jsonl")
    output = run / f"{name}.jsonl"
    command = [sys.executable, "-m", "offloop.consumers", *options, "-o", f"jsonl.path={output}"]
    begin = time.perf_counter()
    null = os.open(os.devnull, os.O_WRONLY)
    pid = os.posix_spawn(command[0], command, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, null, 2)])
    os.close(null)
    _, status, usage = os.wait4(pid, 0)
    if status:
        raise SystemExit(f"the consumer ended with {os.waitstatus_to_exitcode(status)}")
    output.unlink()
    return time.perf_counter() - begin, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def replay(run: Path, events: int) -> float:
    begin = time.perf_counter()
    count = sum(1 for _ in Recording(run))
    if count != events - 1:
        raise SystemExit(f"{count} of {events - 1} snapshots came")
    return count / (time.perf_counter() - begin)


def _draw(recorded: Path, begin: float, answer: Any) -> None:
    from offloop.consumers import Runner
    from offloop.consumers.dashboard.view.run_view import RunView
    from offloop.consumers.dashboard.view.tap import RunTap

    recording = Recording(recorded)
    watched = RunView(recording.run_name, recording.attempt)
    reader = threading.Thread(target=Runner(recording, [RunTap(watched)]).run)
    reader.start()
    first = None
    is_read = False
    while not is_read:
        reader.join(0.5)
        is_read = not reader.is_alive()
        for name in watched.names():
            watched.series(name).points(width=1000)
            first = first or time.perf_counter() - begin
    everything, batch = time.perf_counter() - begin, watched.progress().batch
    shown, begin = (batch // 2, batch // 2 + batch // 1000), time.perf_counter()
    while watched.history is not None and not watched.refined:
        watched.history.request("batch", *shown)
        time.sleep(0.01)
    zoom = time.perf_counter() - begin
    answer.send((first, everything, zoom, resource.getrusage(resource.RUSAGE_SELF), batch))


def draw(recorded: Path) -> tuple[float, float, float, Any, int]:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_draw, args=(recorded, time.perf_counter(), sender))
    process.start()
    sender.close()
    answer: tuple[float, float, float, Any, int] = receiver.recv()
    process.join()
    return answer


def measure_dashboard(report: Report, recorded: Path, name: str, events: int, goal: bool) -> None:
    recording = Recording(recorded)
    for what in ("no summary", "summary"):
        if what == "summary":
            report.progress(f"{name}: its summary")
            begin = time.process_time()
            summarizer = Summarizer(recording.path, recording.run_name, recording.attempt, recording.run_id)
            summarizer.work(math.inf)
            summarizer.save()
            summarizer.close()
            report.add(f"{name}: summing up", (time.process_time() - begin) / events * 1e6, "us/event")
        report.progress(f"{name}: dashboard, {what}")
        first, everything, zoom, used, batch = draw(recorded)
        if first is None or batch < 0.9 * events:
            raise SystemExit(f"the dashboard has {batch} batches of {events}")
        report.add(f"{name}: dashboard, {what}, first picture", first, "s", 3 if goal or what == "summary" else None)
        report.add(f"{name}: dashboard, {what}, all of {events:,} events", everything, "s", 20 if goal else None)
        report.add(f"{name}: dashboard, {what}, zoom into a thousandth", zoom, "s", 1 if goal else None)
        report.add(f"{name}: dashboard, {what}, processor", (used.ru_utime + used.ru_stime) / events * 1e6, "us/event")
        report.add(f"{name}: dashboard, {what}, memory at most", used.ru_maxrss / 1024, "MiB", 512)


def measure(report: Report, recorded: Path, name: str, events: int, goal: float | None) -> None:
    report.progress(f"{name}: consumer")
    seconds, processors, memory = consume(recorded, "metrics")
    report.add(f"{name}: consumer, {events:,} events", seconds, "s", goal)
    report.add(f"{name}: consumer, processor", processors / events * 1e6, "us/event")
    report.add(f"{name}: consumer, memory at most", memory / 2**20, "MiB", 128)
    report.progress(f"{name}: replay")
    report.add(f"{name}: replay", replay(recorded, events), "events/s", 300_000 if goal else None, at_least=True)
    measure_dashboard(report, recorded, name, events, goal is not None)


def measure_full_chunks(report: Report, runs_dir: Path, events: int) -> None:
    report.progress(f"recording {events:,} events")
    measure(report, record(runs_dir, "long", events), "full chunks", events, 60 * events / 10_000_000)


def measure_small_chunks(report: Report, runs_dir: Path, events: int) -> None:
    events //= 10
    report.progress(f"recording {events:,} events")
    measure(report, record(runs_dir, "slow", events, per_chunk=3), "chunks of 3", events, None)


def measure_many_metrics(report: Report, runs_dir: Path, events: int) -> None:
    events = max(events // 10_000, 100)
    for metrics in (256, 20_000):
        report.progress(f"recording {events:,} events of {metrics:,} metrics")
        recording = Recording(record(runs_dir, f"metrics-{metrics}", events, 1, metrics))
        summarizer = Summarizer(recording.path, recording.run_name, recording.attempt, recording.run_id)
        slowest, is_done, begin = 0.0, False, time.process_time()
        while not is_done:
            before = time.thread_time()
            is_done = summarizer.work(time.monotonic() + 0.005, saves=False)
            slowest = max(slowest, time.thread_time() - before)
        took, begin = time.process_time() - begin, time.process_time()
        summarizer.save()
        saving, begin = time.process_time() - begin, time.process_time()
        summarizer.close()
        found = Summary.load(recording.path)
        loading = time.process_time() - begin
        if found is None or len(found.metrics) < metrics:
            raise SystemExit(f"the summary has not all of {metrics:,} metrics")
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        name = f"{metrics:,} metrics x {events:,} batches"
        report.add(f"{name}: summing up", took / metrics / events * 1e6, "us/value")
        report.add(f"{name}: the longest part of it", slowest * 1e3, "ms")
        report.add(f"{name}: saving the summary", saving * 1e3, "ms")
        report.add(f"{name}: loading the summary", loading * 1e3, "ms")
        report.add(f"{name}: memory at most", memory, "MiB", 128)


PARTS = {"many-metrics": measure_many_metrics, "full-chunks": measure_full_chunks, "small-chunks": measure_small_chunks}

if __name__ == "__main__":
    parser = argument_parser(__doc__, PARTS)
    parser.add_argument("--events", type=int, default=10_000_000, help="of the long run, by default %(default)s")
    options = parser.parse_args()
    run("history", PARTS, options, 2_000 if options.quick else options.events)
