"""The table of runs: filters, order and columns."""

import contextlib
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_tables import ACCURACY, entry, table

from offloop.bus.errors import ConfigurationError
from offloop.bus.index.columns import Columns, progress_of, reached_text
from offloop.bus.index.entry import MetricValues


def run(name, *, metrics=None, **values):
    known = {metric: MetricValues(*of) for metric, of in (metrics or {}).items()}
    return entry(name, metrics=known, **values)


def found(runs, expression):
    return [one.run for one in table(*runs).where(runs, expression)]


def ordered(runs, order):
    return [one.run for one in table(*runs).sort(runs, order)]


RUNS = [
    run(
        "low",
        tags=("baseline", "old"),
        started=0.0,
        ended=60.0,
        hyperparameters={"config/lr": 0.01, "optimizer/lr": 0.5, "model/name": "A", "flag": True, "zero": 0},
        metrics={"loss/train/total": (0.5, 9, 0.25, 4, 2.0, 0), "metrics/eval/Accuracy": (0.7, 9, 0.6, 1, 0.9, 4)},
    ),
    run(
        "high",
        status="failed",
        note="too fast",
        hyperparameters={"config/lr": 0.1, "optimizer/lr": 0.5, "model/name": "B", "flag": False, "list": [1, 2]},
        metrics={"loss/train/total": (math.nan, 3, 0.4, 1, 9.0, 3)},
    ),
    run("bare", status="live", ended=None, size=10),
]


FILTERS = {
    "lr > 0.01": "high",
    "lr >= 0.01": "low high",
    "optimizer/lr == 0.5": "low high",
    "lr > 0.01 and status == finished": "",
    "lr > 0.01 or status == finished": "low high",
    "lr == 0.1 or lr == 0.01 and status == failed": "high",
    "(lr == 0.1 or lr == 0.01) and not status == failed": "low",
    "NOT lr > 0 AND status=live": "bare",
    "name == A": "",
    "model/name == A": "low",
    "run ~ O": "low",
    "run ~ 'h'": "high",
    "tags == baseline": "low",
    "tags != baseline": "high bare",
    "tags ~ base": "low",
    "not tags": "high bare",
    "note": "high",
    "note == 'too fast'": "high",
    'note == "too \\"fast"': "",
    "flag == False": "high",
    "flag": "low",
    "zero": "",
    "zero == 0": "low",
    "list ~ 2": "high",
    "Accuracy > 0.65": "low",
    "Accuracy.max >= 0.9": "low",
    "metrics/eval/Accuracy.min < 0.6": "",
    "loss < 1": "low",
    "total.best < 0.3": "low",
    "loss == nan": "high",
    "name=='low'and(lr) < (1)": "low",
    "`loss/train/total.min` < 1": "low high",
    "model/name < 5": "",
    "model/name != 5": "low high",
    "lr == abc": "",
    "duration > 59": "low high bare",
    "size < 1e2": "bare",
    "size > -5": "low high bare",
}


def test_a_filter_finds_the_runs_of_which_it_is_true():
    assert {expression: " ".join(found(RUNS, expression)) for expression in FILTERS} == FILTERS


def test_a_short_name_is_found_in_runs_that_have_it_under_different_whole_names():
    runs = [
        run("published", hyperparameters={"lr": 0.1}),
        run("trained", hyperparameters={"config/lr": 0.2, "optimizer/lr": 0.9}),
        run("watched", hyperparameters={"optimizer/lr": 0.3}),
        run("none"),
    ]
    assert found(runs, "lr > 0.1") == ["trained", "watched"]
    assert found(runs[1:], "lr > 0.1") == ["trained", "watched"]
    assert ordered(runs, "-lr") == ["watched", "trained", "published", "none"]
    assert found(runs, "optimizer/lr > 0.1") == ["trained", "watched"]
    two = [*runs, run("two", hyperparameters={"optimizer-1/lr": 0.4})]
    assert found(two, "lr > 0.1") == ["trained"], "nobody knows which of the two is meant"


NAMED = {
    # A hyperparameter's full name, then a metric's full or short name, then the end of a hyperparameter's name.
    "config/loss": "config/loss",
    "loss": "loss/train/total",
    "loss.min": "loss/train/total.min",
    "accuracy": ACCURACY,
    "kl": "kl",
    "seed": "seed",
    "total": "config/total",
    "lr": "config/lr",
    "lr.max": "lr-SGD/group0.max",
}


def test_a_metric_is_not_hidden_by_the_end_of_a_hyperparameters_name():
    hyperparameters = {f"config/{name}": 1 for name in ("loss", "accuracy", "kl", "total", "lr", "seed")}
    metrics = dict.fromkeys(("loss/train/total", ACCURACY, "kl", "a/seed", "lr-SGD/group0"), (0.5, 1, 0.5, 1, 0.5, 1))
    runs = [run("keras", hyperparameters={**hyperparameters, "seed": 2}, metrics=metrics), run("other")]
    runs += [run("plain", metrics={"loss/train/total": (2.0, 1, 2.0, 1, 2.0, 1)})]
    columns = Columns(runs)
    assert {name: columns.find(name).name for name in NAMED} == NAMED
    assert found(runs, "loss > 0") == ["keras", "plain"]
    assert found(runs, "loss > 1") == ["plain"]
    assert found(runs, "config/loss == 1") == ["keras"]


@pytest.mark.parametrize(
    ("expression", "place"),
    [
        ("", "end at character 1"),
        ("lr >", "end at character 5"),
        ("lr > and 5", "'and 5' at character 6"),
        ("lr == 'open", '"\'open" at character 7'),
        ("lr >> 5", "'>> 5' at character 4"),
        ("0 < lr < 1", "'0 < lr < 1' at character 1"),
        ("status == finished and lr(5)", "'lr(5)' at character 24"),
        ("not " * 60 + "lr", "'not not not not not ' at character 201"),
        ("(" * 1000 + "lr" + ")" * 1000, "'" + "(" * 20 + "' at character"),
    ],
)
def test_an_invalid_filter_is_refused_with_its_place(expression, place):
    with pytest.raises(ConfigurationError, match=re.escape(f"unexpected {place}")):
        found(RUNS, expression)
    with pytest.raises(ConfigurationError, match="no run has"):
        found(RUNS, "`loss/train/total`.min > 5")


def test_a_name_with_several_meanings_is_refused_and_the_whole_name_helps():
    runs = [run("r", hyperparameters={"a/size_of": 1, "b/size_of": 2}, metrics={"x/m": (1, 0, 1, 0, 1, 0)})]
    with pytest.raises(ConfigurationError, match="may be a/size_of, b/size_of: write one of these"):
        found(runs, "size_of > 0")
    assert found(runs, "b/size_of == 2") == ["r"]
    assert Columns(runs).find("m.max").name == "x/m.max"


@given(st.text(max_size=30))
def test_no_text_breaks_the_parser(text):
    with contextlib.suppress(ConfigurationError):
        assert {*found(RUNS, text)} <= {"low", "high", "bare"}


@given(
    st.text(st.characters(codec="utf-8", exclude_characters="`"), min_size=1, max_size=10).filter(str.strip),
    st.one_of(st.integers(-(10**6), 10**6), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=10)),
)
def test_every_value_of_every_name_can_be_asked_for(name, value):
    runs = [run("r", hyperparameters={f"config/{name}": value}), run("other")]
    written = repr(value) if not isinstance(value, str) else '"' + value.replace("\\", r"\\").replace('"', r"\"") + '"'
    assert found(runs, f"`config/{name}` == {written}") == ["r"]


def test_runs_are_sorted_by_numbers_before_texts_and_those_without_a_value_last():
    assert ordered(RUNS, "lr") == ["low", "high", "bare"]
    assert ordered(RUNS, "-lr") == ["high", "low", "bare"]
    # A loss that is not a number has no place among numbers.
    assert ordered(RUNS, "loss/train/total") == ["low", "high", "bare"]
    assert ordered(RUNS, "-tags")[0] == "low"
    mixed = [run(str(value), hyperparameters={"x": value}) for value in ("b", 2, "A", 1.5, True)]
    assert ordered(mixed, "x") == ["True", "1.5", "2", "A", "b"]


def test_the_best_run_is_that_of_the_least_loss_or_the_greatest_accuracy():
    assert table(*RUNS).best(RUNS, "loss/train/total").run == "low"
    assert table(*RUNS).best(RUNS, "Accuracy").run == "low"
    assert table(*RUNS).best(RUNS, "loss/train/total", mode="max").run == "high"
    assert table(*RUNS).best(RUNS[2:], "loss/train/total") is None
    with pytest.raises(ConfigurationError):
        table(*RUNS).best(RUNS, "nothing")
    with pytest.raises(ConfigurationError):
        table(*RUNS).best(RUNS, "Accuracy", mode="least")


def test_what_has_no_direction_has_no_best_value_until_the_runs_or_the_user_say_it():
    runs = [run(name, metrics={"kl": (value, 1, value, 1, value, 1)}) for name, value in (("a", 1.0), ("b", 2.0))]
    with pytest.raises(ConfigurationError, match=r"kl\.min"):
        table(*runs).best(runs, "kl")
    with pytest.raises(ConfigurationError, match="has no best value"):
        ordered(runs, "kl.best")
    assert table(*runs).best(runs, "kl", mode="max").run == "b"
    runs[0].hyperparameters["config/metric.goals/kl"] = "min"
    assert table(*runs).best(runs, "kl").run == "a"
    assert found(runs, "kl.best < 1.5") == ["a"]


WORDS = {
    "lr > 0.01": "high",
    "lr <= 0.01 or tags == keep": "low",
    "HIGH": "high",
    "rate note": "low",
    "keep": "low",
    # Words that are also what every run has, and those that are also names of hyperparameters.
    "pinned": "",
    "tags": "low",
    "lr": "",
    "this and that": "high",
    "(": "",
}


def test_what_is_written_is_an_expression_or_words_in_names_tags_and_notes():
    runs = table(
        entry("low", hyperparameters={"config/lr": 0.001}, tags=("keep",), note="a note on this rate"),
        entry("high", hyperparameters={"config/lr": 0.1}, note="this and that"),
    )
    chosen = {find: runs.choose(find) for find in WORDS}
    assert {find: " ".join(entry.run for entry in one.entries) for find, one in chosen.items()} == WORDS
    assert {one.error for one in chosen.values()} == {None}


def test_the_usual_columns_are_those_in_which_runs_differ_and_what_they_are_measured_by():
    runs = table(
        entry("a", hyperparameters={"config/lr": 0.1, "lr": 0.1, "config/width": 8, "git/commit": "1"}),
        entry("b", hyperparameters={"config/lr": 0.2, "lr": 0.2, "config/width": 8, "git/commit": "2"}),
    )
    assert runs.usual_columns[:-2] == ("status", "config/lr", f"{ACCURACY}.best", "reached", "started", "duration")
    first, second = ({"a": n, "b": n, "c": n, "optimizer/lr": n, "seed": n} for n in (1, 2))
    assert table(entry("a", hyperparameters=first), entry("b", hyperparameters=second)).usual_columns[1:4] == (
        *("optimizer/lr", "a", "b"),
    )
    with pytest.raises(ConfigurationError, match=r"no run has 'acuracy.best': did you mean accuracy\? use one of"):
        runs.column("acuracy.best")
    with pytest.raises(ConfigurationError, match=r"no run has 'lt': did you mean lr\? use one of"):
        runs.column("lt")
    titles = [(column.title, column.which) for column in runs.columns(None)]
    assert ("lr", "") in titles
    assert ("accuracy", "best") in titles
    runs = table(entry("a", hyperparameters={"config/lr": 1, "a_rather_long_prefix/lr": 2}))
    columns = runs.columns(["config/lr", "nonsense", "a_rather_long_prefix/lr", "config/lr"])
    assert [column.title for column in columns] == ["config/lr", "a_rather_long_prefix/lr"]


def test_the_best_of_a_column_is_that_of_the_runs_that_are_found():
    runs = table(entry("a", 0.5), entry("b", 0.9), entry("c", math.nan), entry("d", 0.7, archived=True))
    column = runs.column(f"{ACCURACY}.best")
    assert runs.choose("").best(column) == "b"
    assert runs.choose("a").best(column) is None, "there is nothing to compare it with"


@pytest.mark.parametrize(
    ("values", "text", "part"),
    [
        ({}, "", None),
        ({"batch": 1200}, "batch 1,200", None),
        ({"epoch": 3, "batch": 40, "planned": "10ep", "status": "live"}, "epoch 3 of 10", 0.3),
        ({"epoch": 3, "batch": 40, "planned": "10ep"}, "epoch 3 of 10", None),
        ({"epoch": 3, "batch": 40, "planned": "1h", "status": "live"}, "batch 40", None),
        ({"batch": 40, "planned": "nonsense", "status": "live"}, "batch 40", None),
    ],
)
def test_how_far_a_run_is(values, text, part):
    one = entry("a", **values)
    assert reached_text(one) == text
    assert progress_of(one) == part
