"""A GPU, or the host in its place: whether something waits for it, and a training to try it with."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from offloop.trainer import Classifier, Trainer
from offloop.trainer.data.models import Accuracy

ROWS = 96
SIZE = 8
BATCHES = ROWS // SIZE


@contextmanager
def no_waits(device: str) -> Iterator[list[str]]:
    """Refuse operations that make the host wait for the GPU.

    Yields the names of waits for events, streams or the whole GPU, which torch's own check leaves out.
    """
    waits: list[str] = []
    if device != "gpu":
        yield waits
        return

    def noting(name: str, original: Any) -> Any:
        def wait(*arguments: Any) -> Any:
            waits.append(name)
            return original(*arguments)

        return wait

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((torch.cuda.Event, "Event"), (torch.cuda.Stream, "Stream"), (torch.cuda, "device")):
            patch.setattr(owner, "synchronize", noting(name, owner.synchronize))
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")


def make_loader(device: str, seed: int = 5) -> "DataLoader[Any]":
    """Batches of random rows and classes from 0 to 3: the same ones every time."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(ROWS, 32, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs[:, :4].argmax(1)), batch_size=SIZE, pin_memory=device == "gpu")


def make_network(dropout: float = 0.1) -> nn.Sequential:
    """Return a network whose weights are too large for an event."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(32, 8192), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8192, 4))


def make_trainer(device: str, model: nn.Module | None = None, **arguments: Any) -> Trainer:
    """Return a short training of :func:`make_network`."""
    model = model or Classifier(make_network(), train_metrics={"accuracy": Accuracy()})
    settings: dict[str, Any] = {
        "train_dataloader": make_loader(device),
        # Of the optimizers, those that are fused let the scaler of amp_fp16 skip a step without waiting.
        "optimizers": torch.optim.AdamW(model.parameters(), lr=0.001, fused=True),
        "max_duration": "1ep",
        "run_name": "r",
        "seed": 17,
        "progress_bar": False,
    }
    return Trainer(model, device=device, **(settings | arguments))
