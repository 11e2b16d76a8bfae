"""Which values of a metric are better: as a run says, or its name, or none."""

import pytest

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.metrics import check_goals, direction_of, goals_in, shown_step

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


@pytest.mark.parametrize(
    ("metric", "step", "shown"),
    [("metrics/eval/x", 8, 7), ("metrics/eval/x", 0, 0), ("metrics/train/x", 8, 8), ("loss/train/total", 7, 7)],
)
def test_an_evaluation_is_shown_beside_the_last_batch_before_it(metric, step, shown):
    assert shown_step(metric, step) == shown


def test_runs_say_it_of_other_metrics_and_what_the_user_says_comes_first():
    said = {"metric.goals/metrics/eval/Mine": "max", "config/metric.goals/kl": "min", "config/metric.goals/x": "least"}
    goals = goals_in([{**said, "config/metric.goals/Mine": "min"}, {"lr": "min"}, said])
    assert goals == {"metrics/eval/Mine": "max", "kl": "min", "Mine": "min"}
    assert [direction_of(name, goals) for name in ("train/kl", "klx", "x", "loss")] == ["min", None, None, "min"]
    assert goals_in([{"metric.goals/kl": "min"}, {"metric.goals/kl": "max"}, {"metric.goals/kl": "max"}]) == {}


@pytest.mark.parametrize("goals", [{"kl": "less"}, "min"])
def test_an_invalid_goal_is_refused(goals):
    with pytest.raises(ConfigurationError):
        check_goals({"metric.goals": goals}, "config")
