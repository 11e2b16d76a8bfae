"""Replays in this process: which part of a recording, and at which pace."""

import asyncio
import itertools
import math
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_streams import BEGAN, SECOND, record

from offloop.bus.errors import ConfigurationError, InvalidTimeError
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.recording.recording import Recording
from offloop.bus.recording.replay import Pace, Replay
from offloop.bus.recording.window import SETUP_EVENTS, Window, compare, parse_bound
from offloop.bus.types.event import Event
from offloop.bus.types.timestamp import Timestamp


def replayed(replay: Replay) -> list[Snapshot]:
    async def gather() -> list[Snapshot]:
        return [snapshot async for snapshot in replay]

    return asyncio.run(gather())


def told(snapshots: Iterable[Snapshot]) -> list[str]:
    """Everything in them, so that two lists are equal only if they are so bit for bit, NaN included."""
    return [repr((one.event, one.run_name, one.rank, one._body)) for one in snapshots]


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay")
    record(folder / "one.mcap")
    record(folder / "two.mcap", ranks=2, inner=True, status="failed")
    record(folder / "holes.mcap", without=[5, 6, 9])
    return folder


# -- which part -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["one", "two", "holes"])
@pytest.mark.parametrize("rate", [None, 1e6])
def test_a_replay_is_the_recording_bit_for_bit(recordings: Path, name: str, rate: float | None) -> None:
    recording = Recording(recordings / f"{name}.mcap")
    replay = Replay(Recording(recordings / f"{name}.mcap"), rate)
    assert told(replayed(replay)) == told(recording)
    assert (replay.run_name, replay.attempt, replay.path) == ("r", 1, recording.path)
    assert (replay.ending, replay.gaps, replay.damage) == (recording.ending, recording.gaps, None)
    assert replay.given == len(list(recording))


def test_a_share_of_the_training_needs_its_planned_duration(tmp_path: Path) -> None:
    states = [Snapshot.build(Event.BATCH_END, timestamp=Timestamp(batch=batch)) for batch in (0, 1)]
    half = parse_bound("0.5dur")
    assert compare(states[0], half) == -1
    with pytest.raises(ConfigurationError, match=r"^0\.5dur is a share of max_duration"):
        compare(states[1], half)
    share = [Snapshot.build(Event.BATCH_END, timestamp=Timestamp(batch=n), max_duration="30ba") for n in (2, 3, 4)]
    assert [compare(state, parse_bound("0.1dur")) for state in share] == [-1, 0, 1]


def test_invalid_moments_and_rates_are_refused(recordings: Path) -> None:
    for text in ("", "5", "-1ep", "1.5ba", "+1s", "2026-11-01", "nandur", "9" * 99):
        with pytest.raises(InvalidTimeError):
            parse_bound(text)
    for rate in (0, -1, math.nan):
        with pytest.raises(ConfigurationError, match="is not a rate: 1 replays as fast as it was, 10 ten"):
            Replay(Recording(recordings / "one.mcap"), rate)


moments = st.one_of(
    st.integers(0, 14).map(lambda number: f"{number}ba"),
    st.integers(0, 4).map(lambda number: f"{number}ep"),
    st.integers(0, 100).map(lambda number: f"{number}sp"),
    st.integers(0, 4).map(lambda number: f"{number}sec"),
    st.integers(0, 12).map(lambda number: f"{number / 12}dur"),
)


@settings(max_examples=100, deadline=None)
@given(start=st.none() | moments, until=st.none() | moments, name=st.sampled_from(["one", "two", "holes"]))
def test_a_part_has_exactly_the_events_in_its_bounds(
    recordings: Path, start: str | None, until: str | None, name: str
) -> None:
    recording = Recording(recordings / f"{name}.mcap")
    everything = list(recording)

    def reached(one: Snapshot, unit: str) -> Fraction:
        _, epoch, batch, sample, *_, in_epoch, _, _, wct, _, _, _ = one._body.timestamp
        # Within an epoch the training is past its beginning, and far from the next quarter of one.
        epochs = Fraction(epoch) + (Fraction(1, 100) if in_epoch else 0)
        units = {"ba": batch, "ep": epochs, "sp": sample, "sec": Fraction(wct, 10**6), "dur": epochs / 3}
        return Fraction(units[unit])

    def side(one: Snapshot, text: str) -> int:
        number = text.strip("abcdefghijklmnopqrstuvwxyz")
        has, limit = reached(one, text.strip("0123456789.")), Fraction(number).limit_denominator(1000)
        return (has > limit) - (has < limit)

    def is_before_the_end(one: Snapshot) -> bool:
        return until is None or side(one, until) <= 0

    def is_in(one: Snapshot) -> bool:
        return is_before_the_end(one) and (start is None or side(one, start) >= 0)

    part = [one for one in everything if is_in(one)]
    expected = [
        one for one in everything if is_in(one) or (part and one.event in SETUP_EVENTS and is_before_the_end(one))
    ]
    assert told(replayed(Replay(recording, start=start, until=until))) == told(expected)


def test_commands_of_a_part_are_replayed(recordings: Path) -> None:
    recording = Recording(recordings / "two.mcap")
    told_of = [("1ep", None), (None, "4ba")]
    silent_about = [("2ep", None), (None, "3ba")]
    for start, until in (*told_of, *silent_about):
        count = int((start, until) in told_of)
        replay = Replay(recording, start=start, until=until)
        assert replay.answered() == ()
        for _ in range(2):
            replayed(replay)
            assert [str(one.command) for one in replay.answered()] == ["set lr 0.1"] * count
        assert replay.answered() == tuple(recording.read_commands())[:count]


def test_a_rank_that_lags_reaches_the_end_of_the_part() -> None:
    window = Window(None, parse_bound("2ba"))
    order = [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (0, 4), (1, 3)]
    states = [Snapshot.build(Event.BATCH_END, rank=r, timestamp=Timestamp(batch=n), world_size=2) for r, n in order]
    seen = [(window.takes(state), window.over) for state in states]
    assert [is_in for is_in, _ in seen] == [True, True, False, True, True, False, False]
    assert [over for _, over in seen] == [False] * 6 + [True]


def test_handled_events_are_skipped_without_waiting(recordings: Path) -> None:
    *_, third, second, last = Recording(recordings / "one.mcap")
    pace = Noted()
    replay = Replay(Recording(recordings / "one.mcap"), pace, after={0: (third.seq, third.base_seq)})
    assert told(replayed(replay)) == told([second, last])
    assert pace.asked == [second.time_ns, last.time_ns]


# -- at which pace ----------------------------------------------------------------------------------------------------


class Clock:
    """A clock that stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@given(gaps=st.lists(st.integers(0, 10 * SECOND), min_size=1, max_size=20), rate=st.sampled_from([0.25, 1.0, 2.0, 8.0]))
def test_distances_between_events_are_divided_by_the_rate(gaps: list[int], rate: float) -> None:
    clock = Clock()
    pace = Pace(rate, clock=clock)
    times = list(itertools.accumulate(gaps, initial=BEGAN))
    for at in times:
        left = pace.due_in(at)
        assert left is not None
        clock.now += left
        assert pace.due_in(at) == pytest.approx(0, abs=1e-6)
        assert clock.now - 100 == pytest.approx((at - BEGAN) / 1e9 / rate, abs=1e-5)


def test_late_events_are_due_at_once_and_delay_no_others() -> None:
    clock = Clock()
    pace = Pace(1, clock=clock)
    assert pace.due_in(BEGAN) == 0
    clock.now += 60
    assert [pace.due_in(BEGAN + at * SECOND) for at in (1, 30, 60, 61)] == [0, 0, 0, 1]


class Noted(Pace):
    """Notes the times that are waited for, and waits for none."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    async def until(self, at: int) -> None:
        self.asked.append(at)


def test_a_replay_waits_for_the_recorded_times(recordings: Path) -> None:
    pace = Noted()
    seen = replayed(Replay(Recording(recordings / "one.mcap"), pace, start="2ep"))
    # What comes first is not waited for: it would be an hour, in a replay that begins after one.
    assert pace.asked == [one.time_ns for one in seen[2:]]


async def test_a_command_is_replayed_at_its_time_and_not_with_the_next_event(recordings: Path) -> None:
    recording = Recording(recordings / "one.mcap")
    first, _, _ = recording.snapshots([Event.EPOCH_START])
    (told,) = recording.read_commands()
    assert told.time_ns is not None

    clock = Clock()
    pace = Pace(1, clock=clock)
    replay = Replay(recording, pace, events=[Event.EPOCH_START])
    snapshots = aiter(replay)
    await anext(snapshots)
    later = asyncio.create_task(anext(snapshots))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    counts = [len(replay.answered())]
    clock.now += (told.time_ns - first.time_ns) / 1e9 - 1e-7
    counts.append(len(replay.answered()))
    clock.now += 2e-7
    counts.append(len(replay.answered()))
    assert not later.done()
    later.cancel()
    assert counts == [0, 0, 1]
