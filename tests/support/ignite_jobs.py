"""A training with Ignite as people write it, for tests; and the same on several ranks, for ``run_two_ranks``."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attached_runs import RUN, Sender, make_network, make_rows
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Accuracy, Average, RunningAverage
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from offloop.ignite import OffloopLogger

ROWS, SIZE, LENGTH = 77, 8, 10


class Training:
    """Ten iterations an epoch, of which so many go into a step; with or without a run."""

    def __init__(self, accumulate: int = 1, wrap: Callable[[Any], Any] = lambda net: net) -> None:
        self.accumulate = accumulate
        self.net = make_network()
        model = wrap(self.net)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.loader = DataLoader(TensorDataset(*make_rows(ROWS)), batch_size=SIZE, shuffle=True)
        validation = DataLoader(TensorDataset(*make_rows(20)), batch_size=SIZE)
        self.trainer = create_supervised_trainer(
            model, self.optimizer, cross_entropy, gradient_accumulation_steps=accumulate
        )
        self.evaluator = create_supervised_evaluator(model, {"accuracy": Accuracy()})
        RunningAverage(output_transform=lambda loss: loss).attach(self.trainer, "smooth")
        Average(output_transform=lambda loss: loss).attach(self.trainer, "mean")
        self.accuracies: list[float] = []
        self.trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: self.evaluate(validation))
        self.logger: Any = None
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.norms: list[float] = []
        self.after_iteration: Callable[[], object] = lambda: None
        self.trainer.add_event_handler(Events.ITERATION_COMPLETED, self.note)
        self.optimizer.register_step_pre_hook(self.note_norm)

    def evaluate(self, validation: Any) -> None:
        self.evaluator.run(validation)
        self.accuracies.append(self.evaluator.state.metrics["accuracy"])

    def note(self, engine: Any) -> None:
        self.losses.append(engine.state.output)
        if engine.state.iteration % self.accumulate == 0:
            self.scheduler.step()
            self.rates.append(self.optimizer.param_groups[0]["lr"])
        self.after_iteration()

    def note_norm(self, *_: Any) -> None:
        self.norms.append(float(torch.nn.utils.get_total_norm([one.grad for one in self.net.parameters()])))

    def attach(self, evaluate: Any = None, checkpoint: Any = None, **options: Any) -> "Training":
        self.logger = OffloopLogger(**{"run_name": RUN, **options}).attach(
            self.trainer,
            self.optimizer,
            {"val": self.evaluator},
            scheduler=self.scheduler,
            gradient_accumulation_steps=self.accumulate,
            evaluate=evaluate,
            checkpoint=checkpoint,
        )
        return self

    def train(self, epochs: int = 2) -> "Training":
        self.trainer.run(self.loader, max_epochs=epochs)
        return self


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    seen: list[list[Any]] = []
    training = Training(2, wrap=torch.nn.parallel.DistributedDataParallel)

    def at(what: str) -> Callable[..., None]:
        return lambda *_: seen.append([what, training.trainer.state.iteration])

    training.attach(evaluate=at("evaluate"), checkpoint=at("checkpoint"), on_set={"heat": at("heat")})
    commands = [("pause",), ("resume",), ("set", "heat", 3), ("set", "eval", "now"), ("checkpoint",), ("stop",)]
    sender = Sender(*commands)
    if dist.get_rank() == 0:
        training.after_iteration = lambda: sender.step(len(training.losses))
    training.train(100_000)
    errors = [one.error for one in sender.outcomes] if dist.get_rank() == 0 else None
    weights = [one.tolist() for one in training.net.parameters()]
    found = {"seen": seen, "stopped_at": len(training.rates), "errors": errors, "weights": weights}
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
