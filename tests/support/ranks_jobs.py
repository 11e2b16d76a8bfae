"""Trainings that tests start on several ranks: ``torchrun ... ranks_jobs.py JOB... FOLDER``.

A job is a function that takes a folder, ``FOLDER/JOB``, and returns what is to be compared, as JSON; each rank writes
it to ``rank-N.json`` there, and its runs are in ``runs`` there. Called in a test's own process it is the same training
on one rank.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from gold import GoldMLP, gold_data, gold_loader, gold_optimizer
from resumed import Augmented
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset
from training import Act

from offloop.bus.errors import ConfigurationError
from offloop.bus.runs.directory import find_run
from offloop.bus.subscriber.commands import send_command
from offloop.bus.types.event import Event
from offloop.consumers import JsonlLogger, SpeedMonitor
from offloop.trainer import Classifier, DataSpec, Evaluator, RankBatchSampler, State, Trainer
from offloop.trainer.algorithms import GradientClipping
from offloop.trainer.data.models import Accuracy, CrossEntropy
from offloop.trainer.distributed.ranks import join_ranks, rank_and_world_size
from offloop.trainer.distributed.sampling import check_parts
from offloop.trainer.schedulers import CosineAnnealingWithWarmupScheduler

ROWS, BATCH = 27, 6
BATCHES_BEFORE_THE_END = 3
"""Batches that are over when a rank fails."""


def rank_loader(part: str = "train", rows: int = ROWS, size: int = BATCH, **options: Any) -> "DataLoader[Any]":
    """Batches of the recorded data, divided among the ranks; the last one of an epoch is odd."""
    dataset = TensorDataset(*gold_data(part, rows))
    return DataLoader(dataset, batch_sampler=RankBatchSampler(dataset, size, **options))


def make_model() -> Classifier:
    """Return the recorded job's network, with metrics that do not depend on how samples are put together."""
    return Classifier(GoldMLP().net, train_metrics={"Accuracy": Accuracy(), "CrossEntropy": CrossEntropy()})


class TwoLosses(Classifier):
    """A loss that is made of two."""

    def loss(self, outputs: Any, batch: Any) -> Any:
        """Return the network's own, and one of the outputs alone."""
        return {"classes": super().loss(outputs, batch), "outputs": outputs.square().mean()}


def train(model: Classifier | None = None, **arguments: Any) -> dict[str, Any]:
    """Return the losses, weights, metrics and counts of a training."""
    model = make_model() if model is None else model
    losses: list[float] = []
    parts: list[dict[str, float]] = []
    metrics: list[dict[str, float]] = []
    norms: list[float] = []

    def note(event: Event, state: State, _logger: object) -> None:
        if event is Event.BATCH_END:
            losses.append(float(state.total_loss or 0))
            parts.append({name: float(part) for name, part in state.batch_losses.items()})
            metrics.append(state.train_metric_values or {n: float(m.compute()) for n, m in state.train_metrics.items()})
        else:
            norms.append(float(nn.utils.get_total_norm(p.grad for p in model.parameters() if p.grad is not None)))

    settings: dict[str, Any] = {
        "train_dataloader": rank_loader(shuffle=True),
        "eval_dataloader": Evaluator("eval_a", rank_loader("eval_a", 11, 4)),
        "max_duration": "3ep",
        "seed": 17,
        "device": "cpu",
        "publish": False,
        "progress_bar": False,
    }
    if "optimizers" not in arguments:
        settings["optimizers"] = gold_optimizer(model)
    # Algorithms at the end of a batch's work are applied from last to first, so that this one sees clipped gradients.
    own = arguments.pop("algorithms", [])
    watch = Act(note, Event.BATCH_END, Event.AFTER_TRAIN_BATCH)
    with Trainer(model, **(settings | arguments), algorithms=[watch, *own]) as trainer:
        trainer.fit()
    state = trainer.state
    return {
        "losses": losses,
        "parts": parts,
        "train_metrics": metrics,
        "gradient_norms": norms,
        "weights": [value.flatten().tolist() for value in model.state_dict().values()],
        "rates": [group["lr"] for optimizer in state.optimizers for group in optimizer.param_groups],
        "eval_metrics": state.eval_metric_values,
        "counts": [state.timestamp.values[index] for index in (1, 2, 3, 8)],
        "stopped": state.stopped,
    }


def two_optimizers(model: Classifier) -> list[torch.optim.Optimizer]:
    """One for the weights and one for the biases."""
    matrices, vectors = ([one for one in model.parameters() if one.ndim == dimensions] for dimensions in (2, 1))
    return [torch.optim.AdamW(matrices, lr=0.01), torch.optim.SGD(vectors, lr=0.1, momentum=0.9)]


def same_result() -> dict[str, Any]:
    """Trainings whose results do not depend on the number of ranks."""
    return {
        "plain": train(),
        "parts": train(
            TwoLosses(GoldMLP().net, train_metrics={"Accuracy": Accuracy(), "CrossEntropy": CrossEntropy()})
        ),
        "microbatches": train(device_train_microbatch_size=2),
        "optimizers": train(optimizers=two_optimizers, schedulers=CosineAnnealingWithWarmupScheduler("4ba")),
        "clipping": train(algorithms=[GradientClipping(clipping_type="norm", clipping_threshold=0.2)]),
    }


class Ticking:
    """A clock that goes on by so much whenever it is asked, which it is as often on every rank."""

    def __init__(self, seconds: float) -> None:
        self.now, self.step = 0, round(seconds * 1e9)

    def __call__(self) -> int:
        self.now += self.step
        return self.now


class Numbers(IterableDataset[Any]):
    """So many rows, which nobody knows beforehand."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        yield from zip(*gold_data("train", self.rows), strict=True)


def refusal(attempt: Callable[[], object]) -> str:
    """Return the text of the :class:`ConfigurationError` that it raises."""
    try:
        attempt()
    except ConfigurationError as error:
        return str(error)
    return "no error"


def on_rank(number: int, do: Callable[[State], object], event: Event, batch: int) -> Act:
    """Do something on one rank alone, at an event when so many batches are done."""

    def act(_event: Event, state: State, _logger: object) -> None:
        if state.rank == number and state.timestamp.batch == batch:
            do(state)

    return Act(act, event)


def agreement(folder: Path) -> dict[str, Any]:
    """Train on what ranks have to agree on, and on what they cannot agree on."""
    rank = rank_and_world_size()[0]
    same = same_result()
    torch.manual_seed(rank)
    apart = make_model()
    for parameter in apart.parameters():
        nn.init.normal_(parameter)
    orders: list[list[int]] = []
    sampler: DistributedSampler[Any] = DistributedSampler(range(8), seed=5)  # type: ignore[arg-type]
    numbered = TensorDataset(*gold_data("train", 8), torch.arange(8))
    watch = Act(lambda _event, state, _logger: orders.append(state.batch[2].tolist()), Event.BATCH_START)

    def stop(state: State) -> None:
        state.stop_training()

    ranks = join_ranks(on_gpu=False)
    assert ranks is not None
    results = {
        "same": same,
        "different weights": train(apart),
        "three seconds": train(max_duration="3sec", clock=Ticking(0.25 * (rank + 1)), eval_interval=0),
        "stop in a batch": train(algorithms=[on_rank(1, stop, Event.AFTER_TRAIN_BATCH, 6)]),
        "stop after a batch": train(algorithms=[on_rank(1, stop, Event.BATCH_END, 6)]),
        "stop after evaluation": train(algorithms=[on_rank(1, stop, Event.EVAL_END, 5)]),
        "distributed sampler": train(
            train_dataloader=DataLoader(numbered, batch_size=4, sampler=sampler),
            algorithms=[watch],
        ),
        "orders": orders,
        "plain loader": refusal(lambda: train(train_dataloader=gold_loader("train", 12, 6))),
        "plain evaluation": refusal(lambda: train(eval_dataloader=gold_loader("eval_a", 12, 6))),
        "other ranks": refusal(lambda: train(train_dataloader=rank_loader(num_replicas=3, rank=rank))),
        "lengths": refusal(lambda: check_parts(DataSpec([]), 4 + rank, ranks)),
        "seeds": refusal(lambda: check_parts(DataSpec(rank_loader(seed=rank)), 4, ranks)),
        "parts": refusal(lambda: check_parts(DataSpec(rank_loader(rank=1)), 4, ranks)),
    }
    # The last one, for it ends what the ranks have in common.
    stream = DataLoader(Numbers(12 + 4 * rank), batch_size=4)
    return results | {"stream": refusal(lambda: train(train_dataloader=stream))}


def train_on(folder: Path | None, load_path: Path | None = None, **arguments: Any) -> list[list[float]]:
    """Return the weights after a training in which everything is drawn at random: order, noise and dropout."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 4))
    dataset = Augmented(ROWS)
    settings: dict[str, Any] = {
        "train_dataloader": DataLoader(dataset, batch_sampler=RankBatchSampler(dataset, BATCH, shuffle=True)),
        "optimizers": torch.optim.AdamW(net.parameters(), lr=0.01),
        "max_duration": "2ep",
        # A training that goes on draws what the first one would have drawn, whatever its own seed.
        "seed": 17 if load_path is None else 99,
        "device": "cpu",
        "progress_bar": False,
        "publish": False,
        "save_folder": folder,
        "save_interval": "1ba",
        "load_path": load_path,
    }
    with Trainer(Classifier(net), **(settings | arguments)) as trainer:
        trainer.fit()
    return [value.flatten().tolist() for value in net.state_dict().values()]


def checkpoints(folder: Path) -> dict[str, Any]:
    """Trainings that are interrupted and gone on with."""
    results: dict[str, Any] = {"whole": train_on(folder / "whole")}
    for epoch, batch in ((0, 3), (0, 5)):
        saved = folder / "whole" / f"ep{epoch}-ba{batch}-rank0.safetensors"
        results[f"from batch {batch}"] = train_on(None, saved)
    results["from the folder"] = train_on(None, folder / "whole", max_duration="3ep")
    results["from one rank"] = train_on(None, folder / "one" / "ep0-ba3-rank0.safetensors")
    results["random"] = torch.rand(1).item()

    def terminate(_state: State) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    try:
        train_on(folder / "stopped", algorithms=on_rank(1, terminate, Event.BATCH_START, 3), publish=True, run_name="r")
    except KeyboardInterrupt:
        results["interrupted"] = True
    return results


def published(folder: Path) -> dict[str, Any]:
    """Train a run with callbacks and loggers, and one that fails on the second rank."""
    consumers: dict[str, Any] = {"callbacks": [SpeedMonitor(window_size=1)], "loggers": [JsonlLogger()]}
    result = train(publish=True, run_name="good", **consumers)
    write(folder, result)

    def fail(_state: State) -> None:
        raise ValueError("the second rank has had enough")

    failing = on_rank(1, fail, Event.AFTER_FORWARD, BATCHES_BEFORE_THE_END)
    return train(publish=True, run_name="bad", algorithms=[failing], **consumers)


def killed(folder: Path) -> dict[str, Any]:
    """Train a run whose second rank is killed."""

    def die(_state: State) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    dying = on_rank(1, die, Event.AFTER_FORWARD, BATCHES_BEFORE_THE_END)
    return train(publish=True, run_name="r", algorithms=[dying])


def commanded(folder: Path) -> dict[str, Any]:
    """Train a run that receives commands."""
    rates: dict[int, float] = {}

    def note(_event: Event, state: State, _logger: object) -> None:
        batch = state.timestamp.values[2]
        rates[batch] = state.optimizers[0].param_groups[0]["lr"]
        if batch == 3 and state.rank == 0:
            sender.start()

    def send() -> None:
        outcomes = [
            send_command(find_run("r"), *command, wait=60)
            for command in (("set", "lr", 0.025), ("pause",), ("resume",), ("stop",))
        ]
        told = [[one.command.name, one.batch, one.error] for one in outcomes]
        (folder / "outcomes.json").write_text(json.dumps(told))

    sender = threading.Thread(target=send)
    algorithms = [Act(note, Event.BATCH_END)]
    result = train(publish=True, run_name="r", max_duration="100000ba", max_delay=0, algorithms=algorithms)
    if sender.ident is not None:
        sender.join()
    return {**result, "lr_by_batch": rates}


JUDGE = """
from offloop.bus import Event, Subscriber
with Subscriber("r", events=[Event.BATCH_END], name="judge", barrier_events=[Event.BATCH_END]) as stream:
    for snapshot in stream:
        if snapshot.rank == 0 and snapshot.timestamp.batch == 7:
            snapshot.stop_training()
"""


def judged(_folder: Path) -> dict[str, Any]:
    """Train a run that waits for a consumer, which stops it."""

    def begin(_event: Event, state: State, _logger: object) -> None:
        if state.rank == 0:
            subprocess.Popen([sys.executable, "-c", JUDGE])

    algorithms = [Act(begin, Event.INIT)]
    return train(publish=True, run_name="r", max_duration="50ep", algorithms=algorithms, wait_for="judge")


def write(folder: Path, result: dict[str, Any]) -> None:
    """Leaves what this rank has come to for the test."""
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(result))


def run(names: Iterable[str], path: str) -> None:
    """Run jobs on this rank, one after the other."""
    torch.set_num_threads(1)
    jobs = {"agreement": agreement, "checkpoints": checkpoints, "published": published, "killed": killed}
    jobs |= {"commanded": commanded, "judged": judged}
    for name in names:
        folder = Path(path, name)
        folder.mkdir(exist_ok=True)
        os.environ["OFFLOOP_RUNS_DIR"] = str(folder / "runs")
        write(folder, jobs[name](folder))


if __name__ == "__main__":
    run(sys.argv[1:-1], sys.argv[-1])
