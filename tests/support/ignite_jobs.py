"""A training with Ignite as people write it, for tests."""

from collections.abc import Callable
from typing import Any

import torch
from attached_runs import RUN, make_network, make_rows
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Accuracy, Average, RunningAverage
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from offloop.ignite import OffloopLogger

ROWS, SIZE, LENGTH = 77, 8, 10


class Training:
    """Ten iterations an epoch, of which so many go into a step; with or without a run."""

    def __init__(self, accumulate: int = 1) -> None:
        self.accumulate = accumulate
        self.net = make_network()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.loader = DataLoader(TensorDataset(*make_rows(ROWS)), batch_size=SIZE, shuffle=True)
        validation = DataLoader(TensorDataset(*make_rows(20)), batch_size=SIZE)
        self.trainer = create_supervised_trainer(
            self.net, self.optimizer, cross_entropy, gradient_accumulation_steps=accumulate
        )
        self.evaluator = create_supervised_evaluator(self.net, {"accuracy": Accuracy()})
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
