"""Faults: how long the training pauses, how soon others continue or learn of it, how many events are sent again.

The faults are those of the tests (``tests/support/faults.py``); ``docs/reliability.md`` has the promises. The program
ends with an error if anything is lost. A call's time on the clock includes waiting for a core."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import Report, argument_parser, run

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from faults import (
    Follower,
    HandBroker,
    Training,
    assert_complete,
    numbers_in,
    read_recording,
    resident,
    stopped,
)
from helpers import wait_for

from offloop.bus import Event, Publisher, Recording

STALL = 5.0  # limit of one call, in milliseconds
TOLD = 3.0  # limit until consumers know that a run is lost, in seconds
LEASE = 6.5  # limit until the demand of a dead consumer ends, in seconds
FLAT = 32.0  # MiB by which flat memory may grow
PATIENCE = 300.0


@dataclass(frozen=True)
class Sizes:
    deaths: int
    still: float  # seconds for which a process is stopped
    lag: int
    consumers: int  # in four processes


QUICK = Sizes(deaths=2, still=0.5, lag=5_000, consumers=8)
SHORT = Sizes(deaths=20, still=10, lag=100_000, consumers=64)
LONG = Sizes(deaths=100, still=60, lag=2_000_000, consumers=64)


def add_stalls(report: Report, what: str, told: dict[str, Any]) -> None:
    report.add(f"{what}: longest call, on the clock", told["longest_ms"], "ms")
    report.add(f"{what}: longest call, the thread's own time", told["longest_busy_ms"], "ms", STALL)


def undisturbed(report: Report, runs_dir: Path, sizes: Sizes) -> None:
    with Training(runs_dir, events=round(2000 * sizes.still)) as training:
        add_stalls(report, "2,000 events/s, no fault", training.result(PATIENCE))


def broker_killed(report: Report, runs_dir: Path, sizes: Sizes) -> None:
    moments = random.Random(7)
    recoveries = []
    with Training(runs_dir, restart_pauses=(0.0, 0.0)) as training, Follower(runs_dir) as follower:
        for _ in report.rounds("own broker killed", sizes.deaths):
            training.await_recorded(training.published + 1)
            time.sleep(moments.uniform(0, 0.3))
            os.kill(training.broker_pid, signal.SIGKILL)
            recoveries.append(until(lambda number=training.published: training.acknowledged > number))
        told = training.finish(PATIENCE)
        assert_complete(follower.result(PATIENCE), told["events"])
    read_recording(runs_dir / "r", told["events"])
    what = f"own broker killed {sizes.deaths} times"
    add_stalls(report, what, told)
    report.add(f"{what}: until what is published then is on disk", recoveries, "s")
    report.add(f"{what}: events published", told["events"], "events")
    report.add(f"{what}: events sent again", told["resent"], "events")
    report.add(f"{what}: events missing", 0, "events", 0)


def broker_stopped(report: Report, runs_dir: Path, sizes: Sizes) -> None:
    recoveries = []
    with (
        HandBroker(runs_dir) as broker,
        Training(runs_dir, broker=broker.address) as training,
        Follower(runs_dir) as follower,
    ):
        for _ in range(max(1, sizes.deaths // 4)):
            training.await_recorded(training.published + 1)
            broker.end(signal.SIGKILL)
            training.await_published(training.published + 2000)
            broker.start()
            recoveries.append(until(lambda number=training.published: training.acknowledged > number))
        told = training.finish(PATIENCE)
        assert_complete(follower.result(PATIENCE), told["events"])
    read_recording(runs_dir / "r", told["events"])
    what = "broker killed, back after a second"
    add_stalls(report, what, told)
    report.add(f"{what}: until everything is on disk", recoveries, "s")
    report.add(f"{what}: events sent again", told["resent"], "events")


def until(condition: Callable[[], object]) -> float:
    begin = time.monotonic()
    wait_for(condition, "the recovery", PATIENCE)
    return time.monotonic() - begin


def trainer_killed(report: Report, runs_dir: Path, sizes: Sizes) -> None:
    for with_broker in (False, True):
        waits, unrecorded = [], []
        for number in range(max(1, sizes.deaths // 4)):
            name = f"r{number}{with_broker:d}"
            with Training(runs_dir, name) as training, Follower(runs_dir, name) as follower:
                training.await_recorded(500)
                if with_broker:
                    os.kill(training.broker_pid, signal.SIGKILL)
                killed = training.kill()
                told = follower.result(PATIENCE)
            waits.append(told["ended_at"] - killed)
            recorded = sum(1 for _ in numbers_in(iter(Recording(runs_dir / name))))
            if recorded < training.acknowledged:
                raise SystemExit(f"{training.acknowledged - recorded} events that were acknowledged are not recorded")
            unrecorded.append(training.published - recorded)
        what = "trainer and broker killed" if with_broker else "trainer killed"
        report.add(f"{what}: until consumers are told, longest", max(waits), "s", TOLD)
        report.add(f"{what}: published and not recorded, most", max(unrecorded), "events")


def consumer_killed(report: Report, runs_dir: Path, sizes: Sizes) -> None:
    command = (
        "import sys; from offloop.bus import *; list(Subscriber('r', events=[Event.AFTER_LOSS], runs_dir=sys.argv[1]))"
    )
    waits = []
    with Publisher("r", runs_dir=runs_dir) as publisher:

        def is_requested() -> bool:
            publisher.wait()
            return Event.AFTER_LOSS in publisher.demand.events

        for _ in range(max(1, sizes.deaths // 4)):
            with subprocess.Popen([sys.executable, "-c", command, str(runs_dir)]) as consumer:
                wait_for(is_requested, "the consumer's demand", PATIENCE)
                consumer.kill()
            waits.append(until(lambda: not is_requested()))
    report.add("consumer killed: until its demand ends, longest", max(waits), "s", LEASE)


def consumer_still(report: Report, runs_dir: Path, sizes: Sizes) -> None:
    with Training(runs_dir, rate=5000) as training, Follower(runs_dir) as follower:
        training.await_recorded(2000)
        pids = (training.pid, training.broker_pid)
        before = [resident(pid) for pid in pids]
        with stopped(follower.pid):
            time.sleep(sizes.still)
            grown = [resident(pid) - was for pid, was in zip(pids, before, strict=True)]
        woken = time.monotonic()
        told = training.finish(PATIENCE)
        seen = follower.result(PATIENCE)
        assert_complete(seen, told["events"])
    what = f"consumer stopped for {sizes.still:g} s at 5,000 events/s"
    add_stalls(report, what, told)
    add_growth(report, what, grown)
    report.add(f"{what}: until it has caught up", seen["ended_at"] - woken, "s")


def add_growth(report: Report, what: str, grown: list[float]) -> None:
    for who, mebibytes in zip(("trainer", "broker"), grown, strict=True):
        report.add(f"{what}: growth of the {who}", mebibytes, "MiB", FLAT)


def broker_still(report: Report, runs_dir: Path, sizes: Sizes) -> None:
    for name, backlog in (("r", {}), ("small", {"backlog_bytes": 100_000, "max_delay": 0})):
        with Training(runs_dir, name, rate=5000, **backlog) as training, Follower(runs_dir, name) as follower:
            training.await_recorded(2000)
            before = resident(training.pid)
            with stopped(training.broker_pid):
                first, begin = training.published, time.monotonic()
                time.sleep(sizes.still)
                speed = (training.published - first) / (time.monotonic() - begin)
                grown = resident(training.pid) - before
            told = training.finish(PATIENCE)
            seen = follower.result(PATIENCE)
        recording = Recording(runs_dir / name)
        kept = list(numbers_in(iter(recording)))
        missing = sum(gap.last - gap.first + 1 for gap in recording.gaps)
        if (missing, len(kept) + missing, seen["numbers"]) != (told["dropped"], told["events"], kept):
            raise SystemExit(f"{told['dropped']} events were given up and {missing} are named as missing")
        what = f"broker stopped for {sizes.still:g} s at 5,000 events/s"
        what += f", backlog of {backlog['backlog_bytes']:,} bytes" if backlog else ""
        add_stalls(report, what, told)
        report.add(f"{what}: speed meanwhile", speed, "events/s", 4900, at_least=True)
        report.add(f"{what}: growth of the trainer", grown, "MiB")
        report.add(f"{what}: events missing, all named", missing, "events", None if backlog else 0)


def consumer_behind(report: Report, runs_dir: Path, sizes: Sizes) -> None:
    with Training(runs_dir, rate=30_000, events=sizes.lag + 1000, ending="stay") as training:
        training.await_recorded(500)
        pids = (training.pid, training.broker_pid)
        before = [resident(pid) for pid in pids]
        with Follower(runs_dir, pause=0.1) as slow:
            training.await_loop_end()
            grown = [resident(pid) - was for pid, was in zip(pids, before, strict=True)]
            training.kill()
            slow.signal(signal.SIGUSR1)
            hurried = time.monotonic()
            told = slow.result(PATIENCE)
            assert_complete(told, sizes.lag + 1000, "lost: the trainer's process died")
    what = f"consumer {sizes.lag:,} events behind"
    add_growth(report, what, grown)
    report.add(f"{what}: until it has caught up", told["ended_at"] - hurried, "s")


def many_consumers(report: Report, runs_dir: Path, sizes: Sizes) -> None:
    with Training(runs_dir, rate=1000) as training, contextlib.ExitStack() as stack:
        followers = [stack.enter_context(Follower(runs_dir, times=sizes.consumers // 4)) for _ in range(4)]
        training.await_published(training.published + round(500 * sizes.still))
        told = training.finish(PATIENCE)
        finished = time.monotonic()
        ends = []
        for follower in followers:
            for one in follower.results(PATIENCE):
                assert_complete(one, told["events"])
                ends.append(one["ended_at"])
    what = f"{sizes.consumers} consumers at 1,000 events/s"
    add_stalls(report, what, told)
    report.add(f"{what}: until the last one has everything", max(0.0, max(ends) - finished), "s")


MEASUREMENTS = (
    undisturbed,
    broker_killed,
    broker_stopped,
    trainer_killed,
    consumer_killed,
    consumer_still,
    broker_still,
    consumer_behind,
    many_consumers,
)


if __name__ == "__main__":
    parts = {measure.__name__.replace("_", "-"): measure for measure in MEASUREMENTS}
    parser = argument_parser(__doc__, parts)
    parser.add_argument("--long", action="store_true", help="stalls of a minute, 100 deaths, 2 million events")
    options = parser.parse_args()
    run("faults", parts, options, QUICK if options.quick else LONG if options.long else SHORT)
