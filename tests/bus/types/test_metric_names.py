"""The short names of metrics, and what names stand for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.metrics import MetricNames, direction_of, is_named

RUN = {
    "loss/train/total": "loss",
    "loss/train/kl": "train/kl",
    "lr-SGD/group0": "lr",
    "metrics/eval/accuracy": "accuracy",
    "metrics/eval/per_class/0": "per_class/0",
    "metrics/eval/loss": "eval/loss",
    "metrics/train/accuracy": "train/accuracy",
    "throughput/samples_per_sec": "samples_per_sec",
    "throughput/device/samples_per_sec": "device/samples_per_sec",
    "memory/allocated_mem": "allocated_mem",
    "system/memory_percent": "memory_percent",
    "time/train": "time/train",
    "l2_norm/grad/global": "l2_norm/grad/global",
    "val/accuracy": "val/accuracy",
    "reward": "reward",
}


def test_metrics_have_short_names() -> None:
    names = MetricNames(RUN)
    assert {metric: names.short(metric) for metric in RUN} == RUN


def test_short_names_become_longer_until_they_differ() -> None:
    names = MetricNames(["metrics/eval/f1", "metrics/test/f1", "lr-SGD/group0", "lr-SGD/group1", "kl", "metrics/a/kl"])
    assert list(map(names.short, ["metrics/eval/f1", "metrics/test/f1"])) == ["eval/f1", "test/f1"]
    assert names.short("lr-SGD/group1") == "lr-SGD/group1"
    assert names.short("metrics/a/kl") == "a/kl"
    assert MetricNames(["loss", "loss/train/total"]).short("loss/train/total") == "loss/train/total"
    with pytest.raises(ConfigurationError, match="eval/f1, test/f1") as caught:
        names.find("f1")
    assert caught.value.name == "f1"


@pytest.mark.parametrize(
    ("name", "metric"),
    [
        ("total", "loss/train/total"),
        ("loss", "loss/train/total"),
        ("group0", "lr-SGD/group0"),
        ("eval/accuracy", "metrics/eval/accuracy"),
        ("metrics/eval/accuracy", "metrics/eval/accuracy"),
        ("grad/global", "l2_norm/grad/global"),
    ],
)
def test_full_names_their_ends_and_short_names_are_found(name: str, metric: str) -> None:
    assert MetricNames(RUN).find(name) == metric
    assert is_named(metric, name)


def test_a_name_of_the_training_and_of_an_evaluation_is_that_of_the_evaluation() -> None:
    assert MetricNames(["metrics/train/f1", "metrics/eval/f1"]).find("f1") == "metrics/eval/f1"
    assert MetricNames(["metrics/train/f1"]).find("f1") == "metrics/train/f1"
    assert not is_named("metrics/eval/f1", "1")
    with pytest.raises(ConfigurationError, match="f1"):
        MetricNames(["metrics/eval/f1"]).find("auc")


def test_goals_may_have_short_names() -> None:
    assert direction_of("loss/train/total", {"loss": "max"}) == "max"
    assert direction_of("metrics/eval/mine", {"eval/mine": "min"}) == "min"


PARTS = st.sampled_from(("loss", "train", "total", "metrics", "eval", "lr", "lr-A", "lr-B", "0", "a", "b", ""))


@given(st.lists(st.lists(PARTS, min_size=1, max_size=4).map("/".join), max_size=8))
def test_each_short_name_stands_for_its_metric_alone(metrics: list[str]) -> None:
    names = MetricNames(metrics)
    for metric in metrics:
        assert names.find(names.short(metric)) == metric
        assert is_named(metric, names.short(metric))
