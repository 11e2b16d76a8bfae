"""A training with algorithms that is resumed ends with bitwise the same weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gold import gold_data
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from offloop.trainer import Algorithm, Classifier, Trainer
from offloop.trainer.algorithms import (
    EMA,
    SAM,
    SWA,
    BlurPool,
    ChannelsLast,
    GradientClipping,
    LayerFreezing,
    StochasticDepth,
)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, images: Tensor) -> Tensor:
        added: Tensor = images + self.norm(self.convolution(images)).relu()
        return added


def net() -> nn.Sequential:
    body = nn.Conv2d(1, 4, 1), Residual(), nn.MaxPool2d((1, 2)), Residual()
    return nn.Sequential(nn.Unflatten(1, (1, 2, 4)), *body, nn.Flatten(), nn.Dropout(0.2), nn.Linear(16, 4))


def train(make_algorithms: Callable[[], list[Algorithm]], folder: Path | None, load_path: Path | None) -> list[Tensor]:
    """Four epochs of four batches; returns the weights and statistics, the averages and an evaluation at the end."""
    torch.manual_seed(3)
    module = net()
    arguments: dict[str, Any] = {"save_folder": folder, "save_interval": "1ba", "load_path": load_path}
    algorithms = make_algorithms()
    with Trainer(
        Classifier(module),
        DataLoader(TensorDataset(*gold_data("train", 24)), batch_size=6, shuffle=True),
        DataLoader(TensorDataset(*gold_data("eval_a", 12)), batch_size=6),
        optimizers=torch.optim.AdamW(module.parameters(), lr=0.01),
        eval_interval="3ba",
        max_duration="4ep",
        algorithms=algorithms,
        seed=17,
        device="cpu",
        publish=False,
        progress_bar=False,
        **arguments,
    ) as trainer:
        trainer.fit()
    averages = [value for one in algorithms for value in one.state_dict().get("average", {}).values()]
    scores = trainer.state.eval_metric_values["eval"].values()
    return [*module.state_dict().values(), *averages, torch.tensor(list(scores))]


def everything() -> list[Algorithm]:
    """Return several algorithms, so that each meets the others' changes."""
    depth = StochasticDepth("Residual", "sample", drop_rate=0.4, drop_warmup="6ba")
    layout = [BlurPool(), ChannelsLast()]
    return [SAM(rho=0.1), GradientClipping("norm", 0.5), depth, EMA("5ba"), LayerFreezing(0.3), *layout]


@pytest.mark.slow
@pytest.mark.parametrize(
    "make_algorithms",
    [
        lambda: [EMA(half_life="3ba", ema_start="3ba", update_interval="2ba")],
        lambda: [EMA(half_life="1ep")],
        lambda: [SWA("4ba", "10ba", "3ba", schedule_swa_lr=True, anneal_steps=3, swa_lr=0.002)],
        lambda: [SWA("0.25dur", "0.75dur")],
        everything,
    ],
    ids=["ema", "ema_epochs", "swa", "swa_epochs", "everything"],
)
def test_a_resumed_training_ends_the_same(make_algorithms: Callable[[], list[Algorithm]], tmp_path: Path) -> None:
    expected = train(make_algorithms, tmp_path, None)
    *checkpoints, _ = sorted(tmp_path.glob("ep*"))
    assert len(checkpoints) == 15
    for checkpoint in checkpoints[1::4]:
        resumed = train(make_algorithms, None, checkpoint)
        assert len(resumed) == len(expected)
        for one, other in zip(resumed, expected, strict=True):
            assert torch.equal(one, other), checkpoint.name
