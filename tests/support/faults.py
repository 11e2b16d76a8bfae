"""Real processes to be hurt: publishers that number their events, and followers that write down what they are given.

A publisher notes every event in a ledger, one system call each, so that the ledger is right however the process ends.
A follower reports every number that it was given. Both run as programs of their own: ``python faults.py NAME JSON``."""

import contextlib
import itertools
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
from brokers import address_of, broker_pid, start_broker
from helpers import wait_for

from offloop.bus import Event, Publisher, Recording, Snapshot, Subscriber, find_run
from offloop.bus.publisher import launch
from offloop.bus.types.timeouts import Timeouts

ENTRY = struct.Struct("<QQ")
MEBIBYTE = 1024 * 1024
PATIENCE = 100.0


def note(number: int) -> str:
    """What an event of that number carries, by which it is known for what it is."""
    return f"{number * 2654435761 % 2**32:08x}"


def numbers_in(snapshots: Iterator[Snapshot]) -> Iterator[int]:
    """The numbers that the publisher gave, each checked against what else its event carries."""
    before = 0
    for snapshot in snapshots:
        number = int(snapshot.timestamp.batch)
        if snapshot.note != note(number) or snapshot.seq != number:
            raise AssertionError(f"event {snapshot.seq} is number {number} and carries {snapshot.note!r}")
        if snapshot.time_ns < before:
            raise AssertionError(f"the time of event {number} is {before - snapshot.time_ns} ns before the last one's")
        before = snapshot.time_ns
        yield number


def backward_clock(folder: Path) -> dict[str, str]:
    """An environment for programs whose system's clock goes back by an hour whenever it is read; in brokers it is a day
    behind besides."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(BACKWARD_CLOCK)
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}


BACKWARD_CLOCK = """
import itertools, sys, time
now, hours = time.time_ns, itertools.count(24 if "offloop.bus.broker" in sys.orig_argv else 0)
time.time_ns = lambda: now() - next(hours) * 3600 * 10**9
time.time = lambda: time.time_ns() / 1e9
"""

# -- the programs -----------------------------------------------------------------------------------------------------


def publish(
    run: str,
    ledger: str,
    *,
    rate: float = 2000,
    events: int | None = None,
    ending: str = "close",
    restart_pauses: tuple[float, ...] | None = None,
    **arguments: Any,
) -> None:
    """Publishes ``events`` events at ``rate`` a second, or until SIGUSR1, and then does as ``ending`` says: ``close``;
    or ``stay`` until it is killed, once everything is on disk.

    ``restart_pauses`` take the place of the publisher's own, for brokers that die more often than brokers do."""
    # On a busy machine a broker may take longer to come back than a training is to wait for it.
    timeouts = Timeouts(flush=PATIENCE)
    launch.RESTART_PAUSES = restart_pauses or launch.RESTART_PAUSES
    told_to_end: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: told_to_end.append(number))
    descriptor = os.open(ledger, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    longest = longest_busy = number = acknowledged = 0
    with Publisher(run, timeouts=timeouts, **arguments) as publisher:
        print("ready", flush=True)
        begin = time.monotonic()
        for number in itertools.count(1):
            if told_to_end or (events is not None and number > events):
                break
            clock, busy = time.perf_counter_ns(), time.thread_time_ns()
            publisher.publish(Event.BATCH_END, batch=number, note=note(number))
            longest_busy = max(longest_busy, time.thread_time_ns() - busy)
            longest = max(longest, time.perf_counter_ns() - clock)
            if number % 16 == 1:
                acknowledged = publisher.statistics().acknowledged
            os.write(descriptor, ENTRY.pack(number, acknowledged))
            time.sleep(max(0.0, begin + number / rate - time.monotonic()))
        seconds = time.monotonic() - begin
        publisher.poll()
        if ending == "stay":
            # What is on its way to the broker when a process dies may be lost with it.
            wait_for(lambda: publisher.poll() or publisher.recorded_all, "everything to be recorded", PATIENCE)
            print("published", flush=True)
            time.sleep(600)
    told = {
        "events": number - 1,
        "seconds": seconds,
        "longest_ms": longest / 1e6,
        "longest_busy_ms": longest_busy / 1e6,
        **asdict(publisher.statistics()),
    }
    print(json.dumps(told), flush=True)


def follow(run: str, *, times: int = 1, pause: float = 0.0, **arguments: Any) -> None:
    """Reports what ``times`` subscribers are given from beginning to end; ``pause`` is how many seconds they take over
    an event, until SIGUSR1."""
    in_no_hurry = [pause] if pause else []
    signal.signal(signal.SIGUSR1, lambda *_: in_no_hurry.clear())
    subscribers = [Subscriber(run, events=[Event.BATCH_END], **arguments) for _ in range(times)]
    print("attached", flush=True)
    with ThreadPoolExecutor(times) as pool:
        told = list(pool.map(read_to_end, subscribers, itertools.repeat(in_no_hurry)))
    print(json.dumps(told), flush=True)


def read_to_end(subscriber: Subscriber, pauses: list[float]) -> dict[str, Any]:
    """What one subscriber was given, with ``pauses`` after each event for as long as there are any."""
    numbers = []
    with subscriber:
        for number in numbers_in(iter(subscriber)):
            numbers.append(number)
            for pause in pauses:
                time.sleep(pause)
        return {
            "numbers": numbers,
            "gaps": [list(gap) for gap in subscriber.gaps],
            "ending": str(subscriber.ending),
            "ended_at": time.monotonic(),
            **asdict(subscriber.statistics()),
        }


# -- their handles ----------------------------------------------------------------------------------------------------


class Program:
    """One of the programs in this file, in a process of its own; killed at the end of a ``with``."""

    def __init__(
        self, name: str, first_word: str, arguments: dict[str, Any], environment: Mapping[str, str] | None = None
    ) -> None:
        # What a buffer took with the first line, ``communicate`` would not find.
        self.process = subprocess.Popen(
            [sys.executable, __file__, name, json.dumps(arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, **(environment or {})},
        )
        self.pid = self.process.pid
        self.errors = ""
        """What it wrote to standard error, once it has ended."""
        self._await(first_word)

    def _await(self, word: str) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode()
        if line != f"{word}\n":
            self.process.kill()
            raise AssertionError(f"{word!r} was to come, not {line!r}: {self.process.communicate()[1].decode()}")

    def signal(self, number: int) -> None:
        """Sends it a signal."""
        self.process.send_signal(number)

    def kill(self) -> float:
        """Ends it as ``kill -9`` does; returns when that was, on the steady clock."""
        self.process.kill()
        killed = time.monotonic()
        self.process.communicate()
        return killed

    def report(self, timeout: float) -> Any:
        """Waits for its end, and returns what it reports."""
        out, errors = self.process.communicate(timeout=timeout)
        self.errors = errors.decode()
        assert self.process.returncode == 0, self.errors
        return json.loads(out)

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


class Training(Program):
    """A process that publishes: :func:`publish`. Its ``environment`` is also its broker's."""

    def __init__(
        self, runs_dir: Path, run: str = "r", environment: Mapping[str, str] | None = None, **arguments: Any
    ) -> None:
        self._runs_dir = runs_dir
        self._run = run
        self._ledger = runs_dir / f"ledger-{run}-{time.monotonic_ns()}"
        options = {"run": run, "ledger": str(self._ledger), "runs_dir": str(runs_dir)} | arguments
        super().__init__("publish", "ready", options, environment)

    @property
    def published(self) -> int:
        """Number of the last event that it published."""
        return self._last()[0]

    @property
    def acknowledged(self) -> int:
        """Number of the last event of which it knew that it is on disk."""
        return self._last()[1]

    def _last(self) -> tuple[int, int]:
        data = self._ledger.read_bytes() if self._ledger.exists() else b""
        whole = len(data) // ENTRY.size * ENTRY.size
        entry: tuple[int, int] = ENTRY.unpack(data[whole - ENTRY.size : whole]) if whole else (0, 0)
        return entry

    def await_published(self, number: int) -> None:
        """Waits until it has published so many."""
        wait_for(lambda: self.published >= number, f"event {number} to be published", PATIENCE)

    def await_recorded(self, number: int) -> None:
        """Waits until it knows that so many are on disk."""
        wait_for(lambda: self.acknowledged >= number, f"event {number} to be recorded", PATIENCE)

    def await_loop_end(self) -> None:
        """Waits until one that stays has published everything."""
        self._await("published")

    @property
    def broker_pids(self) -> list[int]:
        """The brokers that it has started and that are still there: one, or none for a moment."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return [
                child.pid
                for child in psutil.Process(self.pid).children()
                if child.status() != psutil.STATUS_ZOMBIE and "offloop.bus.broker" in child.cmdline()
            ]
        return []

    @property
    def broker_pid(self) -> int:
        """The broker that serves its run."""
        return wait_for(lambda: broker_of(self._runs_dir / self._run), "a broker that serves")

    def result(self, timeout: float = PATIENCE) -> dict[str, Any]:
        """Waits until it has ended by itself, and returns what it reports."""
        told: dict[str, Any] = self.report(timeout)
        return told

    def finish(self, timeout: float = PATIENCE) -> dict[str, Any]:
        """Tells it to end in order, and returns what it reports."""
        self.signal(signal.SIGUSR1)
        return self.result(timeout)


def broker_of(run_dir: Path) -> int:
    """The process that serves a run; 0 when none does."""
    with contextlib.suppress(FileNotFoundError):
        if find_run(run_dir).live:
            return broker_pid(run_dir)
    return 0


class Follower(Program):
    """A process that subscribes: :func:`follow`."""

    def __init__(self, runs_dir: Path, run: str = "r", **arguments: Any) -> None:
        where = {} if "broker" in arguments else {"runs_dir": str(runs_dir)}
        super().__init__("follow", "attached", {"run": run} | where | arguments)

    def results(self, timeout: float = PATIENCE) -> list[dict[str, Any]]:
        """Waits for the end, and returns what each subscriber was given."""
        told: list[dict[str, Any]] = self.report(timeout)
        return told

    def result(self, timeout: float = PATIENCE) -> dict[str, Any]:
        """The same of the only one."""
        (told,) = self.results(timeout)
        return told


class ThreadFollower(threading.Thread):
    """A subscriber on a thread that keeps what comes."""

    def __init__(self, run: str, **arguments: Any) -> None:
        super().__init__(daemon=True)
        self.subscriber = Subscriber(run, **arguments)
        self.got: list[Snapshot] = []
        connected = self.subscriber._following._heard
        self.start()
        # What is sent before the stream has taken the subscription can be had from the recording alone.
        wait_for(lambda: self.subscriber._following._heard > connected, "the broker's first sign of life")

    def run(self) -> None:
        with self.subscriber:
            self.got.extend(self.subscriber)

    @property
    def numbers(self) -> list[int]:
        """Those of the events that have come."""
        return [snapshot.seq for snapshot in self.got]


class HandBroker:
    """The broker of run ``r``, started by hand, so that it can be ended and started again; ended at the end of a
    ``with``. Publishers join it as further ranks do."""

    def __init__(self, runs_dir: Path) -> None:
        self._runs_dir = runs_dir
        self.address = address_of(runs_dir)
        self.process = start_broker(runs_dir)

    def start(self) -> None:
        """Starts it again: it resumes the run."""
        self.process = start_broker(self._runs_dir, how="resume")

    @property
    def pid(self) -> int:
        """Its number."""
        return self.process.pid

    def end(self, how: int = signal.SIGTERM) -> None:
        """Sends it a signal that ends it."""
        self.process.send_signal(how)
        self.process.communicate(timeout=100)

    def __enter__(self) -> "HandBroker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.end()
        elif self.process.stdout is not None:
            self.process.stdout.close()


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that stands still meanwhile, as one does that is suspended or whose machine swaps."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def resident(pid: int) -> float:
    """Memory that a process holds, in MiB."""
    return float(psutil.Process(pid).memory_info().rss) / MEBIBYTE


# -- what came of it --------------------------------------------------------------------------------------------------


def assert_complete(told: dict[str, Any], published: int, ending: str = "finished") -> None:
    """A follower was given every event once and in order, missed none, and knows how the run ended."""
    assert_counted(told["numbers"], published)
    assert told["gaps"] == []
    assert told["ending"] == ending


def assert_counted(numbers: list[int], last: int) -> None:
    """``numbers`` are 1 to ``last``; says briefly where they are not."""
    wrong = next((index for index, number in enumerate(numbers) if number != index + 1), len(numbers))
    around = numbers[max(0, wrong - 2) : wrong + 3]
    assert (wrong, len(numbers)) == (last, last), f"{len(numbers)} numbers of {last}; the first odd one is in {around}"


def read_recording(run_dir: Path, published: int, ending: str = "finished", attempt: int | None = None) -> Recording:
    """The recording of a run, in which every event is to be found once, in order, and whole."""
    recording = Recording(run_dir, attempt)
    assert_counted(list(numbers_in(iter(recording))), published)
    assert (recording.gaps, recording.damage, str(recording.ending)) == ((), None, ending)
    return recording


if __name__ == "__main__":
    {"publish": publish, "follow": follow}[sys.argv[1]](**json.loads(sys.argv[2]))
