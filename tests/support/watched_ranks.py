"""Watched loops on several ranks, for ``run_two_ranks``.

Each rank writes what it saw to ``rank-N.json``: of each part its losses, what was done on command after which batch,
and a sum over its weights.
"""

import json
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import offloop
from offloop.attached import joining
from offloop.attached.training import AttachedTraining
from offloop.bus.types.commands import Command

BATCHES = 12


def train(name: str, folder: Path, watched: bool = True, commands: dict[int, Any] | None = None) -> dict[str, Any]:
    """Trains on this rank's part of the data; ``commands`` come to the first rank, by batch."""
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    data = [torch.randn(3, 4) for _ in range(BATCHES)]
    done: list[tuple[str, int]] = []
    losses: list[float] = []

    def evaluate() -> None:
        done.append(("evaluate", len(losses)))

    def checkpoint() -> None:
        done.append(("checkpoint", len(losses)))

    def set_heat(value: Any) -> None:
        done.append((f"heat {value}", len(losses)))

    run = None
    if watched:
        run = offloop.watch(
            *(model, optimizer),
            run_name=name,
            runs_dir=folder / "runs",
            evaluate=evaluate,
            checkpoint=checkpoint,
            on_set={"heat": set_heat},
        )
    for batch in data if run is None else (batch for _ in run.epochs(1) for batch in run.batches(data)):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if run is not None:
            run.log(loss=loss)
            send = (commands or {}).get(len(losses))
            if send is not None and dist.get_rank() == 0:
                send(run)
    weights = [parameter.detach().tolist() for parameter in model.parameters()]
    return {"losses": losses, "done": done, "weights": weights, "lr": optimizer.param_groups[0]["lr"]}


def leave(name: str, folder: Path) -> list[float]:
    """Trains until an error, with which the first rank leaves before the second."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = offloop.watch(model, optimizer, run_name=name, runs_dir=folder / "runs")
    losses: list[float] = []
    for batch in run.batches([torch.ones(3, 4)] * BATCHES):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        losses.append(loss.item())
        if len(losses) == 3:
            break
    if dist.get_rank() == 1:
        dist.barrier()
    run.close(ValueError("the user's"))
    if dist.get_rank() == 0:
        dist.barrier()
    return losses


def train_unevenly(name: str, folder: Path) -> list[int]:
    """Trains two epochs, in which the second rank has two more batches than the first; returns the batches of each."""
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = offloop.watch(model, optimizer, run_name=name, runs_dir=folder / "runs")
    trained = []
    with model.join():
        for _ in run.epochs(2):
            trained.append(0)
            for batch in run.batches([torch.ones(3, 4)] * (3 + 2 * dist.get_rank())):
                model(batch).square().mean().backward()
                optimizer.step()
                trained[-1] += 1
    return trained


def taking(*commands: tuple[Any, ...]) -> Any:
    """Has commands arrive."""

    def send(run: Any) -> None:
        for name, *arguments in commands:
            run._training._control.take(Command(name, tuple(arguments), id=f"{name} {arguments}"))

    return send


def pause_for_a_while(run: Any) -> None:
    """Has the training pause, and continue half a second later."""
    taking(("pause",))(run)
    threading.Timer(0.5, lambda: taking(("resume",))(run)).start()


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = {
        "plain": train("plain", folder, watched=False),
        "commanded": train(
            "commanded",
            folder,
            commands={
                3: taking(("set", "heat", 2), ("set", "eval", "now"), ("checkpoint",), ("set", "lr", 0.2)),
                4: taking(("profile", "1ba", "1"), ("profile", "1ba", "0,2")),
                5: pause_for_a_while,
                8: taking(("stop",)),
            },
        ),
        "watched": train("watched", folder),
    }
    batch_end = AttachedTraining.batch_end

    def fail_on_the_second_rank(self: AttachedTraining, **counts: Any) -> None:
        if rank == 1 and self.state.timestamp.values.batch == 4:
            raise RuntimeError("a defect of ours")
        batch_end(self, **counts)

    AttachedTraining.batch_end = fail_on_the_second_rank  # type: ignore[method-assign]
    found["failing"] = train("failing", folder)
    AttachedTraining.batch_end = batch_end  # type: ignore[method-assign]
    found["left"] = leave("left", folder)
    found["uneven"] = train_unevenly("uneven", folder)
    joining.PATIENCE = 2.0
    found["alone"] = train("alone", folder, watched=rank == 0)
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
