"""Thread time that each adapter adds to a step of its framework's loop with a tiny model, without a consumer.

The same training with and without offloop: each in a thread of its own, a block of steps in turn. Every step has a loss
and a learning rate. The frameworks' own steps vary more than an adapter takes: a figure is the difference of the lower
quartiles of both, and shown with those of each third of the blocks. Composer is measured after ``make composer``."""

import contextlib
import functools
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "KERAS_BACKEND": "torch"}

import torch
from common import Report, argument_parser, quartiles, run
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

ROWS, WIDE, CLASSES = 8, 8, 4
STEPS, BLOCKS = 300, 24
GOALS = {"watch": 25, "lightning": 40, "accelerate": 40, "ignite": 40}
GOAL_OF_OTHERS = 80


class Left(BaseException):
    """Leaves a training whose blocks are measured."""


class Turns:
    """Blocks of a training's steps, one whenever :meth:`take` asks for it."""

    def __init__(self, train: Callable[["Turns"], object], steps: int, blocks: int) -> None:
        self.steps, self.total = steps, steps * (blocks + 2)
        self.times: list[float] = []
        self._begin, self._end = threading.Semaphore(0), threading.Semaphore(0)
        self._train, self._count, self._since, self._is_over = train, 0, 0.0, False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._begin.acquire()
        try:
            self._train(self)
            raise RuntimeError("the training ended before its last block")
        except Left:
            pass
        except BaseException as error:  # noqa: BLE001 - raised by take()
            self._error = error
        self._end.release()

    def step(self) -> None:
        """Note a step that begins."""
        if self._count % self.steps == 0:
            now = time.thread_time()
            if self._count:
                self.times.append((now - self._since) / self.steps * 1e6)
                self._end.release()
                self._begin.acquire()
                if self._is_over:
                    raise Left
            self._since = time.thread_time()
        self._count += 1

    def take(self) -> None:
        self._begin.release()
        self._end.acquire()
        if self._error is not None:
            raise self._error

    def leave(self) -> None:
        self._is_over = True
        self._begin.release()
        self._thread.join()


class Data(DataLoader):
    """Batches in memory, made before the steps are measured."""

    def __init__(self, turns: Turns) -> None:
        super().__init__(TensorDataset(torch.zeros(turns.total * ROWS, 1)), batch_size=ROWS)
        self.turns = turns
        generator = torch.Generator().manual_seed(0)
        self.batches = [
            (torch.randn(ROWS, WIDE, generator=generator), torch.randint(CLASSES, (ROWS,), generator=generator))
            for _ in range(500)
        ]

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.turns.total):
            self.turns.step()
            yield self.batches[number % len(self.batches)]


def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDE, 16), torch.nn.ReLU(), torch.nn.Linear(16, CLASSES))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def watch(turns: Turns, options: dict[str, Any] | None) -> None:
    import offloop

    model, optimizer = made()
    data: Any = Data(turns)
    run = None if options is None else offloop.watch(model, optimizer, **options)
    for inputs, targets in data if run is None else run.batches(data):
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        if run is not None:
            run.log(loss=loss)


def lightning(turns: Turns, options: dict[str, Any] | None) -> None:
    import lightning as L

    from offloop.lightning import OffloopCallback

    model, optimizer = made()

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            self.log("lr", optimizer.param_groups[0]["lr"])
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

    L.Trainer(
        max_epochs=1,
        logger=False,
        callbacks=[] if options is None else [OffloopCallback(**options)],
        log_every_n_steps=1,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    ).fit(Module(), Data(turns))


def transformers(turns: Turns, options: dict[str, Any] | None) -> None:
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    from offloop.transformers import OffloopCallback

    model, optimizer = made()
    batches = Data(turns).batches
    rows = [(inputs[row], targets[row]) for inputs, targets in batches for row in range(ROWS)]

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            outputs = self.net(inputs)
            return {"loss": cross_entropy(outputs, labels), "logits": outputs}

    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return turns.total * ROWS

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            inputs, labels = rows[index % len(rows)]
            return {"inputs": inputs, "labels": labels}

    class Steps(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            turns.step()

    theirs = Trainer(
        Model(),
        TrainingArguments(
            output_dir=str(Path.cwd() / "out"),
            num_train_epochs=1,
            per_device_train_batch_size=ROWS,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            logging_steps=1,
        ),
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)),
        train_dataset=Rows(),
    )
    theirs.remove_callback(PrinterCallback)
    theirs.add_callback(Steps())
    if options is not None:
        theirs.add_callback(OffloopCallback(theirs, **options))
    theirs.train()


def accelerate(turns: Turns, options: dict[str, Any] | None) -> None:
    from accelerate import Accelerator

    from offloop.accelerate import attach

    accelerator = Accelerator(cpu=True)
    rows = torch.randn(ROWS * turns.total, WIDE), torch.randint(CLASSES, (ROWS * turns.total,))
    model, optimizer, loader = accelerator.prepare(*made(), DataLoader(TensorDataset(*rows), batch_size=ROWS))
    if options is not None:
        attach(accelerator, model, optimizer, **options)
    for inputs, targets in loader:
        turns.step()
        accelerator.backward(cross_entropy(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()


def ignite(turns: Turns, options: dict[str, Any] | None) -> None:
    from ignite.engine import Engine

    from offloop.ignite import OffloopLogger

    model, optimizer = made()

    def step(engine: Engine, batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss

    trainer = Engine(step)
    if options is not None:
        OffloopLogger(**options).attach(trainer, optimizer, model=model)
    trainer.run(Data(turns), max_epochs=1)


def keras(turns: Turns, options: dict[str, Any] | None, *, schedule: bool = False) -> None:
    import keras

    from offloop.keras import OffloopCallback

    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential([layers.Input((WIDE,)), layers.Dense(16, activation="relu"), layers.Dense(CLASSES)])
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 1000, 0.99) if schedule else 0.1
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.SGD(rate), loss=loss)
    model.fit(Data(turns), verbose=0, callbacks=[] if options is None else [OffloopCallback(**options)])


def composer(turns: Turns, options: dict[str, Any] | None) -> None:
    sys.path.append(str(Path(sys.executable).parents[1] / "composer"))
    from composer import Trainer
    from composer.models import ComposerModel

    from offloop.composer import OffloopCallback

    model, optimizer = made()

    class Model(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, batch: Any) -> torch.Tensor:
            return self.net(batch[0])

        def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
            return cross_entropy(outputs, batch[1])

    Trainer(
        model=Model(),
        train_dataloader=Data(turns),
        optimizers=optimizer,
        max_duration="1ep",
        callbacks=[] if options is None else [OffloopCallback(**options)],
        progress_bar=False,
        device="cpu",
    ).fit()


def measure(report: Report, runs_dir: Path, quick: bool, name: str, train: Callable[..., object]) -> None:
    steps, blocks = (5, 3) if quick else (STEPS, BLOCKS)
    both = [
        Turns(functools.partial(train, options=options), steps, blocks)
        for options in (None, {"runs_dir": runs_dir, "run_name": name})
    ]
    with contextlib.chdir(runs_dir):
        for number in report.rounds(name, blocks + 1):
            for one in both:
                one.take()
                if number == 0:  # the first block warms up
                    one.times.clear()
        for one in both:
            one.leave()
    bare, attached = (one.times for one in both)
    goal = GOALS.get(name, GOAL_OF_OTHERS)
    lower = [quartiles(attached[part::3])[0] - quartiles(bare[part::3])[0] for part in range(3)]
    report.add(f"{name}: a step of the bare loop", bare, "us")
    report.add(f"{name}: added to a step", lower, "us", goal)


FRAMEWORKS: dict[str, Callable[..., object]] = {
    **{one.__name__: one for one in (watch, lightning, accelerate, ignite, transformers, keras)},
    "keras-schedule": functools.partial(keras, schedule=True),
    "composer": composer,
}
PARTS = {name: functools.partial(measure, name=name, train=train) for name, train in FRAMEWORKS.items()}

if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    run("adapters", PARTS, argument_parser(__doc__, PARTS).parse_args())
