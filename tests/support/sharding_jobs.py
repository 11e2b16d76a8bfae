"""Trainings with sharded weights on two ranks, which write their results to ``FOLDER/rank-N.json``."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gold import GoldMLP, gold_data
from ranks_jobs import rank_loader
from resumed import Augmented
from torch import nn
from torch.utils.data import DataLoader
from training import Act, gold_trainer

from offloop.bus.errors import OffloopError
from offloop.bus.types.event import Event
from offloop.consumers import JsonlLogger, OptimizerMonitor
from offloop.trainer import Classifier, Evaluator, RankBatchSampler, State, Trainer
from offloop.trainer.algorithms import GradientClipping
from offloop.trainer.distributed.sharding import FullySharded

LAST = "ep3-ba15-rank0.safetensors"


class Tied(nn.Module):
    """A model whose first and last layer are one matrix, each in a container of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh())
        self.back = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4))
        self.back[0].weight = self.front[0].weight

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.back(self.front(inputs))


def comparable(**arguments: Any) -> Trainer:
    """Return a training of three epochs whose result does not depend on the number of ranks."""
    model = GoldMLP()
    settings: dict[str, Any] = {
        "model": model,
        "train_dataloader": rank_loader(shuffle=True),
        "optimizers": torch.optim.AdamW(model.parameters(), lr=0.01),
        "algorithms": GradientClipping("norm", 0.2),
        "max_duration": "3ep",
    }
    return gold_trainer(**(settings | arguments))


def random_training(**arguments: Any) -> Trainer:
    """Return a training in which everything is drawn at random: order, noise, dropout; with accumulated gradients."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 4))
    data = Augmented(24)
    settings: dict[str, Any] = {
        "model": Classifier(net),
        "train_dataloader": DataLoader(data, batch_sampler=RankBatchSampler(data, 8, shuffle=True)),
        "optimizers": torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9),
        "device_train_microbatch_size": 2,
        "max_duration": "3ep",
    }
    return gold_trainer(**(settings | arguments))


def fitted(trainer: Trainer) -> Trainer:
    """Train, and return the trainer."""
    trainer.fit()
    return trainer


def weights(trainer: Trainer) -> dict[str, Any]:
    """Return the whole weights and buffers, as lists; all ranks have to ask."""
    return {name: _whole(value).tolist() for name, value in trainer.state.model.state_dict().items()}


def moments(trainer: Trainer) -> list[Any]:
    """Return the optimizer's state of each weight as lists; all ranks have to ask."""
    states = trainer.state.optimizers[0].state_dict()["state"].values()
    return [_whole(value).tolist() for state in states for value in state.values()]


def _whole(value: Any) -> torch.Tensor:
    whole: torch.Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole


def error_of(attempt: Callable[[], object]) -> str:
    """Return the kind and text of the error of ours that it raises."""
    try:
        attempt()
    except OffloopError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def flip_last_byte(file: Path) -> None:
    """Damages a file."""
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def same(folder: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Weights of trainings that are to end as :func:`comparable` on one rank, and the sizes of one."""
    trainings = {
        "one unit for each layer": fitted(comparable(fsdp_config={}, save_folder=folder / "saved")),
        "one unit for all": fitted(comparable(fsdp_config={"shard": [], "reshard_after_forward": True})),
        "units by class": fitted(comparable(fsdp_config={"shard": ["Linear", nn.Tanh]})),
        "a function for optimizers": fitted(
            comparable(fsdp_config={}, optimizers=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01))
        ),
    }
    found = {name: weights(trainer) for name, trainer in trainings.items()}
    return found, sizes(trainings["one unit for each layer"])


def sizes(trainer: Trainer) -> dict[str, int]:
    """Numbers on this rank, and in the whole model."""
    model, optimizer = trainer.state.model, trainer.state.optimizers[0]
    averages = [state["exp_avg"].to_local().numel() for state in optimizer.state.values()]
    return {
        "weights": sum(parameter.to_local().numel() for parameter in model.parameters()),
        "averages": sum(averages),
        "all": sum(parameter.numel() for parameter in model.parameters()),
    }


def resumed(folder: Path) -> dict[str, Any]:
    """Trainings that went on in the middle of an epoch, and those that were not interrupted."""
    found: dict[str, Any] = {}
    for name, config in (("sharded", {}), ("whole", None)):
        save = {"save_folder": folder / name, "save_interval": "4ba", "save_num_checkpoints_to_keep": 2}
        trainer = fitted(random_training(fsdp_config=config, **save))
        found[name] = [weights(trainer), moments(trainer)]
    paths = {
        "sharded from sharded": (folder / "sharded" / "ep2-ba8-rank0.safetensors", {}),
        "sharded from whole": (folder / "whole" / "ep2-ba8-rank0.safetensors", {}),
        "whole from sharded": (folder / "sharded" / "ep2-ba8-rank0.safetensors", None),
    }
    for name, (path, config) in paths.items():
        trainer = fitted(random_training(fsdp_config=config, load_path=path))
        found[name] = [weights(trainer), moments(trainer)]
    again = {
        "load_path": {"load_path": folder / "sharded"},
        "autoresume": {"save_folder": folder / "sharded", "run_name": "again", "autoresume": True},
    }
    found["latest"] = {
        name: int(random_training(fsdp_config={}, **how).state.timestamp.batch) for name, how in again.items()
    }
    return found


def evaluated() -> dict[str, Any]:
    """Evaluate and predict with four batches on the first rank and two on the other."""
    inputs, targets = gold_data("eval_a", 12)
    batches = list(zip(inputs.split(2), targets.split(2), strict=True))
    own = batches[:4] if dist.get_rank() == 0 else batches[4:]
    found = {}
    for name, config in (("whole", None), ("sharded", {"shard": []})):
        trainer = comparable(fsdp_config=config, eval_dataloader=Evaluator("unequal", own))
        trainer.fit()
        found[name] = trainer.state.eval_metric_values["unequal"]
    found["predicted"] = len(trainer.predict(own))
    with torch.no_grad():
        for parameter in trainer.state.model.parameters():
            parameter.zero_()
    found["after a change"] = [output.abs().max().item() for output in trainer.predict(own)]
    return found


def refused(folder: Path) -> dict[str, str]:
    """Return the errors of models and checkpoints."""
    scalar = GoldMLP()
    scalar.scale = nn.Parameter(torch.tensor(1.0))
    trainer = comparable(fsdp_config={})
    device = trainer.state.device
    (folder / "file").touch()
    found = {
        "unknown class": error_of(lambda: FullySharded(GoldMLP(), device, shard=["Block"])),
        "number as a weight": error_of(lambda: FullySharded(scalar, device)),
        "not writable": error_of(lambda: trainer.save_checkpoint(folder / "file" / "checkpoint")),
    }
    resume = {"run_name": "unreadable", "save_folder": folder / "unreadable", "autoresume": True}
    if dist.get_rank() == 0:
        (folder / "unreadable" / "ep1-ba4-rank0.safetensors" / "shards").mkdir(parents=True)
        (folder / "unreadable" / "ep1-ba4-rank0.safetensors" / "training.safetensors").write_bytes(b"damaged")
    found["none can be read"] = error_of(lambda: comparable(fsdp_config={}, **resume))
    found["from scratch"] = error_of(lambda: comparable(fsdp_config={}, from_scratch=True, **resume).fit())
    path = trainer.save_checkpoint(folder / "damaged")
    if dist.get_rank() == 0:
        # Only the second rank reads this file.
        flip_last_byte(path / "shards" / "rank1.safetensors")
    dist.barrier()
    checkpoints, sharding = trainer._setup.checkpoints, trainer._setup.forward_pass.parallel
    found["damaged"] = error_of(lambda: checkpoints._read_sharded(path, sharding))
    other = error_of(lambda: random_training(fsdp_config={}, load_path=folder / "saved" / LAST))
    return found | {"another model": other}


def tied() -> dict[str, Any]:
    """Return a model with one matrix in two places, with DDP and with sharded weights."""
    found = []
    for config in (None, {}):
        torch.manual_seed(1)
        model = Classifier(Tied())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found.append(fitted(comparable(fsdp_config=config, model=model, optimizers=optimizer)))
    module = found[1].state.model.module
    return {"weights": [weights(one) for one in found], "is one": module.front[0].weight is module.back[0].weight}


def saved_again(folder: Path) -> dict[str, Any]:
    """Checkpoints of one name, one after the other."""
    trainer = comparable(fsdp_config={})
    trainer.save_checkpoint(folder / "again")
    trainer.fit()
    path = trainer.save_checkpoint(folder / "again")
    loaded = comparable(fsdp_config={}, load_path=path, load_weights_only=True)
    return {"expected": weights(trainer), "found": weights(loaded)}


DIES_AT = 7
"""The batch before whose end the second rank is killed."""


def killed(folder: Path) -> None:
    """Train with a monitor of norms until the second rank is killed."""

    def watch(_: Event, state: State, __: object) -> None:
        if state.rank == 1 and state.timestamp.batch == DIES_AT:
            while not trainer.recorded_all:
                trainer._publisher.wait()
            os.kill(os.getpid(), signal.SIGKILL)

    trainer: Any = comparable(
        fsdp_config={},
        publish=True,
        run_name="sharded",
        runs_dir=folder,
        callbacks=OptimizerMonitor(batch_log_interval=1),
        loggers=JsonlLogger(str(folder / "rows.jsonl")),
        algorithms=[GradientClipping("norm", 0.2), Act(watch, Event.BATCH_END)],
    )
    trainer.fit()


def main(path: str) -> None:
    """Run everything on this rank; at last the second one is killed."""
    torch.set_num_threads(1)
    folder = Path(path)
    # Joins the ranks.
    with gold_trainer(train_dataloader=rank_loader()) as trainer:
        rank = trainer.state.rank
    same_weights, part = same(folder)
    found = {
        "same": same_weights,
        "sizes": part,
        "resumed": resumed(folder),
        "evaluated": evaluated(),
        "tied": tied(),
        "saved again": saved_again(folder),
        "refused": refused(folder),
    }
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    killed(folder / "killed")
