import copy
import datetime
import json
import math
import operator
import pickle

import pytest
from helpers import REFERENCE
from hypothesis import given
from hypothesis import strategies as st

from offloop.bus.errors import InvalidTimeError, OffloopError, TimeUnitError
from offloop.bus.types.timestamp import Time, Timestamp, TimeUnit

GOLDEN = json.loads((REFERENCE / "time_grammar.json").read_text())

# What the reference reads wrongly or refuses for no reason: what we make of it. None: refused.
OUR_STRINGS = {
    "": None,
    "5": None,
    "24h": (86400, "sec"),
    "100h": (360000, "sec"),
    "60m": (3600, "sec"),
    "90m": (5400, "sec"),
    "60s": (60, "sec"),
    "1H": (3600, "sec"),
    "5ep ": (5, "ep"),
    "5 ep ": (5, "ep"),
    # Hours, minutes and seconds in any number and case, in their order.
    "1H30M": (5400, "sec"),
    " 1h 30m ": (5400, "sec"),
    "36h90m61s": (135061, "sec"),
    **dict.fromkeys(("30m1h", "1h1h", "1.5h", "-1h", "1h30", "9" * 65 + "ba")),
}
# Where the reference raises its own errors or leaks a bool into a counter. "!" marks an error.
OUR_EXPRESSIONS = {
    "Time(5.0,'ep')": "!InvalidTimeError",
    "Time('5','ep')": "!InvalidTimeError",
    "Time(True,'ep')": "Time(1, TimeUnit.EPOCH)",
    "Time(3,'ba')==3.0": "True",
    "Time(3,'ba')=='3ep'": "False",
    "Time(3,'ba')==Time(3,'ep')": "False",
    "Time(3,'ba')<3.5": "!InvalidTimeError",
    "Time(3,'ba')<Time(3,'ep')": "!TimeUnitError",
    "Time(3,'ba')+1.5": "!InvalidTimeError",
    "Time(3,'ba')+Time(1,'ep')": "!TimeUnitError",
    "Time(3,'ba')*Time(2,'ba')": "!TimeUnitError",
    "Time(7,'ba')/Time(2,'ep')": "!TimeUnitError",
    "Time.from_input(5)": "!InvalidTimeError",
    "Time.from_input(5.5,'ba')": "!InvalidTimeError",
    "Time.from_input(None,'ba')": "!InvalidTimeError",
    "Time.from_timedelta('90')": "!InvalidTimeError",
    "Timestamp(epoch=1)<'1dur'": "!TimeUnitError",
    "Timestamp(epoch='2ba')": "!TimeUnitError",
}


def read(text):
    try:
        time = Time.from_timestring(text)
    except InvalidTimeError:
        return None
    assert time.to_timestring() == str(time)
    return str(time), repr(time)


def test_time_strings_are_read_as_in_the_reference():
    rows = GOLDEN["from_timestring"].items()
    known = {text: None if "error" in row else (row["value"], row["unit"]) for text, row in rows} | OUR_STRINGS
    expected = {
        text: one and (f"{one[0]}{one[1]}", f"Time({one[0]}, {TimeUnit(one[1])})") for text, one in known.items()
    }
    assert {text: read(text) for text in known} == expected
    assert read("1h" + " " * 2**24 + "x") is None


def result_of(expression):
    try:
        return repr(eval(expression))
    except (OffloopError, TypeError, ZeroDivisionError) as error:
        return f"!{type(error).__name__}"


def test_time_arithmetic_is_that_of_the_reference():
    expected = {one: result.partition(":")[0] for one, result in GOLDEN["expressions"].items()} | OUR_EXPRESSIONS
    assert {expression: result_of(expression) for expression in expected} == expected


def test_times_of_two_units_are_different_but_have_no_order():
    batches, epochs = Time(3, "ba"), Time(3, "ep")
    assert (batches == epochs) is False
    assert (batches != epochs) is True
    assert len({batches, epochs, Time(3, "ba")}) == 2
    for order in (operator.lt, operator.le, operator.gt, operator.ge):
        with pytest.raises(TimeUnitError):
            order(batches, epochs)


def test_input_is_taken_in_every_form():
    time = Time(90, "sec")
    for value in (time, "90sec", "1m30s", datetime.timedelta(seconds=90.9)):
        assert Time.from_input(value) == time
    assert Time.from_input(90, "sec") == Time.from_input(90, TimeUnit.SECOND) == time
    assert Time.from_timedelta(datetime.timedelta(minutes=1, seconds=30)) == time


def test_unit_names_are_read_in_any_case():
    for unit in TimeUnit:
        for name in (unit.value, unit.value.upper(), unit.name, unit.name.lower()):
            assert TimeUnit(name) is unit


@pytest.mark.parametrize(
    "value", [Time(3, "ba"), Time(0.5, "dur"), Timestamp(epoch=3, batch_wct=datetime.timedelta(1))]
)
def test_times_are_copied_and_pickled_whole(value):
    for same in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value), copy.copy(value)):
        assert same == value
        assert type(same) is type(value)
        assert hash(same) == hash(value)


@pytest.mark.parametrize(("value", "name"), [(Time(1, "ep"), "value"), (Timestamp(), "epoch")])
def test_times_cannot_be_changed(value, name):
    with pytest.raises(AttributeError):
        setattr(value, name, 5)
    with pytest.raises(AttributeError):
        value.something_else = 5


counts = st.integers(-(2**63), 2**63)
count_units = st.sampled_from([unit for unit in TimeUnit if unit is not TimeUnit.DURATION])
count_times = st.builds(Time, counts, count_units)
shares = st.builds(Time, st.floats(), st.just(TimeUnit.DURATION))


@given(count_times | shares)
def test_a_time_is_read_back_from_its_string(time):
    again = Time.from_timestring(time.to_timestring())
    assert again == time or math.isnan(time.value)
    assert (again.unit, type(again.value)) == (time.unit, type(time.value))


@given(counts, counts, count_units)
def test_arithmetic_is_that_of_the_numbers(a, b, unit):
    left, right = Time(a, unit), Time(b, unit)
    assert left + right == left + b == b + left == a + right == left + str(right) == Time(a + b, unit)
    assert left - right == left - b == a - right == Time(a - b, unit)
    assert -left == Time(-a, unit)
    assert left * b == b * left == Time(a * b, unit)
    assert (left < right, left <= right, left > right, left >= right) == (a < b, a <= b, a > b, a >= b)
    assert (left < b, left < str(right), left == b, left == right) == (a < b, a < b, a == b, a == b)
    if b:
        assert left / right == Time(a / b, "dur")
        assert left % right == left % b == Time(a % b, unit)


@given(st.integers(-(2**40), 2**40), st.floats(-4, 4), count_units)
def test_a_share_of_a_count_is_rounded_towards_zero(count, share, unit):
    time = Time(count, unit)
    assert time * Time(share, "dur") == Time(share, "dur") * time == time * share == Time(int(count * share), unit)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("batch"), st.integers(0, 64), st.integers(0, 4096), st.integers(0, 10**7)),
        st.tuples(st.just("epoch"), st.just(0), st.integers(0, 16), st.integers(0, 10**7)),
        st.tuples(st.just("iteration"), st.just(0), st.just(0), st.integers(0, 10**7)),
    ),
    max_size=30,
)


def step(timestamp, kind, samples, tokens, microseconds):
    duration = datetime.timedelta(microseconds=microseconds)
    if kind == "batch":
        return timestamp.to_next_batch(samples, tokens, duration)
    return timestamp.to_next_epoch(tokens, duration) if kind == "epoch" else timestamp.to_next_iteration(duration)


def since(taken, *boundaries):
    last = max((index for index, (kind, *_) in enumerate(taken) if kind in boundaries), default=-1)
    return taken[last + 1 :]


def total(taken, column):
    return sum(row[column] for row in taken)


@given(steps)
def test_a_timestamp_counts_what_happened(taken):
    timestamp = Timestamp()
    for row in taken:
        following = step(timestamp, *row)
        assert following.values != timestamp.values
        assert following > timestamp
        timestamp = following
    kinds = [kind for kind, *_ in taken]
    assert (timestamp.batch, timestamp.epoch, timestamp.iteration) == tuple(
        kinds.count(kind) for kind in ("batch", "epoch", "iteration")
    )
    assert (timestamp.sample, timestamp.token) == (total(taken, 1), total(taken, 2))
    assert timestamp.total_wct == datetime.timedelta(microseconds=total(taken, 3))

    in_iteration = since(taken, "iteration")
    assert timestamp.epoch_in_iteration == [kind for kind, *_ in in_iteration].count("epoch")
    assert timestamp.token_in_iteration == total(in_iteration, 2)
    assert timestamp.iteration_wct == datetime.timedelta(microseconds=total(in_iteration, 3))

    in_epoch = since(taken, "iteration", "epoch")
    assert timestamp.batch_in_epoch == len(in_epoch)
    assert (timestamp.sample_in_epoch, timestamp.token_in_epoch) == (total(in_epoch, 1), total(in_epoch, 2))
    assert timestamp.epoch_wct == datetime.timedelta(microseconds=total(in_epoch, 3))
    assert timestamp.batch_wct == datetime.timedelta(microseconds=total(in_epoch[-1:], 3))


@given(st.lists(st.integers(0, 2**53), min_size=14, max_size=14))
def test_a_timestamp_is_made_again_of_its_values_and_of_its_text(values):
    timestamp = Timestamp.from_values(values)
    assert timestamp.values == tuple(values)
    assert eval(repr(timestamp)) == timestamp == timestamp.copy()
    assert hash(timestamp) == hash(timestamp.copy())


@given(st.lists(st.integers(0, 2**53), min_size=14, max_size=14), st.integers(0, 99), st.integers(0, 99))
def test_the_fast_way_to_the_next_batch_is_the_same(values, samples, microseconds):
    timestamp = Timestamp.from_values(values)
    duration = datetime.timedelta(microseconds=microseconds)
    assert timestamp.advance_batch(samples, 7, microseconds) == timestamp.to_next_batch(samples, 7, duration)


def test_a_copy_takes_changes():
    timestamp = Timestamp(epoch=1, batch=5, epoch_wct=datetime.timedelta(seconds=2))
    changed = timestamp.copy(batch="6ba", epoch_wct=datetime.timedelta(seconds=3))
    assert changed == Timestamp(epoch=1, batch=6, epoch_wct=datetime.timedelta(seconds=3))
    assert timestamp.batch == 5
    with pytest.raises(TypeError, match="batches"):
        timestamp.copy(batches=6)


def test_a_timestamp_gives_the_counter_of_a_unit():
    timestamp = Timestamp(1, 2, 3, 4, 5, total_wct=datetime.timedelta(seconds=6.9))
    expected = {"iter": 1, "ep": 2, "ba": 3, "sp": 4, "tok": 5, "sec": 6}
    for unit, value in expected.items():
        assert timestamp.get(unit) == timestamp.get(TimeUnit(unit)) == Time(value, unit)
    assert timestamp <= "6sec"
    assert timestamp != "0.5dur"
    assert timestamp != 3


@given(st.text() | st.text(alphabet="0123456789.e+-_ hmsepbatoku"))
def test_any_text_is_a_time_or_refused(text):
    try:
        time = Time.from_timestring(text)
    except InvalidTimeError:
        return
    assert str(Time.from_timestring(str(time))) == str(time)
