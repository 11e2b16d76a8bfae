"""The fields of norms, of a model that is sharded in several ways: what each rank publishes, and the whole norms."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from offloop.bus import Event
from offloop.bus.types.demand import Demand, EventDemand
from offloop.bus.types.histograms import BINS, MAX_EXPONENT, MIN_EXPONENT, SIDE
from offloop.trainer import State
from offloop.trainer.device.device import CpuDevice
from offloop.trainer.fields.norms import NORM_FIELDS
from offloop.trainer.fields.registry import FieldsOnDemand


class Reporting(torch.optim.AdamW):
    """An optimizer with a report, as Composer's have."""

    def report_per_parameter_metrics(self, parameter: Any, name: str, metrics: dict[str, Any]) -> dict[str, Any]:
        moment, norm = self.state[parameter]["exp_avg"], torch.linalg.vector_norm
        return metrics | {f"l2_norm/moment/{name}": norm(moment), f"l2_norm/param/{name}": norm(parameter)}


class Odd(nn.Module):
    """Sizes that no number of ranks divides, parameters smaller than it, and a matrix in two places."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.front = nn.Linear(7, 7, bias=False)
        self.wide = nn.Linear(7, 12)
        self.narrow = nn.Linear(12, 3)
        self.back = nn.Linear(7, 7, bias=False)
        self.back.weight = self.front.weight
        self.scale = nn.Parameter(torch.full((1,), 1.5))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.back(torch.tanh(self.front(rows)))
        result: torch.Tensor = self.scale * self.narrow(torch.tanh(self.wide(hidden)))
        return result


def norms_of(shard: Callable[[Any], object], rank: int = 0, ranks: int = 1) -> dict[str, Any]:
    """Return the fields of one rank after a step with the same data on all, and the norms of the whole tensors."""
    model = Odd()
    shard(model)
    state = State(model=model, device=CpuDevice(), seed=1, run_name="r", rank=rank, world_size=ranks)
    state.optimizers = [Reporting(model.parameters(), lr=0.1)]
    fields = FieldsOnDemand(state, NORM_FIELDS)
    fields.use(Demand({Event.BATCH_END: EventDemand(1, dict.fromkeys(NORM_FIELDS, 1))}))
    before = {name: whole(one).clone() for name, one in model.named_parameters()}
    torch.manual_seed(7)
    model(torch.randn(5, 7)).square().mean().backward()
    state.optimizers[0].step()
    if shard is unfinished:
        for one in model.parameters():
            one.grad = DTensor.from_local(torch.ones(one.shape), one.device_mesh, [Partial()])  # type: ignore[attr-defined]
    found: dict[str, Any] = {}
    for turn in range(ranks):
        # One after the other: a rank that needed another one would wait for it in vain.
        if turn == rank:
            found = fields.compute(Event.BATCH_END, sorted(NORM_FIELDS))
        if ranks > 1:
            dist.barrier()
    parameters = dict(model.named_parameters())
    moments = {name: state.optimizers[0].state[one]["exp_avg"] for name, one in parameters.items()}
    expected = {
        "gradient_norms": {name: norm(one.grad) for name, one in parameters.items()},
        "parameter_norms": {name: norm(one) for name, one in parameters.items()},
        "moment_norms": {name: norm(one) for name, one in moments.items()},
        "update_norms": {name: norm(whole(one) - before[name]) for name, one in parameters.items()},
        "gradient_histograms": {name: histogram(whole(one.grad)) for name, one in parameters.items()},
        "parameter_histograms": {name: histogram(whole(one)) for name, one in parameters.items()},
    }
    return {"found": found, "expected": expected}


def whole(tensor: Any) -> torch.Tensor:
    result: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return result.detach()


def norm(tensor: Any) -> float:
    return float(torch.linalg.vector_norm(whole(tensor).double()))


def histogram(tensor: torch.Tensor) -> list[int]:
    """Return the counts of the values, one by one."""
    counts = [0] * (BINS + 1)
    for value in tensor.flatten().tolist():
        if not math.isfinite(value):
            counts[BINS] += 1
            continue
        exponent = min(math.frexp(value)[1], MAX_EXPONENT)
        size = max(0, exponent - MIN_EXPONENT + 1) if value else 0
        counts[SIDE + (size if value > 0 else -size)] += 1
    return counts


def fsdp(model: Any) -> None:
    for unit in (model.wide, model.narrow, model):
        fully_shard(unit)


def hsdp(model: Any) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard")))


def mixed_precision(model: Any) -> None:
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


def partly(model: Any) -> None:
    """The scale is not sharded."""
    fully_shard(model, ignored_params={model.scale})


def tensor_parallel(model: Any) -> None:
    split(model, init_device_mesh("cpu", (4,)))


def two_dimensions(model: Any) -> None:
    """Tensors that are not split are on each rank of the second dimension, which their mesh does not have."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    split(model, mesh["tensor"])
    fully_shard(model, mesh=mesh["data"])


def pipeline(model: Any) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))["data"])


def unfinished(model: Any) -> None:
    """The gradients are parts of sums."""
    fully_shard(model)


def split(model: Any, mesh: Any) -> None:
    parallelize_module(model, mesh, {"wide": ColwiseParallel(), "narrow": RowwiseParallel()})


LAYOUTS = [fsdp, hsdp, mixed_precision, partly, tensor_parallel, two_dimensions, pipeline, unfinished]


def layouts(folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = {shard.__name__: norms_of(shard, rank, dist.get_world_size()) for shard in LAYOUTS}
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
