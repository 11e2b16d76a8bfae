"""Where the time of a step goes: the figures, the verdicts, and which rank the others wait for."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import msgspec
import pytest
from callback_calls import goes_on_alike
from consumers_stream import Collector
from hypothesis import given
from hypothesis import strategies as st
from many_hosts import many_hosts
from timeline_stream import RankStream

from offloop.bus.protocol.host_windows import HostWindow
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.protocol.stream import RunStream
from offloop.bus.types.actor import FIRST_ACTOR
from offloop.bus.types.event import Event
from offloop.bus.types.health import HEALTH, Gpu, Health
from offloop.consumers.api.logger import Text
from offloop.consumers.callbacks.arrivals import Arrival, last_to_arrive
from offloop.consumers.callbacks.phases import Phases
from offloop.consumers.runner import dispatcher
from offloop.consumers.runner.runner import run_session


class Heard(Collector):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def log_text(self, entry: Text, state: Snapshot) -> None:
        self.texts.append(f"{entry.step} {entry.name}: {entry.text}")


def logged(stream: Iterable[Snapshot], **options: Any) -> Heard:
    heard = Heard()
    snapshots = list(stream)
    options = {"every": 1, "window": 4, **options}
    _, statistics = run_session(lambda _, __: snapshots, [Phases(**options)], [heard])  # type: ignore[arg-type, return-value]
    assert statistics.problems == []
    return heard


def last(heard: Heard) -> dict[str, float]:
    *_, figures = [row.metrics for row in heard.rows if "time/phase/data" in row.metrics]
    return {
        name.removeprefix("time/phase/"): round(float(value) * 1e3, 6)
        for name, value in figures.items()
        if name != "time/phase/verdict"
    }


def verdicts(heard: Heard) -> list[str]:
    told = [str(row.metrics["time/phase/verdict"]) for row in heard.rows if "time/phase/verdict" in row.metrics]
    assert [text.partition("verdict: ")[2] for text in heard.texts] == told
    return told


def steps(stream: RankStream, count: int, *spans: tuple[str, float], rest: float = 1.0) -> list[Snapshot]:
    return [stream.batch(spans, rest) for _ in range(count)]


def started() -> tuple[RankStream, list[Snapshot]]:
    stream = RankStream()
    return stream, [stream.event(Event.FIT_START)]


# -- figures ----------------------------------------------------------------------------------------------------------


def test_the_figures_are_seconds_per_batch_with_microbatches_added_up() -> None:
    stream, events = started()
    passes = [("forward", 3.0), ("loss", 0.5), ("backward", 4.0)] * 2
    events += steps(stream, 2, ("data", 2), *passes, ("optimizer", 1), ("publishing", 0.25), rest=5)
    events += steps(stream, 2, ("data", 6), *passes, ("optimizer", 1), ("publishing", 0.25), rest=5)
    assert last(logged(events)) == {
        "data": 4, "forward": 6, "loss": 1, "backward": 8, "optimizer": 1, "publishing": 0.25, "evaluation": 0,
        "other": 5,
    }  # fmt: skip


def test_batches_between_those_that_are_measured_count_for_nothing_but_evaluations() -> None:
    stream, events = started()
    for number in range(1, 13):
        (snapshot,) = steps(stream, 1, ("forward", 4.0 if number % 4 == 0 else 400.0))
        events.append(snapshot if number % 4 == 0 else snapshot.without({"phases"}))
        if number % 6 == 0:
            events += [stream.event(Event.EVAL_BEFORE_ALL), stream.event(Event.EVAL_AFTER_ALL, 60)]
    events += steps(stream, 4, ("forward", 4))
    heard = logged(events, every=4)
    assert [row.step for row in heard.rows] == [4, 8, 12, 16]
    assert [row.metrics["time/phase/evaluation"] for row in heard.rows] == [0, 0.01, 0.01, 0.01]
    assert last(heard)["forward"] == 4


def test_an_evaluation_is_shared_by_the_batches_since_the_one_before() -> None:
    stream, events = started()
    # One before any batch, which does not come again, and two evaluations after the same batch.
    events += [stream.event(Event.EVAL_BEFORE_ALL), stream.event(Event.EVAL_AFTER_ALL, 1000)]
    events += steps(stream, 4, ("forward", 1))
    for milliseconds in (30, 10):
        events += [stream.event(Event.EVAL_BEFORE_ALL), stream.event(Event.EVAL_AFTER_ALL, milliseconds)]
    events += steps(stream, 2, ("forward", 1))
    assert last(logged(events))["evaluation"] == 10
    # None has come for twice as long.
    events += steps(stream, 6, ("forward", 1))
    assert last(logged(events))["evaluation"] == 5


# -- verdicts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spans", "rest", "text"),
    [
        ([("data", 63), ("backward", 36)], 1, "input-bound: 63 % of the step waits for data"),
        ([("forward", 50), ("backward", 41), ("data", 8)], 1, "compute-bound: 91 % of the step computes"),
        ([("forward", 59), ("publishing", 40)], 1, "publishing-bound: 40 % of the step is publishing"),
        ([("forward", 20)], 80, "bound by other work: 80 % of the step is in none of its phases"),
    ],
)
def test_what_dominates_is_named(spans: list[tuple[str, float]], rest: float, text: str) -> None:
    stream, events = started()
    assert verdicts(logged(events + steps(stream, 8, *spans, rest=rest))) == [text]


def test_a_verdict_is_told_when_it_changes_and_not_when_its_numbers_do() -> None:
    stream, events = started()
    for waits in (40, 50, 45, 28, 26, 27, 2, 2, 2, 2, 33, 33, 33, 33):
        events += steps(stream, 1, ("data", waits), ("forward", 99 - waits))
    heard = logged(events, window=2)
    # 26 % alone would be no verdict; beside one it is no reason for another.
    assert verdicts(heard) == [
        "input-bound: 40 % of the step waits for data",
        "compute-bound: 84 % of the step computes",
        "input-bound: 33 % of the step waits for data",
    ]
    assert heard.texts[0] == "1 time/phase/verdict: input-bound: 40 % of the step waits for data"


# -- ranks ------------------------------------------------------------------------------------------------------------


def ranks_of(count: int, waits: Sequence[float], offsets: Sequence[int] | None = None) -> list[Snapshot]:
    """Batches of several ranks that wait for data for so long, and then within their backward passes for the last."""
    made = []
    for rank, wait in enumerate(waits):
        stream = RankStream(rank, len(waits), offsets[rank] if offsets else 0)
        backward = 20 + max(waits) - wait
        spans = [("data", wait), ("forward", 5.0), ("backward", backward)]
        made.append([stream.event(Event.FIT_START), *steps(stream, count, *spans)])
    return [snapshot for at_once in zip(*made, strict=True) for snapshot in at_once]


def test_a_straggler_is_named_with_what_it_costs_and_why() -> None:
    heard = logged(ranks_of(10, [1, 1, 13], [0, 10**15, -(10**15)]), window=10)
    assert verdicts(heard) == [
        "straggling rank 2: arrived last in 5 of 5 batches, the others wait 12 ms; it takes 12 ms longer for data"
    ]
    assert last(heard)["data"] == 5


def health(stream: Sequence[Snapshot], after: int, *gpus: Gpu) -> list[Snapshot]:
    """The stream with a measurement of its host behind so many events."""
    fields: dict[str, Any] = msgspec.to_builtins(Health("node17", gpus=list(gpus)))
    measured = Snapshot.build(HEALTH, rank=FIRST_ACTOR, time_ns=stream[after - 1].time_ns, **fields)
    return [*stream[:after], measured, *stream[after:]]


def test_a_stragglers_cause_is_named_where_the_health_of_its_host_shows_it() -> None:
    stream = ranks_of(10, [1, 1, 13])
    cold, hot = Gpu(1, ranks=[1], reasons=["heat"]), Gpu(3, ranks=[2], reasons=["heat"])
    expected = (
        "straggling rank 2: arrived last in 5 of 5 batches, the others wait 12 ms; it takes 12 ms longer for data"
    )
    caused = expected + "; GPU 3 of node17 is throttled by heat"
    assert verdicts(logged(health(stream, 3, cold), window=10)) == [expected]
    assert verdicts(logged(health(stream, 3, hot), window=10)) == [caused]
    # It is named as soon as it is known.
    late = verdicts(logged(health(stream, 27, hot), window=10))
    assert (late[0], late[1].endswith("GPU 3 of node17 is throttled by heat"), len(late)) == (expected, True, 2)
    goes_on_alike(lambda: Phases(every=1, window=10), health(stream, 3, hot), 4)


class WithWindows(RunStream):
    """A stream with what hosts say of their ranks: of so many windows one before each further batch."""

    def __init__(self, snapshots: Sequence[Snapshot], windows: Iterable[Sequence[HostWindow]]) -> None:
        super().__init__(self._in_turn(snapshots))
        self._windows = iter(windows)
        self._ready: list[HostWindow] = []

    async def _in_turn(self, snapshots: Sequence[Snapshot]) -> AsyncIterator[Snapshot]:
        for snapshot in snapshots:
            self._ready += next(self._windows, ())
            # For longer than what looks for windows rests.
            await asyncio.sleep(0.02)
            yield snapshot

    def host_windows(self) -> list[HostWindow]:
        ready, self._ready = self._ready, []
        return ready


def heard_beside(windows: Iterable[Sequence[HostWindow]]) -> list[str]:
    stream, heard = RankStream(0, 64), Heard()
    events = [stream.event(Event.FIT_START), *steps(stream, 4, ("data", 1), ("forward", 80), ("backward", 19))]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dispatcher, "_WINDOW_SECONDS", 0.005)
        run_session(lambda _, __: WithWindows(events, windows), [Phases(every=1, window=4)], [heard])
    return verdicts(heard)


def test_a_straggler_is_sought_over_all_hosts_where_they_say_who_is_late() -> None:
    told = heard_beside([many_hosts(8, 8, number, slow=59) for number in range(1, 5)])[-1]
    assert re.fullmatch(r"straggling host node007, rank 59: arrives last, the others wait (39|40)\S* ms", told)
    measured = Health("node007", gpus=[Gpu(3, ranks=[59], xids=[79])])
    windows = [
        [msgspec.structs.replace(one, health=measured if one.host == "node007" else None) for one in heard]
        for heard in (many_hosts(8, 8, number, slow=59) for number in range(1, 5))
    ]
    assert heard_beside(windows)[-1].endswith(" ms; GPU 3 of node007 has reported XID 79")
    # A host of which nothing comes is not waited for.
    windows = [one for number in range(1, 15) for one in many_hosts(8, 8, number, slow=59, without=(3,))]
    assert heard_beside([windows])[-1].startswith("straggling host node007, rank 59: ")
    # Windows that the slow host has not made say nothing of it.
    windows = [
        [*many_hosts(8, 8, number - 1, slow=3, without=(7,)), *many_hosts(8, 8, number, slow=59)]
        for number in range(2, 10, 2)
    ]
    assert heard_beside(windows)[-1].startswith("straggling host node007, rank 59: ")
    # Without windows only the ranks are compared whose events come.
    assert heard_beside([]) == ["compute-bound: 98 % of the step computes"]


def test_a_rank_that_says_nothing_any_more_holds_nothing_up_for_long() -> None:
    alone = [one for one in ranks_of(100, [2, 4]) if one.rank == 0 or one.timestamp.batch <= 10]
    heard = logged(alone)
    assert [row.step for row in heard.rows if "time/phase/data" in row.metrics] == list(range(1, 101))
    assert last(heard)["data"] == 2
    told_at = {row.step: row.time for row in heard.rows}
    assert told_at[11] < told_at[60] < told_at[100]


ARRIVALS = st.dictionaries(
    st.integers(0, 9),
    st.builds(
        Arrival,
        st.integers(0, 10**9),
        st.lists(st.integers(10**9, 2 * 10**9), min_size=1, max_size=4).map(lambda at: tuple(sorted(at))),
        st.just(3 * 10**9),
    ),
    max_size=6,
)


@given(arrivals=ARRIVALS.filter(lambda one: len(one) > 1), data=st.data())
def test_a_rank_that_is_held_up_for_long_is_last_and_a_missing_one_changes_nothing(
    arrivals: dict[int, Arrival], data: st.DataObject
) -> None:
    rank = data.draw(st.sampled_from(sorted(arrivals)))
    late = 10**11
    held_up = arrivals[rank]
    arrivals[rank] = Arrival((held_up.forward or 0) + late, tuple(at + late for at in held_up.backward), held_up.ended)
    found = last_to_arrive(arrivals)
    assert found is not None
    assert found[0] == rank
    assert late - 2 * 10**9 <= found[1] <= late + 2 * 10**9
    missing = data.draw(st.sampled_from(sorted(set(arrivals) - {rank})))
    without = last_to_arrive({other: one for other, one in arrivals.items() if other != missing})
    assert without == (None if len(arrivals) == 2 else (rank, without[1] if without else 0))


# -- options and going on ---------------------------------------------------------------------------------------------


def test_going_on_from_what_was_kept_logs_the_same() -> None:
    stream = ranks_of(12, [1, 13])
    for rank, batch in ((0, 4), (0, 8)):
        place = next(n for n, one in enumerate(stream) if one.rank == rank and one.timestamp.batch == batch)
        clock = RankStream()
        clock.now = stream[place].time_ns
        before, after = clock.event(Event.EVAL_BEFORE_ALL), clock.event(Event.EVAL_AFTER_ALL, 30)
        stream[place + 2 : place + 2] = [before, after]

    goes_on_alike(lambda: Phases(1, 4), stream, step=3)
