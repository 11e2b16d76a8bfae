"""StallMonitor: what it logs by the times of events, and what it says while nothing comes."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from callback_calls import calls_of, goes_on_alike
from consumers_stream import Collector

from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.protocol.stream import RunStream
from offloop.bus.runs.alerts import FIRING, RESOLVED, read_alerts
from offloop.bus.types.actor import FIRST_ACTOR
from offloop.bus.types.commands import Command, Outcome
from offloop.bus.types.event import Event
from offloop.bus.types.health import HEALTH, Gpu, Health
from offloop.bus.types.timestamp import Timestamp
from offloop.consumers import Callback, Logger, Runner
from offloop.consumers.callbacks.stall_monitor import StallMonitor


def at(event: Event, seconds: float, batch: int = 0, eval_batch: int = 0, label: str = "train") -> Snapshot:
    wct = timedelta(seconds=seconds)
    return Snapshot.build(
        event,
        seq=1 + round(seconds * 100),
        time_ns=1_700_000_000_000_000_000 + round(seconds * 1e9),
        timestamp=Timestamp(batch=batch, total_wct=wct),
        eval_timestamp=Timestamp(batch=eval_batch),
        dataloader_label=label,
    )


def steps(*gaps: float) -> list[Snapshot]:
    now, stream = 0.0, [at(Event.FIT_START, 0)]
    for batch, gap in enumerate(gaps, 1):
        now += gap
        stream.append(at(Event.BATCH_END, now, batch))
    return stream


def test_a_stall_is_logged_with_the_event_that_ends_it() -> None:
    calls = calls_of(StallMonitor(factor=10, min_seconds=5), steps(*[1] * 8, 11, 1, 9, 25, 1)).calls
    assert calls == [
        [9, "BATCH_END", {"stall/seconds": 11.0, "stall/count": 1}],
        [12, "BATCH_END", {"stall/seconds": 25.0, "stall/count": 2}],
    ]


def test_fast_batches_stall_after_the_minimum_and_the_first_ones_have_ten_times_that() -> None:
    assert calls_of(StallMonitor(min_seconds=5), steps(49, 0.01, 0.01, 0.01, 4.9)).calls == []
    assert len(calls_of(StallMonitor(min_seconds=5), steps(51, 0.01, 0.01, 0.01, 5.1)).calls) == 2


def test_evaluations_have_a_usual_time_of_their_own() -> None:
    stream = steps(*[0.1] * 5)
    stream.append(at(Event.EVAL_START, 1, 5, 0, "eval"))
    stream += [at(Event.EVAL_BATCH_END, 1 + 4 * batch, 5, batch, "eval") for batch in range(1, 6)]
    stream += [at(Event.EVAL_BATCH_END, 60, 5, 6, "eval"), at(Event.EVAL_END, 60, 5, 6, "eval")]
    stream += [at(Event.BATCH_END, 64, 6)]
    calls = calls_of(StallMonitor(factor=8, min_seconds=2), stream).calls
    # 39 s are much for a batch of this evaluation, and 4 s for one of the training.
    assert [metrics["stall/seconds"] for _, _, metrics in calls] == [39.0, 4.0]


def test_the_evaluation_after_the_end_of_a_training_ends_with_nothing_expected() -> None:
    last = [at(Event.FIT_END, 3), at(Event.EVAL_BEFORE_ALL, 3), at(Event.EVAL_AFTER_ALL, 4)]
    assert calls_of(StallMonitor(min_seconds=1), [*steps(1, 1), *last, at(Event.FIT_START, 5000)]).calls == []
    within = [at(Event.EVAL_BEFORE_ALL, 3), at(Event.EVAL_AFTER_ALL, 4), at(Event.BATCH_END, 5000, 3)]
    assert len(calls_of(StallMonitor(min_seconds=1), [*steps(1, 1), *within]).calls) == 1


def test_a_consumer_that_goes_on_logs_what_it_would_have_logged() -> None:
    stream = [
        *steps(*[1] * 8, 11),
        at(Event.EVAL_START, 20, 9),
        at(Event.EVAL_END, 90, 9),
        at(Event.BATCH_END, 999, 10),
    ]
    goes_on_alike(lambda: StallMonitor(min_seconds=5), stream)


# -- while it waits ---------------------------------------------------------------------------------------------------


class Hanging(RunStream):
    def __init__(self, first: list[Snapshot], capsys: pytest.CaptureFixture[str], then: list[Snapshot]) -> None:
        self.said = ""
        self._first, self._capsys, self._then = first, capsys, then

    @property
    def commander(self) -> Callable[..., Outcome]:
        done = "stacks-1-1.txt: rank 0 is in f (a.py:1)"
        return lambda name, **options: Outcome(Command(name), None, None, done=done)

    async def __aiter__(self) -> AsyncGenerator[Snapshot, None]:
        for snapshot in self._first:
            yield snapshot
        deadline = time.monotonic() + 60
        while "hangs" not in self.said:
            assert time.monotonic() < deadline, "nothing was said"
            await asyncio.sleep(0.005)
            self.said += self._capsys.readouterr().err
        for snapshot in self._then:
            yield snapshot


@pytest.mark.slow
@pytest.mark.parametrize(
    ("last", "phase"),
    [
        (at(Event.BATCH_END, 0.6, 17), "after batch 17: in the dataloader, or in batch 18"),
        (at(Event.EVAL_BATCH_END, 0.6, 17, 3, "eval"), "in the evaluation of eval, after its batch 3"),
    ],
)
def test_it_says_once_what_the_training_hangs_in_and_keeps_it_with_the_run(
    last: Snapshot, phase: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost: dict[str, Any] = msgspec.to_builtins(Health("node17", gpus=[Gpu(3, xids=[79])]))
    measured = Snapshot.build(HEALTH, rank=FIRST_ACTOR, time_ns=last.time_ns, **lost)
    then = [measured, at(Event.BATCH_END, 0.61, 18), at(Event.FIT_END, 0.62, 18)]
    stream = Hanging([*steps(0.01, 0.01), last, measured], capsys, then)
    stream.run_dir, collector = tmp_path, Collector()
    Runner(stream, [StallMonitor(factor=1, min_seconds=0.05)], [collector]).run()
    hangs, goes_on = read_alerts(tmp_path)
    assert (hangs.status, goes_on.status, hangs.about, hangs.batch) == (FIRING, RESOLVED, goes_on.about, 17)
    assert hangs.text.endswith(
        f"the training hangs {phase}; GPU 3 of node17 has reported XID 79; stacks-1-1.txt: rank 0 is in f (a.py:1)"
    )
    [line] = stream.said.splitlines()
    assert line == hangs.text
    assert "the training continues, after" in capsys.readouterr().err
    # By the times of the events there was a stall before the last of the first ones, and none where nothing came.
    assert [row.step for row in collector.rows] == [17]


class Commanded(RunStream):
    def __init__(self, snapshots: list[Snapshot], commands: dict[float, str]) -> None:
        super().__init__(snapshots)
        self._answered = [
            Outcome(Command(name, ()), "batch_checkpoint", 1, None, 1_700_000_000_000_000_000 + round(seconds * 1e9))
            for seconds, name in commands.items()
        ]

    def answered(self) -> list[Outcome]:
        return self._answered


@pytest.mark.parametrize(
    ("commands", "stalls"),
    [
        ({}, [60.0]),
        ({3.5: "pause", 23.5: "resume", 30.0: "pause", 40.0: "resume"}, [30.0]),
    ],
)
def test_the_time_of_a_pause_is_no_stall(commands: dict[float, str], stalls: list[float]) -> None:
    monitor, collector = StallMonitor(factor=1, min_seconds=20), Collector()
    stream = Commanded(steps(1, 1, 1, 60, 1), commands)
    Runner(stream, [monitor], [collector]).run()
    assert [row.metrics["stall/seconds"] for row in collector.rows] == stalls


def test_a_pause_does_not_make_batches_long() -> None:
    # One batch, a pause of 100 s, and a stall of 30 s.
    monitor, collector = StallMonitor(factor=10, min_seconds=2), Collector()
    Runner(Commanded(steps(1, 101, 30), {1.5: "pause", 101.5: "resume"}), [monitor], [collector]).run()
    assert [row.metrics["stall/seconds"] for row in collector.rows] == [30.0]


class WithoutFiles(Hanging):
    @property
    def commander(self) -> Callable[..., Outcome]:
        def command(*_: Any, **__: Any) -> Outcome:
            raise OSError(24, "Too many open files")

        return command


def test_a_stall_is_reported_although_its_stacks_cannot_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    stream = WithoutFiles(steps(0.01, 0.01), capsys, [])
    Runner(stream, [StallMonitor(factor=1, min_seconds=0.05)]).run()
    assert "the training hangs after batch 2" in stream.said
    assert "no stacks: [Errno 24] Too many open files" in stream.said


class Paused(Hanging):
    """Is paused until it was looked at many times, and hangs then."""

    looks = 0

    def answered(self) -> list[Outcome]:
        self.looks += 1
        names = ["pause"] if self.looks <= 40 else ["pause", "resume"]
        if self.looks <= 40:
            self.said += self._capsys.readouterr().err
            assert not self.said
        return [Outcome(Command(name, ()), "batch_checkpoint", 1) for name in names]


def test_a_training_that_stands_still_on_request_does_not_hang(capsys: pytest.CaptureFixture[str]) -> None:
    stream = Paused(steps(0.01, 0.01), capsys, [])
    monitor = StallMonitor(factor=1, min_seconds=0.02)
    Runner(stream, [monitor]).run()
    assert stream.looks > 40
    assert "the training hangs" in stream.said


class Slow(Callback):
    def batch_end(self, state: Snapshot, logger: Logger) -> None:
        time.sleep(0.15)


def test_a_slow_neighbour_is_no_stall(capsys: pytest.CaptureFixture[str]) -> None:
    class Breathing:
        async def __aiter__(self) -> AsyncIterator[Snapshot]:
            for snapshot in steps(*[0.01] * 6):
                yield snapshot
                await asyncio.sleep(0)

    Runner(Breathing(), [StallMonitor(factor=1, min_seconds=0.1), Slow()]).run()
    assert capsys.readouterr().err == ""


class Lingering(RunStream):
    def __init__(self, snapshots: list[Snapshot]) -> None:
        self._snapshots = snapshots

    async def __aiter__(self) -> AsyncGenerator[Snapshot, None]:
        for snapshot in self._snapshots:
            yield snapshot
        await asyncio.sleep(0.2)


class Live(Lingering):
    commander = Hanging.commander


END = at(Event.FIT_END, 0.03, 2)


@pytest.mark.parametrize(("kind", "last"), [(Lingering, []), (Live, [END])])
def test_a_replay_that_stands_still_and_a_training_that_is_over_do_not_hang(
    kind: type[Lingering], last: list[Snapshot], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = kind([*steps(0.01, 0.01), *last])
    stream.run_dir = tmp_path
    Runner(stream, [StallMonitor(factor=1, min_seconds=0.05)]).run()
    assert "the training hangs" not in capsys.readouterr().err
