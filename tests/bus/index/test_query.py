"""Questions to an index: what filters mean, what is refused, and how runs are put in order."""

import contextlib
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offloop.bus.errors import ConfigurationError
from offloop.bus.index.entry import MetricValues, RunEntry
from offloop.bus.index.query import Columns, best, differences, sort, where

BLANK = RunEntry(
    *("r", None, "finished", None, None, 1_700_000_000.0, 1_700_000_060.0, 1),
    *(1, 10, 80, "9ep", 5000, (), "", False, False, {}, {}),
)


def entry(run, *, tags=(), metrics=None, hyperparameters=None, **values):
    known = {name: MetricValues(*of) for name, of in (metrics or {}).items()}
    return msgspec.structs.replace(
        BLANK, run=run, tags=tuple(tags), hyperparameters=hyperparameters or {}, metrics=known, **values
    )


RUNS = [
    entry(
        "low",
        tags=["baseline", "old"],
        hyperparameters={"config/lr": 0.01, "optimizer/lr": 0.5, "model/name": "A", "flag": True, "zero": 0},
        metrics={"loss/train/total": (0.5, 9, 0.25, 4, 2.0, 0), "metrics/eval/Accuracy": (0.7, 9, 0.6, 1, 0.9, 4)},
    ),
    entry(
        "high",
        status="failed",
        note="too fast",
        hyperparameters={"config/lr": 0.1, "optimizer/lr": 0.5, "model/name": "B", "flag": False, "list": [1, 2]},
        metrics={"loss/train/total": (math.nan, 3, 0.4, 1, 9.0, 3)},
    ),
    entry("bare", status="live", ended=None, size=10),
]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("lr > 0.01", "high"),
        ("lr >= 0.01", "low high"),
        ("optimizer/lr == 0.5", "low high"),
        ("lr > 0.01 and status == finished", ""),
        ("lr > 0.01 or status == finished", "low high"),
        ("lr == 0.1 or lr == 0.01 and status == failed", "high"),
        ("(lr == 0.1 or lr == 0.01) and not status == failed", "low"),
        ("NOT lr > 0 AND status=live", "bare"),
        ("name == A", ""),
        ("model/name == A", "low"),
        ("run ~ O", "low"),
        ("run ~ 'h'", "high"),
        ("tags == baseline", "low"),
        ("tags != baseline", "high bare"),
        ("tags ~ base", "low"),
        ("tags", "low"),
        ("not tags", "high bare"),
        ("note", "high"),
        ("note == 'too fast'", "high"),
        ('note == "too \\"fast"', ""),
        ("flag == true", "low"),
        ("flag == False", "high"),
        ("flag", "low"),
        ("zero", ""),
        ("zero == 0", "low"),
        ("list ~ 2", "high"),
        ("Accuracy > 0.65", "low"),
        ("Accuracy.max >= 0.9", "low"),
        ("metrics/eval/Accuracy.min < 0.6", ""),
        ("loss/train/total < 1", "low"),
        ("loss < 1", "low"),
        ("total.best < 0.3", "low"),
        ("`loss/train/total`.min < 1", None),
        ("`loss/train/total.min` < 1", "low high"),
        ("model/name < 5", ""),
        ("model/name != 5", "low high"),
        ("lr == abc", ""),
        ("duration > 59", "low high bare"),
        ("size<100", "bare"),
        ("size < 1e2", "bare"),
        ("size > -5", "low high bare"),
    ],
)
def test_a_filter_finds_the_runs_of_which_it_is_true(expression, expected):
    if expected is None:
        with pytest.raises(ConfigurationError, match="is not a filter"):
            where(RUNS, expression)
    else:
        assert " ".join(one.run for one in where(RUNS, expression)) == expected


def test_a_short_name_is_found_in_runs_that_have_it_under_different_whole_names():
    runs = [
        entry("published", hyperparameters={"lr": 0.1}),
        entry("trained", hyperparameters={"config/lr": 0.2, "optimizer/lr": 0.9}),
        entry("watched", hyperparameters={"optimizer/lr": 0.3}),
        entry("none"),
    ]
    assert [one.run for one in where(runs, "lr > 0.1")] == ["trained", "watched"]
    assert [one.run for one in where(runs[1:], "lr > 0.1")] == ["trained", "watched"]
    assert [one.run for one in sort(runs, "lr", reverse=True)] == ["watched", "trained", "published", "none"]
    assert [one.run for one in where(runs, "optimizer/lr > 0.1")] == ["trained", "watched"]
    two = [*runs, entry("two", hyperparameters={"optimizer-1/lr": 0.4})]
    assert [one.run for one in where(two, "lr > 0.1")] == ["trained"], "nobody knows which of the two is meant"


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("", "it is empty"),
        ("lr >", "ends where a value is expected"),
        ("lr > and 5", "'5' is not expected there"),
        ("> 5", "'>' stands where a name is expected"),
        ("(lr > 5", "a parenthesis is not closed"),
        ("lr > 5)", "')' is not expected there"),
        ("lr == 'open", "cannot be read"),
        ("lrr > 5", "no run has 'lrr'"),
        ("model > 5", "no run has 'model'"),
        ("(" * 60 + "lr > 5" + ")" * 60, "more than 50 parts"),
    ],
)
def test_what_is_no_filter_is_refused_in_words(expression, words):
    with pytest.raises(ConfigurationError, match=r"is not a filter|no run has") as caught:
        where(RUNS, expression)
    assert words in str(caught.value)


def test_a_name_with_several_meanings_is_refused_and_the_whole_name_helps():
    runs = [entry("r", hyperparameters={"a/size_of": 1, "b/size_of": 2}, metrics={"x/m": (1, 0, 1, 0, 1, 0)})]
    with pytest.raises(ConfigurationError, match="may be a/size_of, b/size_of: write one of these"):
        where(runs, "size_of > 0")
    assert where(runs, "b/size_of == 2") == runs
    assert Columns(runs).find("m.max")[0] == "x/m.max"


@given(st.text(max_size=30))
def test_no_text_breaks_the_parser(text):
    with contextlib.suppress(ConfigurationError):
        assert set(map(id, where(RUNS, text))) <= set(map(id, RUNS))


@given(
    st.text(st.characters(codec="utf-8", exclude_characters="`"), min_size=1, max_size=10).filter(str.strip),
    st.one_of(st.integers(-(10**6), 10**6), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=10)),
)
def test_every_value_of_every_name_can_be_asked_for(name, value):
    runs = [entry("r", hyperparameters={f"config/{name}": value}), entry("other")]
    written = repr(value) if not isinstance(value, str) else '"' + value.replace("\\", r"\\").replace('"', r"\"") + '"'
    assert [one.run for one in where(runs, f"`config/{name}` == {written}")] == ["r"]


def test_runs_are_sorted_by_numbers_before_texts_and_those_without_a_value_last():
    assert [one.run for one in sort(RUNS, "lr")] == ["low", "high", "bare"]
    assert [one.run for one in sort(RUNS, "lr", reverse=True)] == ["high", "low", "bare"]
    # A loss that is not a number has no place among numbers.
    assert [one.run for one in sort(RUNS, "loss/train/total")] == ["low", "high", "bare"]
    assert sort(RUNS, "tags", reverse=True)[0].run == "low"
    mixed = [entry(str(value), hyperparameters={"x": value}) for value in ("b", 2, "A", 1.5, True)]
    assert [one.run for one in sort(mixed, "x")] == ["True", "1.5", "2", "A", "b"]


def test_the_best_run_is_that_of_the_least_loss_or_the_greatest_accuracy():
    assert best(RUNS, "loss/train/total").run == "low"
    assert best(RUNS, "Accuracy").run == "low"
    assert best(RUNS, "loss/train/total", mode="max").run == "high"
    assert best(RUNS[2:], "loss/train/total", columns=Columns(RUNS)) is None
    with pytest.raises(ConfigurationError, match="no run has the metric 'nothing'"):
        best(RUNS, "nothing")
    with pytest.raises(ConfigurationError, match="use min or max"):
        best(RUNS, "Accuracy", mode="least")


def test_what_has_no_direction_has_no_best_value_until_the_runs_or_the_user_say_it():
    runs = [entry(name, metrics={"kl": (value, 1, value, 1, value, 1)}) for name, value in (("a", 1.0), ("b", 2.0))]
    with pytest.raises(ConfigurationError, match=r"'kl' has no best value: .* give mode='min' or mode='max'"):
        best(runs, "kl")
    with pytest.raises(ConfigurationError, match=r"use kl\.min or kl\.max, or start runs with config="):
        sort(runs, "kl.best")
    assert best(runs, "kl", mode="max").run == "b"
    runs[0].hyperparameters["config/metric.goals/kl"] = "min"
    assert best(runs, "kl").run == "a"
    assert where(runs, "kl.best < 1.5") == runs[:1]


def test_differences_are_those_that_not_all_runs_share():
    found = {one.name: one.values for one in differences(RUNS[:2])}
    assert found == {
        "config/lr": [0.01, 0.1],
        "flag": [True, False],
        "list": [None, [1, 2]],
        "model/name": ["A", "B"],
        "zero": [0, None],
    }
