"""The measured trainings: as a bare PyTorch loop, and with a trainer."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from models import MEDIUM, MEDIUM_WIDTHS, TINY, Made, gpt, mlp
from torch.nn.functional import cross_entropy

from offloop.trainer import Classifier, LanguageModel, Trainer


@dataclass(frozen=True)
class Job:
    make: Callable[[int], Made]  # returns a new module, and a loader of so many batches
    model: Callable[[torch.nn.Module], torch.nn.Module]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    batches: int
    rounds: int
    alone: float  # least share of the bare loop's speed without a stream
    watched: float  # the same with broker and speed,lr attached
    microbatch: int | None = None


def bits(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs.flatten(0, -2), targets.flatten()) / 0.6931471805599453


JOBS = {
    "tiny MLP": Job(TINY, Classifier, cross_entropy, 2500, 9, 0.95, 0.95),
    "medium MLP": Job(MEDIUM, Classifier, cross_entropy, 100, 11, 0.99, 0.99),
    "medium MLP in 4 microbatches": Job(MEDIUM, Classifier, cross_entropy, 100, 9, 0.99, 0.99, microbatch=32),
    "chars GPT": Job(gpt, LanguageModel, bits, 60, 9, 0.99, 0.99),
}

IMAGES = mlp(MEDIUM_WIDTHS, 128, image=(1, 16, 32))
WATCHED_BY_ALL = Job(IMAGES, Classifier, cross_entropy, 1000, 3, 0.99, 0.97)
"""The medium MLP on images, for the callback that shows images."""


def medium_module() -> torch.nn.Module:
    module, _ = IMAGES(1)
    return module


def bare_loop(job: Job, batches: int) -> float:
    module, loader = job.make(batches)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    losses = []
    begin = time.perf_counter()
    for inputs, targets in loader:
        optimizer.zero_grad()
        if job.microbatch is None:
            loss = job.loss(module(inputs), targets)
            loss.backward()
            losses.append(loss.item())
        else:
            total = 0.0
            for some, theirs in zip(inputs.split(job.microbatch), targets.split(job.microbatch), strict=True):
                loss = job.loss(module(some), theirs) * (len(some) / len(inputs))
                loss.backward()
                total += loss.item()
            losses.append(total)
        optimizer.step()
    return batches / (time.perf_counter() - begin)


def make_trainer(job: Job, batches: int, runs_dir: Path, **options: object) -> Trainer:
    module, loader = job.make(batches)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    return Trainer(
        job.model(module),
        loader,
        optimizers=optimizer,
        max_duration=f"{batches}ba",
        runs_dir=runs_dir,
        progress_bar=False,
        device="cpu",
        seed=0,
        device_train_microbatch_size=job.microbatch,
        **options,
    )
