"""What a logger costs other people's training loops: ours in another process, and those that come with the framework.

Each training has steps of about 10 ms. Figures are medians over rounds in which all variants take turns, because a
machine's speed drifts: steps a second against the same loop without a logger, and what the thread that trains spends on
a step beyond it, of its own processor time. On a CPU, with one torch thread."""

import contextlib
import importlib
import logging
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ |= {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "WANDB_SILENT": "true", "HF_HUB_OFFLINE": "1"}
os.environ |= {"KERAS_BACKEND": "torch", "TF_CPP_MIN_LOG_LEVEL": "3"}

import torch
from common import Report, arguments, consumer_process, scratch
from jobs import MEDIUM
from torch.nn.functional import cross_entropy

import offloop

SLEEPER = Path(__file__).with_name("sleeper.py")
GOAL_RATIO, GOAL_MICROSECONDS = 0.98, 150.0
_STEADY = 10
"""Steps at the beginning that are not counted."""


class Clock:
    """When each step of a training began, for everybody and for the thread that trains."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.own: list[float] = []

    def tick(self) -> None:
        """A step begins."""
        self.wall.append(time.perf_counter())
        self.own.append(time.thread_time())


class Ticking(torch.nn.Module):
    """The network that is trained; each forward pass is a step."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.net, _ = MEDIUM(1)
        self.clock = clock

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The logits, of a tensor of shape (rows, features)."""
        self.clock.tick()
        logits: torch.Tensor = self.net(inputs)
        return logits


class Result(NamedTuple):
    """One training."""

    speed: float
    """Steps a second."""
    own: float
    """Microseconds of the training thread's own time for a step."""
    end: float
    """Seconds from the beginning of the last step until the program goes on."""


class Variant(NamedTuple):
    """How a training is watched."""

    logger: str = "none"
    """``none``, ``csv``, ``tensorboard``, ``wandb``, ``sleeper`` (50 ms a batch in process) or ``ours``."""
    every: int | None = 1
    """Logs every so many steps; ``None`` for the framework's default."""
    consumer: str | None = None
    """The callbacks of the consumer beside ours."""

    @property
    def name(self) -> str:
        """What it is called in the table."""
        what = "ours with a callback that sleeps 50 ms" if self.consumer == f"{SLEEPER}:Sleeper" else self.logger
        what = {"sleeper": "50 ms a batch in process", "ours": f"ours with {self.consumer}"}.get(what, what)
        return f"{what}, {'default interval' if self.every is None else 'every step'}"


Train = Callable[[Variant, int, Path, Clock], None]


def own_loop(variant: Variant, steps: int, where: Path, clock: Clock) -> None:
    """A plain loop that reads its loss for whatever logs it."""
    _, loader = MEDIUM(steps)
    model = Ticking(clock)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with contextlib.ExitStack() as stack:
        log: Callable[[int, torch.Tensor], object] = lambda step, loss: None  # noqa: E731
        run = None
        if variant.logger == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            writer = stack.enter_context(contextlib.closing(SummaryWriter(where)))
            log = lambda step, loss: writer.add_scalar("loss", loss.item(), step)  # noqa: E731
        elif variant.logger == "wandb":
            import wandb

            tracked = stack.enter_context(wandb.init(dir=where))
            log = lambda step, loss: tracked.log({"loss": loss.item()}, step=step)  # noqa: E731
        elif variant.logger == "sleeper":
            log = lambda step, loss: time.sleep(0.05)  # noqa: E731
        elif variant.logger == "ours":
            run = stack.enter_context(offloop.watch(model, optimizer, run_name="w", runs_dir=where))
        for step, (inputs, targets) in enumerate(loader if run is None else run.batches(loader)):
            loss = cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if run is None:
                log(step, loss)
            else:
                run.log(loss=loss)


def lightning(variant: Variant, steps: int, where: Path, clock: Clock) -> None:
    """Lightning's Trainer."""
    import lightning as L
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger

    from offloop.lightning import OffloopCallback

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Ticking(clock)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    class Sleeper(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            time.sleep(0.05)

    loggers = {
        "csv": lambda: CSVLogger(where),
        "tensorboard": lambda: TensorBoardLogger(where),
        "wandb": lambda: WandbLogger(save_dir=where),
    }
    callbacks: dict[str, Callable[[], Any]] = {
        "ours": lambda: OffloopCallback(run_name="w", runs_dir=where),
        "sleeper": Sleeper,
    }
    trainer = L.Trainer(
        max_epochs=1,
        logger=loggers[variant.logger]() if variant.logger in loggers else False,
        callbacks=[callbacks[variant.logger]()] if variant.logger in callbacks else [],
        log_every_n_steps=variant.every,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        default_root_dir=where,
    )
    trainer.fit(Module(), MEDIUM(steps)[1])
    if variant.logger == "wandb":
        importlib.import_module("wandb").finish()


def transformers(variant: Variant, steps: int, where: Path, clock: Clock) -> None:
    """The Trainer of Transformers."""
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    from offloop.transformers import OffloopCallback

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Ticking(clock)

        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.net(inputs)
            return {"loss": cross_entropy(logits, labels), "logits": logits}

    class Sleeper(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            time.sleep(0.05)

    rows = MEDIUM(steps)[1].dataset
    trainer = Trainer(
        Model(),
        TrainingArguments(
            output_dir=str(where),
            num_train_epochs=1,
            per_device_train_batch_size=128,
            report_to=variant.logger if variant.logger in ("tensorboard", "wandb") else "none",
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            **({} if variant.every is None else {"logging_steps": variant.every}),
        ),
        train_dataset=[{"inputs": inputs, "labels": label} for inputs, label in rows],
    )
    trainer.remove_callback(PrinterCallback)
    if variant.logger == "ours":
        trainer.add_callback(OffloopCallback(trainer, run_name="w", runs_dir=where))
    elif variant.logger == "sleeper":
        trainer.add_callback(Sleeper())
    with contextlib.redirect_stdout(None):
        trainer.train()
    if variant.logger == "wandb":
        importlib.import_module("wandb").finish()


FRAMEWORKS: dict[str, tuple[Train, list[str]]] = {
    "own loop": (own_loop, ["tensorboard", "wandb"]),
    "Lightning": (lightning, ["csv", "tensorboard", "wandb"]),
    "Transformers": (transformers, ["tensorboard", "wandb"]),
}
"""The frameworks, and the loggers that come with each."""


@contextlib.contextmanager
def watched_by(callbacks: str | None, where: Path) -> Iterator[None]:
    """A consumer that waits for the next run there."""
    if callbacks is None:
        yield
        return
    with consumer_process("--runs-dir", str(where), "--callbacks", callbacks):
        # It is to be there when the training begins: starting it is not what is measured.
        time.sleep(2)
        yield


def measure(train: Train, variant: Variant, steps: int, where: Path) -> Result:
    """One training, watched."""
    clock = Clock()
    with watched_by(variant.consumer, where):
        train(variant, steps, where, clock)
        end = time.perf_counter() - clock.wall[-1]
    counted = len(clock.wall) - 1 - _STEADY
    return Result(
        counted / (clock.wall[-1] - clock.wall[_STEADY]),
        (clock.own[-1] - clock.own[_STEADY]) / counted * 1e6,
        end,
    )


def measure_framework(report: Report, name: str, where: Path, quick: bool) -> None:
    """All variants of a framework in turn."""
    train, loggers = FRAMEWORKS[name]
    steps, rounds = (_STEADY + 5, 1) if quick else (150, 5)
    variants = [Variant("none", every) for every in ((1, None) if name != "own loop" else (1,))]
    variants += [one._replace(logger=logger) for one in variants for logger in loggers]
    variants += [Variant("ours", 1, "speed,lr"), Variant("sleeper"), Variant("ours", 1, f"{SLEEPER}:Sleeper")]
    results: dict[Variant, list[Result]] = {variant: [] for variant in variants}
    measure(train, Variant(), steps, where / "warm")
    for turn in range(rounds):
        for number, variant in enumerate(variants):
            results[variant].append(measure(train, variant, steps, where / f"{turn}-{number}"))
    median = {
        variant: Result(*(statistics.median(values) for values in zip(*found, strict=True)))
        for variant, found in results.items()
    }
    for variant, found in median.items():
        bare = median[Variant("none", variant.every)]
        if variant.logger == "none":
            report.add(f"{name}: {variant.name}", found.speed, "steps/s")
            continue
        is_ours = variant.logger == "ours"
        ratio = found.speed / bare.speed
        report.add(f"{name}: {variant.name} / none", ratio, "x", GOAL_RATIO if is_ours else None, at_least=True)
        report.add(
            f"{name}: {variant.name}, training thread",
            found.own - bare.own,
            "us a step",
            GOAL_MICROSECONDS if is_ours else None,
        )
        report.add(f"{name}: {variant.name}, added at the end", found.end - bare.end, "s")


def main() -> None:
    """Measures and prints."""
    options = arguments(__doc__ or "")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for noisy in ("lightning", "pytorch_lightning", "lightning.pytorch", "transformers"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    report = Report("frameworks", options.quick)
    with scratch() as where:
        for name in FRAMEWORKS:
            measure_framework(report, name, where / name.split()[0], options.quick)
    report.show(options.json)


if __name__ == "__main__":
    main()
