"""The short names of metrics, what names stand for, and which values are better: as a run says, or the name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.metrics import MetricNames, check_goals, direction_of, goals_in, is_named, shown_step

LOWER = """loss/train/total loss/train/kl metrics/eval/CrossEntropy metrics/eval/MeanSquaredError metrics/eval/WER
    MSELoss metrics/eval/LanguagePerplexity BitsPerToken val_loss val/loss_epoch val_loss/dataloader_idx_0 eval_loss
    word_error_rate sparse_categorical_crossentropy BrierScore"""
HIGHER = """metrics/eval/MulticlassAccuracy metrics/eval/F1Score val_f1 my/f1_macro MulticlassAUROC mAP map_50 mAP50-95
    mIoU MeanIoU R2Score rougeL rouge1_fmeasure acc@5 top1_acc accuracy_top5 exact_match mean_token_accuracy
    rewards/accuracies ep_rew_mean episodic_return reward"""
NONE = """grad_norm metrics/train/grad_norm gradient_norm/total total_flos num_tokens clip_ratio train_runtime
    metrics/eval/runtime eval_samples_per_second reward_std rewards/chosen completions/mean_length entropy kl loss_scale
    loss_std lr lr-AdamW/group0 learning_rate epoch step time/train throughput/samples_per_sec memory/used_bytes
    false_positive_rate score mine eval time_to_accuracy steps_to_success train/tokens_per_loss num_losses n_success
    grad_acc epochs_since_best_loss"""


def test_only_a_metric_whose_name_is_certain_has_a_best_value():
    for names, mode in ((LOWER, "min"), (HIGHER, "max"), (NONE, None)):
        assert {name: direction_of(name) for name in names.split()} == dict.fromkeys(names.split(), mode)


def test_an_evaluation_is_shown_beside_the_last_batch_before_it():
    assert [shown_step("metrics/eval/x", step) for step in (0, 8)] == [0, 7]
    assert shown_step("metrics/train/x", 8) == 8


def test_runs_say_it_of_other_metrics_and_what_the_user_says_comes_first():
    said = {"metric.goals/metrics/eval/Mine": "max", "config/metric.goals/kl": "min", "config/metric.goals/x": "least"}
    goals = goals_in([{**said, "config/metric.goals/Mine": "min"}, {"lr": "min"}, said])
    assert goals == {"metrics/eval/Mine": "max", "kl": "min", "Mine": "min"}
    assert [direction_of(name, goals) for name in ("train/kl", "klx", "x", "loss")] == ["min", None, None, "min"]
    assert direction_of("loss/train/total", {"loss": "max"}) == "max"
    assert direction_of("metrics/eval/mine", {"eval/mine": "min"}) == "min"
    assert goals_in([{"metric.goals/kl": "min"}, {"metric.goals/kl": "max"}, {"metric.goals/kl": "max"}]) == {}


def test_an_invalid_goal_is_refused():
    for goals in ({"kl": "less"}, "min"):
        with pytest.raises(ConfigurationError):
            check_goals({"metric.goals": goals}, "config")


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


def test_short_names_become_longer_until_they_differ() -> None:
    assert {metric: MetricNames(RUN).short(metric) for metric in RUN} == RUN
    names = MetricNames(["metrics/eval/f1", "metrics/test/f1", "lr-SGD/group0", "lr-SGD/group1", "kl", "metrics/a/kl"])
    assert list(map(names.short, ["metrics/eval/f1", "metrics/test/f1"])) == ["eval/f1", "test/f1"]
    assert names.short("lr-SGD/group1") == "lr-SGD/group1"
    assert names.short("metrics/a/kl") == "a/kl"
    assert MetricNames(["loss", "loss/train/total"]).short("loss/train/total") == "loss/train/total"
    with pytest.raises(ConfigurationError, match="eval/f1, test/f1") as caught:
        names.find("f1")
    assert caught.value.name == "f1"


def test_full_names_their_ends_and_short_names_are_found() -> None:
    meant = {
        **dict.fromkeys(("total", "loss"), "loss/train/total"),
        **dict.fromkeys(("eval/accuracy", "metrics/eval/accuracy"), "metrics/eval/accuracy"),
        "group0": "lr-SGD/group0",
        "grad/global": "l2_norm/grad/global",
    }
    assert {name: MetricNames(RUN).find(name) for name in meant} == meant
    assert all(is_named(metric, name) for name, metric in meant.items())


def test_a_name_of_the_training_and_of_an_evaluation_is_that_of_the_evaluation() -> None:
    assert MetricNames(["metrics/train/f1", "metrics/eval/f1"]).find("f1") == "metrics/eval/f1"
    assert MetricNames(["metrics/train/f1"]).find("f1") == "metrics/train/f1"
    assert not is_named("metrics/eval/f1", "1")
    with pytest.raises(ConfigurationError, match="f1"):
        MetricNames(["metrics/eval/f1"]).find("auc")


PARTS = st.sampled_from(("loss", "train", "total", "metrics", "eval", "lr", "lr-A", "lr-B", "0", "a", "b", ""))


@given(st.lists(st.lists(PARTS, min_size=1, max_size=4).map("/".join), max_size=8))
def test_each_short_name_stands_for_its_metric_alone(metrics: list[str]) -> None:
    names = MetricNames(metrics)
    for metric in metrics:
        assert names.find(names.short(metric)) == metric
        assert is_named(metric, names.short(metric))
