"""A training in a loop of one's own, for tests."""

from typing import Any

import torch

import offloop

ROWS, SIZE = 80, 8


class Loop:
    """A training as people write it, with or without being watched."""

    def __init__(self, accumulate: int = 1, rows: int = ROWS) -> None:
        torch.manual_seed(1)
        inputs = torch.randn(rows, 6)
        data = torch.utils.data.TensorDataset(inputs, (inputs.sum(1) > 0).long())
        self.loader: Any = torch.utils.data.DataLoader(data, batch_size=SIZE, shuffle=True)
        self.batches = len(self.loader)
        self.model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.accumulate = accumulate
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.norms: list[float] = []
        self.after_batch: Any = lambda: None

    def step(self, index: int, rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(self.model(rows), labels)
        (loss / self.accumulate).backward()
        if (index + 1) % self.accumulate == 0 or index + 1 == self.batches:
            self.norms.append(float(torch.nn.utils.get_total_norm([one.grad for one in self.model.parameters()])))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.rates.append(self.optimizer.param_groups[0]["lr"])
        self.losses.append(loss.item())
        return loss

    def plain(self, epochs: int = 2) -> "Loop":
        for _ in range(epochs):
            for index, batch in enumerate(self.loader):
                self.step(index, *batch)
                self.after_batch()
        return self

    def watched(self, epochs: int = 2, **options: Any) -> "Loop":
        options.setdefault("gradient_accumulation_steps", self.accumulate)
        self.run = offloop.watch(self.model, self.optimizer, self.scheduler, **options)
        for _ in self.run.epochs(epochs):
            for index, batch in enumerate(self.run.batches(self.loader)):
                self.run.log(loss=self.step(index, *batch))
                self.after_batch()
        return self

    @property
    def weights(self) -> list[torch.Tensor]:
        return [one.detach().clone() for one in self.model.parameters()]
