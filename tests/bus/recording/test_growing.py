"""What a bridge knows of a file that grows."""

import tracemalloc

import pytest

from offloop.bus.recording.growing import Backlog


@pytest.mark.parametrize("parts", [1, 9_999, 10_000, 10_001, 10_002, 300_000])
def test_a_backlog_of_days_takes_little_memory_and_is_counted_closely(parts: int) -> None:
    tracemalloc.start()
    backlog = Backlog()
    for number in range(1, parts + 1):
        backlog.add(100 * number, 7 * number)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4e6
    assert backlog.drop(0) == 7 * parts
    for copied in sorted({0, 1, parts // 3, parts // 2, parts - 1, parts}):
        behind = 7 * (parts - copied)
        assert behind <= backlog.drop(100 * copied) <= behind + 7 * parts / 2_500
    assert backlog.drop(100 * parts) == 0
    assert backlog.seconds == 0.0
