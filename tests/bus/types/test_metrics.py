"""What the name of a metric says of its values."""

import pytest

from bus.types.metrics import direction_of, mode_of


@pytest.mark.parametrize(
    ("metric", "mode"),
    [("loss/train/total", "min"), ("metrics/eval/Accuracy", "max"), ("metrics/eval/WER", "min"), ("val_f1", "max")],
)
def test_losses_and_what_evaluations_measure_have_a_best_value(metric, mode):
    assert direction_of(metric) == mode_of(metric) == mode


@pytest.mark.parametrize("metric", ["lr-AdamW/group0", "time/train", "throughput/samples_per_sec", "gradient_norm"])
def test_rates_times_and_norms_have_none(metric):
    assert direction_of(metric) is None
