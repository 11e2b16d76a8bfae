"""Fields of the model, its modules' activations, and the GPU."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from offloop.bus.errors import ConfigurationError
from offloop.trainer.device.batch import walk_tensors
from offloop.trainer.engine.state import State
from offloop.trainer.fields.field import BATCH_RESULTS, Field, FieldUnsupportedError, ProbeHook

MAX_MODULES = 1000  # limit of the modules in a summary

_COLUMNS = ["name", "class", "parameters", "trainable"]


def model_summary(state: State) -> dict[str, Any]:
    """Summarise the model: its class, its numbers of parameters and of trained ones, and a row for each module.

    A row has the dotted name, the class and the same counts. Each parameter is counted once."""
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
    _require_gpu(state, "the report of a CUDA allocator")
    return dict(torch.cuda.memory_stats(state.device.torch_device))


def gpu_utilization(state: State) -> int:
    _require_gpu(state, "measured on a CUDA device")
    try:
        return torch.cuda.utilization(state.device.torch_device)
    except ModuleNotFoundError:
        raise ConfigurationError("it needs NVML: pip install nvidia-ml-py where the training runs") from None


def _require_gpu(state: State, what: str) -> None:
    if state.device.name != "gpu":
        raise FieldUnsupportedError(f"it is {what}, and this training runs on {state.device.model_name}")


MODEL_FIELDS: dict[str, Field] = {
    "model_summary": Field(model_summary),
    "memory_stats": Field(memory_stats),
    "gpu_utilization": Field(gpu_utilization),
}


def statistics(values: Tensor) -> dict[str, Tensor]:
    """Compute statistics of a tensor, each as a scalar on its device.

    ``average``, ``std`` (of the population), ``max_abs`` and ``zeros`` (the share of exact zeros) are over all numbers.
    ``l2_norm``, ``max`` and ``kurtosis`` (not the excess: 3 for a normal distribution) are taken over the last
    dimension and averaged over the others, as in ``composer/callbacks/activation_monitor.py``."""
    values = values.detach().float()
    average = values.mean()
    deviations = values - values.mean(-1, keepdim=True)
    variance = deviations.square().mean(-1)
    return {
        "average": average,
        "std": (values - average).square().mean().sqrt(),
        "l2_norm": torch.linalg.vector_norm(values, dim=-1).mean(),
        "kurtosis": (deviations.square().square().mean(-1) / variance.square()).mean(),
        "max": values.amax(-1).mean(),
        "max_abs": values.abs().max(),
        "zeros": (values == 0).float().mean(),
    }


class ActivationProbe:
    """Computes the statistics of a training batch during its first forward pass.

    The model has one hook. In a batch that is due each module has one too, until the pass ends."""

    def __init__(self, state: State, is_due: Callable[[], bool]) -> None:
        self._state = state
        self._is_due = is_due
        self._seen_at = -1
        self._found: dict[str, Tensor] = {}
        self._trouble: str | None = None
        self._of_modules: list[RemovableHandle] = []
        self._model: Any = None
        self._of_model: list[RemovableHandle] = []
        weakref.finalize(self, _remove, self._of_model)
        self._hook_model()

    def found(self) -> dict[str, Tensor]:
        """Return ``STATISTIC/MODULE_input.N`` and ``STATISTIC/MODULE_output.N`` of the batch.

        One for each tensor of real numbers among a module's positional inputs and its outputs. A tensor inside a tuple
        or list is called ``MODULE_N_output.M``."""
        if self._model is not self._state.model:
            self._hook_model()
        if self._trouble is not None:
            raise ConfigurationError(self._trouble)
        if not self._found:
            raise ConfigurationError(
                "no forward pass was seen in this batch: it began before the field was requested, or the model is "
                "compiled, which skips hooks"
            )
        return self._found

    def _begin_pass(self, model: Any, _: Any) -> None:
        batch = self._state.timestamp.values.batch
        if not model.training or batch == self._seen_at:
            return
        self._seen_at = batch
        self._found, self._trouble = {}, None
        if self._is_due():
            self._of_modules += [
                module.register_forward_hook(partial(self._note, name))
                for name, module in model.named_modules()
                if module is not model
            ]

    def _end_pass(self, *_: Any) -> None:
        _remove(self._of_modules)

    def _hook_model(self) -> None:
        _remove(self._of_modules)
        _remove(self._of_model)
        self._found = {}
        self._model = model = self._state.model
        self._of_model += [
            model.register_forward_pre_hook(ProbeHook(self._begin_pass)),
            model.register_forward_hook(ProbeHook(self._end_pass), always_call=True),
        ]

    def _note(self, name: str, _: Any, inputs: Any, outputs: Any) -> None:
        if self._trouble is not None:
            return
        try:
            self._take_statistics(name, inputs, outputs)
        # This runs within the model: a GPU without memory for statistics must not end the training.
        except Exception as error:  # noqa: BLE001
            self._found, self._trouble = {}, f"{type(error).__name__}: {error}".splitlines()[0]

    def _take_statistics(self, name: str, inputs: Any, outputs: Any) -> None:
        given = inputs if isinstance(inputs, tuple) else (inputs,)
        made = outputs if isinstance(outputs, tuple | list) else (outputs,)
        with torch.no_grad():
            for what, values in (("input", given), ("output", made)):
                for index, value in enumerate(values):
                    for place, tensor in walk_tensors(name, value, "_"):
                        for statistic, number in statistics(tensor).items() if _is_measurable(tensor) else ():
                            # Only the first call of a module counts.
                            self._found.setdefault(f"{statistic}/{place}_{what}.{index}", number)


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


def _is_measurable(tensor: Tensor) -> bool:
    is_dense = tensor.layout is torch.strided and not hasattr(tensor, "device_mesh")
    return is_dense and tensor.is_floating_point() and tensor.ndim > 0 and tensor.numel() > 0


ACTIVATION_FIELDS: dict[str, Field] = {
    "activations": Field(ActivationProbe.found, BATCH_RESULTS, probe=ActivationProbe)
}
