"""All ranks of a run on many hosts side by side: values, who stands out, and what it takes."""

import msgspec
import numpy as np
import pytest
from many_hosts import many_hosts

from offloop.bus.protocol.host_windows import ARRIVAL, LOSS, MEMORY, STEP, THROUGHPUT, summarize
from offloop.bus.types.health import Gpu, Health
from offloop.consumers.dashboard.view.ranks import FirstNan, RankTiming, Waiting


def ranks_of(count: int, **options: object) -> RankTiming:
    ranks = RankTiming()
    for window in range(1, count + 1):
        ranks.add_windows(many_hosts(16, 8, window, **options), now=float(window))  # type: ignore[arg-type]
    return ranks


def test_every_rank_of_every_host_has_its_newest_value_and_the_slowest_come_first() -> None:
    ranks = RankTiming()
    # Whichever host comes first: rows are in the order of their ranks.
    ranks.add_windows(reversed(many_hosts(16, 8, slow=77)), now=0.0)
    shown = ranks.map()
    assert [host.name for host in shown.hosts] == [f"node{number:03}" for number in range(16)]
    assert shown.ranks == tuple(range(128))
    assert shown.world_size == 128
    assert shown.quantities[:6] == [STEP, ARRIVAL, MEMORY, LOSS, THROUGHPUT, "gradient_norm"]
    assert shown.values(MEMORY)[78] == (60 << 30) + (6 << 28)
    slowest = shown.slowest(ARRIVAL, 3)
    assert slowest[0] == 77
    assert list(shown.values(ARRIVAL)[slowest]) == sorted(shown.values(ARRIVAL)[slowest], reverse=True)
    assert shown.values(ARRIVAL).min() == 0
    least = shown.slowest(THROUGHPUT, 1)[0]
    assert shown.values(THROUGHPUT)[least] == shown.values(THROUGHPUT).min()
    row = shown.row(77)
    assert (row.host, row.rank, row.batch, row.behind) == ("node009", 77, 4, 0)
    assert row.late == pytest.approx(0.04, abs=0.01)


def test_the_rank_that_the_others_wait_for_is_named_once_it_is_late_often_enough() -> None:
    assert ranks_of(4, slow=77).map().waiting is None
    waiting = ranks_of(6, slow=77).map().waiting
    assert isinstance(waiting, Waiting)
    assert waiting.cell == 77
    assert waiting.seconds == pytest.approx(0.04, abs=0.005)
    assert ranks_of(6, slow=77).map().row(77).last_share == 1
    assert waiting.cause is None
    ranks = ranks_of(6, slow=77)
    measured = Health("node009", gpus=[Gpu(5, ranks=[77], reasons=["heat\x1b"])])
    ranks.add_windows([msgspec.structs.replace(many_hosts(16, 8, 7, slow=77)[9], health=measured)])
    [(_, text)] = ranks.map().facts()
    assert text.endswith(" ms a batch; GPU 5 of node009 is throttled by heat\\x1b")
    # One of many is always the last: where that costs little, it is not worth a word.
    assert ranks_of(20).map().waiting is None


def test_late_ranks_silent_hosts_and_the_first_nan_are_known() -> None:
    ranks = ranks_of(3, late=(9,), nan=17)
    ranks.add_windows(many_hosts(16, 8, 4, without=(5,)), now=100.0)
    shown = ranks.map(is_live=True, now=101.0)
    assert [(host.name, host.batch, host.silent) for host in shown.silent] == [("node005", 12, 98.0)]
    assert shown.first_nan == FirstNan(LOSS, 4, 17, "node002")
    assert shown.late == ()
    assert ranks_of(3, late=(9,)).map().late == (9,)
    assert ranks_of(3, late=(9,)).map().row(9).behind == 1
    # All of them end with the run.
    assert ranks.map(is_live=False, now=1000.0).silent == []
    # What was sent before comes late, or twice: nothing goes back.
    ranks.add_windows(many_hosts(16, 8, 2), now=102.0)
    assert ranks.map().row(0).batch == 16


def test_colours_stand_for_what_the_ranks_are_apart_and_neither_for_noise_nor_for_one_that_is_far_off() -> None:
    ranks = ranks_of(1, slow=77)
    shown = ranks.map()
    low, high = shown.range(ARRIVAL)
    assert low == 0
    assert 0.004 < high <= shown.values(ARRIVAL)[77]
    low, high = shown.range(STEP)
    assert high - low >= 0.0499 * shown.median(STEP)
    # Of all ranks only one has a value, or none.
    (window, *_) = many_hosts(1, 3)
    for values in ([[1.0], [], []], [[], [], []], [[0.0], [0.0], [0.0]], [[1e300], [1.0], [float("inf")]]):
        odd = msgspec.structs.replace(window, quantities={LOSS: summarize(LOSS, window.ranks, values)})
        one = RankTiming()
        one.add_windows([odd])
        low, high = one.map().range(LOSS)
        assert low < high
        one.map().slowest(LOSS, 2)
        assert one.map().median(LOSS) == one.map().median(LOSS) or not np.isfinite(one.map().values(LOSS)).any()
