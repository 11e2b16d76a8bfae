"""The training loop of PyTorch's quick start, watched: the marked lines are ours.

    python examples/pytorch_quickstart.py               in one terminal
    consumer --callbacks speed,lr,metrics               in another, before it or while it runs; --last: after it
    offloop send NAME stop                          stops it after the current batch; NAME is in its output

Source: https://docs.pytorch.org/tutorials/beginner/basics/quickstart_tutorial.html; its pictures of clothes are drawn
here, to avoid downloads.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offloop  # <- this

epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 5


def clothes(count: int) -> TensorDataset:
    """Draw pictures of shape (1, 28, 28): a pattern for each of ten classes, with noise."""
    patterns = torch.randn(10, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(10, (count,))
    return TensorDataset(patterns[labels] + 2 * torch.randn(count, 1, 28, 28), labels)


train_dataloader = DataLoader(clothes(6400), batch_size=64)
test_dataloader = DataLoader(clothes(640), batch_size=64)


class NeuralNetwork(nn.Module):
    """Two hidden layers."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.linear_relu_stack = nn.Sequential(
            nn.Linear(28 * 28, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.linear_relu_stack(self.flatten(x))
        return logits


model = NeuralNetwork()
loss_fn = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
run = offloop.watch(model, optimizer)  # <- this

for epoch in run.epochs(epochs):  # <- this, for range(epochs)
    model.train()
    for batch, (X, y) in enumerate(run.batches(train_dataloader)):  # <- this, for train_dataloader
        loss = loss_fn(model(X), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss)  # <- this
        if batch % 50 == 0:
            print(f"loss: {loss.item():>7f}  [{batch * len(X):>5d}/{len(train_dataloader.dataset):>5d}]")
    model.eval()
    with run.evaluating("test") as metrics, torch.no_grad():  # <- this
        correct = sum((model(X).argmax(1) == y).sum().item() for X, y in test_dataloader)
        metrics["accuracy"] = correct / len(test_dataloader.dataset)
    print(f"epoch {epoch + 1}: accuracy {metrics['accuracy']:.1%}")
