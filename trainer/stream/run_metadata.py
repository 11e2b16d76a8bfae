"""Facts that a run publishes once: its machine, and the sizes of its data."""

import contextlib
import os
import platform
import socket
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from offloop.trainer.distributed.ranks import local_world_size
from offloop.trainer.engine.state import State
from offloop.trainer.fields.norms import NORM_FIELDS, SHARDED


def describe_system(state: State) -> dict[str, Any]:
    """The machine of this rank and its software, as plain values; unknown ones are left out."""
    on_gpu = state.device.name == "gpu"
    ranks_here = local_world_size(state.world_size)
    facts = {
        "host": socket.gethostname(),
        "operating_system": f"{platform.system()} {platform.release()}",
        **_processors(),
        "cpu_threads": os.cpu_count(),
        "memory_bytes": _memory(),
        "nodes": max(state.world_size // ranks_here, 1),
        "accelerators": ranks_here if on_gpu else 0,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_gpu else None,
    }
    with contextlib.suppress(PackageNotFoundError):
        facts["offloop"] = version("offloop")
    return {name: value for name, value in facts.items() if value is not None}


def describe_unavailable(is_sharded: bool) -> dict[str, Any]:
    """The fields that a training never has, for the description of its run: norms, where its weights are sharded."""
    return {"unavailable": {"fields": dict.fromkeys(NORM_FIELDS, SHARDED)}} if is_sharded else {}


def describe_sizes(state: State) -> dict[str, Any]:
    """Seed, batch sizes, numbers of samples, and the time spent evaluating before; unknown ones are left out."""
    batch = getattr(state.train_dataloader, "batch_size", None)
    batch = batch if type(batch) is int else None
    # An attached training has none: it is not known which evaluations are to come.
    evaluators = getattr(state, "evaluators", None)
    evaluated = [_samples(evaluator.dataloader) for evaluator in evaluators or ()]
    facts = {
        "seed": state.seed,
        "global_train_batch_size": None if batch is None else batch * state.world_size,
        "device_train_microbatch_size": state.device_train_microbatch_size or batch,
        "train_samples": _samples(state.train_dataloader),
        "evaluators": None if evaluators is None else [one.label for one in evaluators],
        "eval_samples": None if evaluators is None or None in evaluated else sum(filter(None, evaluated)),
        "total_eval_wct": state.total_eval_wct or None,
    }
    return {name: value for name, value in facts.items() if value is not None}


def _samples(dataloader: Any) -> int | None:
    # Datasets of a stream have no length, or one that raises.
    with contextlib.suppress(TypeError, NotImplementedError, AttributeError):
        return len(dataloader.dataset)
    return None


def _processors() -> dict[str, Any]:
    model, cores = platform.processor() or None, set()
    with contextlib.suppress(OSError):
        for block in Path("/proc/cpuinfo").read_text().split("\n\n"):
            lines = (line.partition(":") for line in block.splitlines())
            found = {name.strip(): value.strip() for name, _, value in lines}
            model = found.get("model name", model)
            if "core id" in found:
                cores.add((found.get("physical id"), found["core id"]))
    return {"cpu": model, "cpu_cores": len(cores) or None}


def _memory() -> int | None:
    with contextlib.suppress(ValueError, OSError, AttributeError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None
