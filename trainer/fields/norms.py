"""Norms of gradients, weights, moments and updates, in a few steps of the device each."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.event import Event
from offloop.trainer.engine.state import State
from offloop.trainer.fields.field import BATCH_RESULTS, Field, hook_optimizers

_MOMENTS = ("exp_avg", "momentum_buffer")
_GLOBAL = "l2_norm/grad/global"

SHARDED = (
    "with fsdp_config each rank has a part of the weights, and their norms need all ranks at once: log them from "
    "an algorithm"
)
"""The reason why a training with sharded weights has none of these fields."""


@torch.no_grad()
def l2_norms(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the L2 norm of each tensor, in the same order, as scalars on the tensors' devices.

    Tensors of one dtype and device are processed together. Norms of half precision and of whole numbers are float32.
    For sparse gradients, of which only the values count, the host waits for the GPU."""
    tensors = list(tensors)
    _refuse_sharded(tensors)
    dense = [_dense(one) for one in tensors]
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, one in enumerate(dense):
        groups.setdefault((one.device, one.dtype), []).append(index)
    norms: dict[int, Tensor] = {}
    for (_, dtype), indices in groups.items():
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else None
        found = torch._foreach_norm([dense[index] for index in indices], 2, dtype=wide)
        norms.update(zip(indices, found, strict=True))
    return [norms[index] for index in range(len(dense))]


def _dense(tensor: Tensor) -> Tensor:
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce().values()
    return tensor if tensor.is_floating_point() or tensor.is_complex() else tensor.float()


def _is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "device_mesh")


def _refuse_sharded(tensors: Iterable[Tensor]) -> None:
    if any(map(_is_sharded, tensors)):
        # The ranks receive the demand at different times; a rank that computes alone would wait for the others.
        raise ConfigurationError(SHARDED)


def _joint(norms: list[Tensor]) -> Tensor:
    if not norms:
        return torch.tensor(0.0)
    # Never from a GPU to the host, which would wait.
    device = next((one.device for one in norms if one.device.type != "cpu"), norms[0].device)
    total: Tensor = torch.linalg.vector_norm(torch.stack([one.to(device, non_blocking=True) for one in norms]))
    return total


def _norm_of_all(tensors: Mapping[str, Tensor]) -> Tensor:
    return _joint(l2_norms(tensors.values()))


def _norms_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return dict(zip(tensors, l2_norms(tensors.values()), strict=True))


def _gradients(state: State) -> dict[str, Tensor]:
    """Return the gradients as the optimizers use them; infinite or NaN in a batch whose step the scaler skips."""
    named = state.model.named_parameters()
    gradients = {name: one.grad for name, one in named if one.requires_grad and one.grad is not None}
    _refuse_sharded(gradients.values())
    return gradients


def _parameters(state: State) -> dict[str, Tensor]:
    named = state.model.named_parameters()
    return {name: one for name, one in named if one.is_floating_point() or one.is_complex()}


def moment_norms(state: State) -> dict[str, Tensor]:
    moments = {}
    for name, parameter in state.model.named_parameters():
        for optimizer in state.optimizers:
            kept = optimizer.state.get(parameter, {})
            moment = next((kept[one] for one in _MOMENTS if isinstance(kept.get(one), Tensor)), None)
            if moment is not None:
                moments[name] = moment
    if not moments:
        kinds = ", ".join(type(one).__name__ for one in state.optimizers) or "none"
        raise ConfigurationError(
            f"no optimizer keeps moments ({kinds}): use one that does, such as SGD with momentum=0.9 or AdamW"
        )
    return _norms_of(moments)


def optimizer_norms(state: State) -> dict[str, Any]:
    """Return the optimizers' metrics of each parameter and the L2 norms of all gradients, under the reference's names.

    An optimizer may have a method ``report_per_parameter_metrics(parameter, name, metrics)``, which returns ``metrics``
    with its own added; its tensors are read without waiting. Reference: ``composer/callbacks/optimizer_monitor.py``."""
    gradients = _gradients(state)
    parameters = dict(state.model.named_parameters())
    reporters = {id(one): reporter for one, reporter in _reporters(state)}
    metrics: dict[str, Any] = {}
    missing: dict[str, Tensor] = {}
    for name, gradient in gradients.items():
        key = f"l2_norm/grad/{name}"
        if (reporter := reporters.get(id(parameters[name]))) is not None:
            metrics = reporter(parameters[name], name, metrics)
        if key not in metrics:
            # A place for the norm, which is computed for all at once.
            metrics[key] = None
            missing[key] = gradient
    metrics.update(_norms_of(missing))
    norms = [metrics[f"l2_norm/grad/{name}"] for name in gradients]
    return {**metrics, _GLOBAL: _joint([torch.as_tensor(one) for one in norms])}


def _reporters(state: State) -> Iterator[tuple[Tensor, Callable[[Tensor, str, dict[str, Any]], dict[str, Any]]]]:
    for optimizer in state.optimizers:
        reporter = getattr(optimizer, "report_per_parameter_metrics", None)
        if callable(reporter):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    yield parameter, reporter


class UpdateProbe:
    """Copies the trained weights before the optimizers step, in the requested batches: exact for any optimizer."""

    def __init__(self, state: State, is_due: Callable[[], bool]) -> None:
        self._state = state
        self._is_due = is_due
        self._kept_at = -1
        self._before: dict[str, tuple[Tensor, Tensor]] = {}
        self._trouble: str | None = None
        # A hook for all optimizers: the training's may not exist yet, or change before they step.
        hook_optimizers(register_optimizer_step_pre_hook, self._before_step)

    def norms(self) -> dict[str, Tensor]:
        _refuse_sharded(self._state.model.parameters())
        before, self._before = self._before, {}
        if self._trouble is not None:
            raise ConfigurationError(self._trouble)
        if not before:
            raise ConfigurationError(
                "the optimizers have not stepped in this batch, or it began before the field was requested"
            )
        kept = [old for old, _ in before.values()]
        torch._foreach_sub_(kept, [parameter.detach() for _, parameter in before.values()])
        return dict(zip(before, l2_norms(kept), strict=True))

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        state = self._state
        batch = state.timestamp.values.batch
        if batch == self._kept_at or all(optimizer is not one for one in state.optimizers):
            return
        self._kept_at = batch
        self._before, self._trouble = {}, None
        parameters = {name: one for name, one in state.model.named_parameters() if one.requires_grad}
        if self._is_due() and not any(map(_is_sharded, parameters.values())):
            try:
                kept = [torch.empty_like(one) for one in parameters.values()]
                torch._foreach_copy_(kept, [one.detach() for one in parameters.values()], non_blocking=True)
            # This runs within the optimizer's step: a copy that does not fit into memory must not end the training.
            except RuntimeError as error:
                self._trouble = f"{type(error).__name__}: {error}".splitlines()[0]
                return
            self._before = {name: (old, parameters[name]) for name, old in zip(parameters, kept, strict=True)}


_AFTER_STEP = frozenset({Event.BATCH_END})

NORM_FIELDS: dict[str, Field] = {
    "gradient_norm": Field(lambda state: _norm_of_all(_gradients(state)), BATCH_RESULTS),
    "gradient_norms": Field(lambda state: _norms_of(_gradients(state)), BATCH_RESULTS),
    "parameter_norm": Field(lambda state: _norm_of_all(_parameters(state))),
    "parameter_norms": Field(lambda state: _norms_of(_parameters(state))),
    "moment_norms": Field(moment_norms, _AFTER_STEP),
    "update_norms": Field(UpdateProbe.norms, _AFTER_STEP, probe=UpdateProbe),
    "optimizer_norms": Field(optimizer_norms, _AFTER_STEP),
}
