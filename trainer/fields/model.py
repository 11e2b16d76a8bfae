"""Fields of the model and of the GPU."""

from typing import Any

import torch

from offloop.bus.errors import ConfigurationError
from offloop.trainer.engine.state import State
from offloop.trainer.fields.field import Field, FieldUnsupportedError

MAX_MODULES = 1000
"""The most modules in a summary."""

_COLUMNS = ["name", "class", "parameters", "trainable"]


def model_summary(state: State) -> dict[str, Any]:
    """The model's class, its numbers of parameters and of trained ones, and a row for each of up to :data:`MAX_MODULES`
    modules: dotted name, class, and the same counts, each parameter counted once."""
    model = state.model
    modules = list(model.named_modules())
    return {
        "name": type(model).__name__,
        **dict(zip(("parameters", "trainable"), _counted(model), strict=True)),
        "columns": _COLUMNS,
        "modules": [[name, type(module).__name__, *_counted(module)] for name, module in modules[:MAX_MODULES] if name],
        "modules_left_out": max(0, len(modules) - MAX_MODULES),
    }


def _counted(module: torch.nn.Module) -> tuple[int, int]:
    parameters = list(module.parameters())
    return sum(one.numel() for one in parameters), sum(one.numel() for one in parameters if one.requires_grad)


def memory_stats(state: State) -> dict[str, int]:
    """:func:`torch.cuda.memory_stats` for this rank's GPU: mostly bytes, and counts since the start."""
    _require_gpu(state, "what a CUDA allocator says")
    return dict(torch.cuda.memory_stats(state.device.torch_device))


def gpu_utilization(state: State) -> int:
    """The share of the last sample period in which this rank's GPU was at work, in percent, as NVML measures it."""
    _require_gpu(state, "measured on a CUDA device")
    try:
        return torch.cuda.utilization(state.device.torch_device)
    except ModuleNotFoundError:
        raise ConfigurationError("it takes NVML: pip install nvidia-ml-py where the training runs") from None


def _require_gpu(state: State, what: str) -> None:
    if state.device.name != "gpu":
        raise FieldUnsupportedError(f"it is {what}, and this training runs on {state.device.model_name}")


MODEL_FIELDS: dict[str, Field] = {
    "model_summary": Field(
        model_summary,
        unit="parameters",
        shape="map with a table of modules",
        description="the model's class, its parameters, and a row for each module",
    ),
    "memory_stats": Field(
        memory_stats,
        unit="bytes and counts",
        shape="map of statistic to number",
        description="torch.cuda.memory_stats(), as it is; not on a CPU",
    ),
    "gpu_utilization": Field(
        gpu_utilization, unit="percent", shape="number", description="how busy the GPU is, by NVML; not on a CPU"
    ),
}
"""The fields of the model and its device."""
