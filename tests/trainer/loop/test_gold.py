import json

import pytest
import torch
from gold import GoldMLP, gold_batches, gold_data, gold_optimizer
from helpers import REFERENCE

ARRAYS = json.loads((REFERENCE / "common_inputs.json").read_text())["arrays"]
RECORDED = json.loads((REFERENCE / "trainer_log_microbatch4_2ep.json").read_text())


@pytest.mark.parametrize(("part", "rows"), [("train", 24), ("eval_a", 12), ("eval_b", 8), ("predict", 7)])
def test_the_data_is_that_of_the_reference(part, rows):
    inputs, classes = gold_data(part, rows)
    assert inputs.tolist() == ARRAYS[f"{part}.x"]
    assert classes.tolist() == ARRAYS[f"{part}.y"]
    assert (inputs.dtype, classes.dtype) == (torch.float32, torch.int64)


def test_the_model_begins_with_the_weights_of_the_reference():
    state = {f"init.{name}": values.tolist() for name, values in GoldMLP().state_dict().items()}
    assert state == {name: values for name, values in ARRAYS.items() if name.startswith("init.")}


def test_a_plain_loop_trains_to_the_losses_metrics_and_weights_of_the_reference():
    model = GoldMLP()
    optimizer = gold_optimizer(model)
    metrics = model.get_metrics(is_train=True)
    losses, measured = [], []
    for batch in gold_batches("train", 20, 6) * 2:
        optimizer.zero_grad()
        loss = 0.0
        for microbatch in zip(*(part.split(4) for part in batch), strict=True):
            outputs = model(microbatch)
            part = model.loss(outputs, microbatch) * (len(microbatch[0]) / len(batch[0]))
            part.backward()
            loss += part.item()
            for metric in metrics.values():
                model.update_metric(microbatch, outputs.detach(), metric)
        optimizer.step()
        losses.append(loss)
        measured.append({f"metrics/train/{name}": metric.compute().item() for name, metric in metrics.items()})
        for metric in metrics.values():
            metric.reset()

    calls = [call["data"] for call in RECORDED["calls"]]
    assert losses == pytest.approx([data["loss/train/total"] for data in calls if "loss/train/total" in data], rel=1e-6)
    recorded = [call["data"] for call in RECORDED["calls"] if call["last_event_before"] == "AFTER_TRAIN_BATCH"]
    recorded = [data for data in recorded if "metrics/train/CrossEntropy" in data]
    assert len(recorded) == len(measured) == 8
    for ours, theirs in zip(measured, recorded, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
    for name, values in model.state_dict().items():
        torch.testing.assert_close(values, torch.tensor(RECORDED["final_weights"][name]), rtol=1e-6, atol=1e-7)
