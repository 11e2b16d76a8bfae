"""A host's windows say what a calculation over all of its batches says."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offloop.bus import Event, Snapshot
from offloop.bus.hosts.windows import LATE_NS, HostWindows
from offloop.bus.protocol.host_windows import decode_window, encode_window
from offloop.bus.types.timestamp import Timestamp

LOSSES = st.floats(-100, 100) | st.sampled_from([math.nan, math.inf])


def batch_end(rank, batch, time_ns, **fields):
    return Snapshot.build(Event.BATCH_END, rank=rank, time_ns=time_ns, timestamp=Timestamp(batch=batch), **fields)


@st.composite
def trainings(draw):
    """Draw the ends of batches of some ranks in the order of their times; some ranks lag, or stop."""
    ends = []
    for rank in draw(st.lists(st.integers(0, 99), min_size=1, max_size=4, unique=True)):
        now, step = draw(st.integers(0, 10**9)), draw(st.sampled_from([3 * 10**6, 2 * 10**8, 7 * 10**8, 3 * 10**9]))
        for batch in range(1, draw(st.integers(1, 40)) + 1):
            now += step + draw(st.integers(0, step // 10))
            ends.append((now, rank, batch, draw(LOSSES)))
    return sorted(ends, key=lambda end: end[0])


def windows_of(ends, count=None, after=None):
    ranks = {rank for _, rank, *_ in ends}
    made = HostWindows("h", 1, ranks, 128, count or len(ranks), after)
    found = []
    for now, rank, batch, loss in ends:
        found += made.take(batch_end(rank, batch, now, loss=loss, batch_size=8))
    return found + made.finish()


def same(one, other):
    return one == other or (math.isnan(one) and math.isnan(other)) or math.isclose(one, other, rel_tol=1e-9)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(trainings())
def test_a_window_covers_all_batches_that_arrived_before_it_closed(ends):
    ranks = sorted({rank for _, rank, *_ in ends})
    windows = windows_of(ends)
    began = ends[0][2]
    for window in windows:
        assert window.ranks == tuple(ranks)
        assert window.first == began
        began = window.last + 1
        # What had come when it was closed.
        there = {
            (rank, batch): (now, loss) for now, rank, batch, loss in ends if batch <= window.batches[ranks.index(rank)]
        }
        assert window.late == tuple(rank for rank in ranks if (rank, window.last) not in there)
        inside = {key: value for key, value in there.items() if window.first <= key[1] <= window.last}
        losses = {key: loss for key, (_, loss) in inside.items()}
        steps = {
            (rank, batch): (now - there[rank, batch - 1][0]) / 1e9
            for (rank, batch), (now, _) in inside.items()
            if (rank, batch - 1) in there
        }
        for name, values in {"loss": losses, "step": steps}.items():
            if not values:
                assert name not in window.quantities
                continue
            said = window.quantities[name]
            finite = {key: value for key, value in values.items() if math.isfinite(value)}
            of_rank = [[value for (one, _), value in finite.items() if one == rank] for rank in ranks]
            means = [sum(some) / len(some) if some else math.nan for some in of_rank]
            assert all(map(same, said.ranks, means))
            assert same(said.least, min(finite.values(), default=math.nan))
            assert same(said.greatest, max(finite.values(), default=math.nan))
            assert said.count == len(values)
            not_finite = [(batch, rank) for (rank, batch), value in values.items() if not math.isfinite(value)]
            assert said.first_nan == min(not_finite, default=None)
            if finite:
                worst = ranks.index(said.worst)
                assert means[worst] == max(mean for mean in means if not math.isnan(mean))
        assert decode_window(encode_window(window)).batches == window.batches
    assert began == max(batch for _, _, batch, _ in ends) + 1


def test_a_window_ends_with_the_same_batches_on_all_hosts_about_once_a_second():
    for step, last in ((2 * 10**8, [8, 16, 24, 32]), (10**7, [128]), (3 * 10**9, list(range(2, 41)))):
        for first in (0, 5_000_000):
            ends = [(first + batch * step + rank, rank, batch, 1.0) for batch in range(1, 151) for rank in (3, 4)]
            made = [window.last for window in windows_of(ends)]
            assert made[: len(last)] == last


def asked_over(steps):
    """Of how many batches windows are said to be, each time that it becomes another number."""
    made = HostWindows("h", 1, (0,), 4, 1)
    now, found = 0, []
    for batch, step in enumerate(steps, 1):
        now += step
        made.take(batch_end(0, batch, now))
        if made.batches is not None and made.batches != (found[-1] if found else None):
            found.append(made.batches)
    return found


def test_the_window_length_follows_the_speed_and_ignores_noise_and_evaluations():
    slow, fast = 3 * 10**8, 2 * 10**7
    assert asked_over([slow] * 11) == []
    assert asked_over([slow] * 60) == [4]
    # Each demand that changes takes effect between two batches, and costs the phases of one of them.
    assert asked_over([slow] * 60 + [fast] * 640) == [4, 64]
    assert asked_over(([slow] * 19 + [20 * 10**9]) * 20) == [4]
    # Two of a window's batches take less than a second, then more, and so on.
    assert asked_over(([499 * 10**6] * 4 + [501 * 10**6] * 2) * 40) in ([2], [4])
    assert asked_over([3 * 10**9] * 9) == [1]


def test_a_stopped_rank_is_late_and_delays_windows_only_for_a_while():
    ends = [(batch * 10**9, rank, batch, 1.0) for batch in range(1, 21) for rank in (0, 1) if rank == 0 or batch < 5]
    made = HostWindows("h", 1, (), 4, 2)
    closed_at = {}
    for now, rank, batch, loss in ends:
        for window in made.take(batch_end(rank, batch, now, loss=loss)):
            closed_at[window.last] = now, window.late
    assert closed_at[4] == (4 * 10**9, ())
    assert closed_at[8] == (8 * 10**9 + LATE_NS, (1,))
    # Nothing comes any more from anyone.
    assert [window.last for window in made.close_late(21 * 10**9)] == [16]
    assert [window.late for window in made.close_late(40 * 10**9)] == [(1,)] * 4


def test_windows_continue_after_the_last_earlier_one():
    ends = [(batch * 3 * 10**8 + rank, rank, batch, float(batch)) for batch in range(1, 60) for rank in (0, 1)]
    whole = windows_of(ends)
    for place in range(1, len(whole)):
        assert windows_of(ends, after=whole[place - 1].last) == whole[place:]


def test_windows_have_phases_memory_and_norms_where_batches_have_them():
    made = HostWindows("h", 1, (), 4, 2)
    found = []
    for batch in (1, 2):
        for rank in (6, 7):
            now = batch * 2 * 10**9
            spans = [["data", 0, 10**8], ["forward", 10**8, 10**8], ["backward", 10**9 + rank * 10**8, 10**8]]
            phases = {"began": now - 2 * 10**9, "spans": spans, "device": False}
            fields = {"phases": phases, "gradient_norm": float(rank), "batch_size": 10 * rank}
            if rank == 6:
                fields["memory_stats"] = {"reserved_bytes.all.current": 64}
            found += made.take(batch_end(rank, batch, now, **fields))
    (window,) = found
    said = window.quantities
    assert [round(value, 9) for value in said["arrival"].ranks] == [-0.4, -0.3]
    assert said["arrival"].worst == 7
    assert said["phase/data"].mean == 0.1
    assert said["memory"].ranks[0] == 64.0
    assert said["gradient_norm"].greatest == 7.0
    assert said["throughput"].ranks == (30.0, 35.0)
    assert said["throughput"].worst == 6
