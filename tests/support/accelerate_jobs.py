"""A training with Accelerate as people write it, for tests."""

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from attached_runs import RUN, make_network, make_rows
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from offloop.accelerate import attach

ROWS, SIZE = 77, 8


class Training:
    """Ten dataloader batches an epoch, of which so many go into a step; with or without a run."""

    def __init__(self, accumulate: int = 1, **options: Any) -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, **options)
        net = make_network()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
        loader = DataLoader(TensorDataset(*make_rows(ROWS)), batch_size=SIZE, shuffle=True)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        self.net = net
        prepared = self.accelerator.prepare(net, optimizer, loader, scheduler)
        self.model, self.optimizer, self.loader, self.scheduler = prepared
        self.run: Any = None
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.norms: list[float] = []
        self.stopped_at: int | None = None
        self.after_batch: Callable[[], object] = lambda: None

    def attach(self, **options: Any) -> "Training":
        self.run = attach(self.accelerator, **{"run_name": RUN, "max_duration": "2ep", **options})
        return self

    def train(self, epochs: int = 2) -> "Training":
        for _ in range(epochs):
            self.epoch(self.loader)
            if self.ends_here:
                break
            self.evaluate()
            if self.ends_here:
                break
        self.accelerator.end_training()
        return self

    def epoch(self, loader: Any) -> None:
        self.model.train()
        for rows, labels in loader:
            with self.accelerator.accumulate(self.model):
                loss = cross_entropy(self.model(rows), labels)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    gradients = [one.grad for one in self.net.parameters() if one.grad is not None]
                    self.norms.append(float(torch.nn.utils.get_total_norm(gradients)))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.losses.append(loss.item())
            if self.accelerator.sync_gradients:
                self.rates.append(self.optimizer.param_groups[0]["lr"])
            self.after_batch()
            if self.ends_here:
                break

    @property
    def ends_here(self) -> bool:
        if self.run is None or not self.run.stop_requested:
            return False
        self.stopped_at = len(self.rates)
        return True

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            rows, labels = make_rows(8)
            accuracy = (self.model(rows).argmax(1) == labels).float().mean()
        if self.run is not None:
            with self.run.evaluating("val") as metrics:
                metrics["accuracy"] = accuracy
        self.model.train()
