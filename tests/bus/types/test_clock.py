import time

from offloop.bus.types.timestamp import wall_clock


def test_the_clock_counts_nanoseconds_since_1970():
    before, now, after = time.time_ns(), wall_clock()(), time.time_ns()
    a_second = 1_000_000_000
    assert before - a_second < now < after + a_second


def test_a_change_of_the_systems_time_does_not_reach_the_clock(monkeypatch):
    clock = wall_clock()
    before = clock()
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    assert before <= clock() < before + 60 * 1_000_000_000
