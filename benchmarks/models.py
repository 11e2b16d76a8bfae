"""The trained models, and random data for them. Imports only torch."""

import itertools
from collections.abc import Callable

import torch
from torch.utils.data import DataLoader, TensorDataset

Made = tuple[torch.nn.Module, DataLoader]


def mlp(widths: tuple[int, ...], rows: int, image: tuple[int, int, int] | None = None) -> Callable[[int], Made]:
    def make(batches: int) -> Made:
        torch.manual_seed(0)
        layers: list[torch.nn.Module] = [] if image is None else [torch.nn.Flatten()]
        for wide, narrow in itertools.pairwise(widths):
            layers += [torch.nn.Linear(wide, narrow), torch.nn.ReLU()]
        inputs = torch.randn(batches * rows, *(image or widths[:1]))
        targets = torch.randint(0, widths[-1], (batches * rows,))
        return torch.nn.Sequential(*layers[:-1]), DataLoader(TensorDataset(inputs, targets), batch_size=rows)

    return make


def gpt(batches: int) -> Made:
    from offloop.trainer.tasks.gpt import ALPHABET, Gpt

    torch.manual_seed(0)
    text = torch.randint(0, len(ALPHABET), (batches * 32, 65))
    data = TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous())
    return Gpt(width=96, layers=2, length=64), DataLoader(data, batch_size=32)


TINY = mlp((32, 64, 64, 10), 32)
MEDIUM_WIDTHS = (512, 1024, 1024, 10)
MEDIUM = mlp(MEDIUM_WIDTHS, 128)
