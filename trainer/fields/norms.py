"""Norms of gradients, weights, moments and updates, in a few steps of the device each; and histograms."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.event import Event
from offloop.bus.types.histograms import BINS, MAX_EXPONENT, MIN_EXPONENT, SIDE
from offloop.trainer.engine.state import State
from offloop.trainer.fields.field import BATCH_RESULTS, Field, hook_optimizers

_MOMENTS = ("exp_avg", "momentum_buffer")
_GRADIENT = "l2_norm/grad/"
_GLOBAL = f"{_GRADIENT}global"
_AT_ONCE = 1 << 22  # values

_Layout: TypeAlias = tuple[Any, tuple[Any, ...]]  # a DeviceMesh, and the placements of a tensor on it


@torch.no_grad()
def l2_norms(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the L2 norm of each tensor, in the same order, as scalars on the tensors' devices.

    Tensors of one dtype and device are processed together. Norms of half precision and of whole numbers are float32.
    For sparse gradients, of which only the values count, the host waits for the GPU."""
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


def _layout(tensor: Any) -> _Layout | None:
    # Not by its class, whose import takes seconds.
    return (tensor.device_mesh, tuple(tensor.placements)) if hasattr(tensor, "device_mesh") else None


@torch.no_grad()
def _of_ranks(state: State, tensors: Mapping[str, Tensor], norms: Callable[[Mapping[str, Tensor]], Any]) -> Any:
    """Return the norms, or histograms, of whole tensors; of sharded ones those of this rank's shards, to be added up.

    ``None`` on a rank without shards that count. No other rank is asked: the ranks receive the demand at different
    times, and one that computes alone would wait for the others."""
    layouts: dict[_Layout | None, list[str]] = {}
    for name, tensor in tensors.items():
        layouts.setdefault(_layout(tensor), []).append(name)
    if not any(layouts):
        if state.world_size > 1 and any(hasattr(one, "_fsdp_flattened") for one in state.model.parameters()):
            raise ConfigurationError("FullyShardedDataParallel flattens the weights: use torch's fully_shard (FSDP2)")
        return norms(tensors)
    meshes = (layout[0] for layout in map(_layout, state.model.parameters()) if layout)
    if all(mesh.size() < state.world_size for mesh in meshes):
        raise ConfigurationError(
            f"no parameter is spread over all {state.world_size} ranks, as in a pipeline: its norms cannot be added up"
        )
    owners = {layout: _owners(*layout) if layout else {0} for layout in layouts}
    ranks = set().union(*owners.values())
    if state.rank not in ranks:
        return None
    shards = {}
    for layout, names in layouts.items():
        for name in names if state.rank in owners[layout] else ():
            whole: Any = tensors[name]
            shard = whole.to_local() if layout else whole
            if shard.numel():
                shards[name] = shard
    # All owners are known to the first rank, which is one of them.
    return {"shards": norms(shards), "ranks": 0 if state.rank else len(ranks)}


def _owners(mesh: Any, placements: tuple[Any, ...]) -> set[int]:
    """Return the ranks whose shards make up the tensor: of several replicas those of the replica on the first rank."""
    ranks = mesh.mesh
    first = (ranks == 0).nonzero().tolist()
    for dimension, placement in enumerate(placements):
        if placement.is_partial():
            raise ConfigurationError("its tensors are not yet added up over the ranks")
        if first and placement.is_replicate():
            ranks = ranks.narrow(dimension, first[0][dimension], 1)
    # A mesh without the first rank has a replica of a tensor that the first rank has too.
    return set(ranks.flatten().tolist()) if first else set()


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
    return {name: one.grad for name, one in named if one.requires_grad and one.grad is not None}


def _parameters(state: State) -> dict[str, Tensor]:
    named = state.model.named_parameters()
    return {name: one for name, one in named if one.is_floating_point() or one.is_complex()}


def _moments(state: State) -> dict[str, Tensor]:
    moments = {}
    for name, parameter in state.model.named_parameters():
        for optimizer in state.optimizers:
            kept = optimizer.state.get(parameter, {})
            moment = next((kept[one] for one in _MOMENTS if isinstance(kept.get(one), Tensor)), None)
            if moment is not None:
                moments[name] = moment
    return moments


def moment_norms(state: State) -> Any:
    moments = _moments(state)
    if not moments:
        kinds = ", ".join(type(one).__name__ for one in state.optimizers) or "none"
        raise ConfigurationError(
            f"no optimizer keeps moments ({kinds}): use one that does, such as SGD with momentum=0.9 or AdamW"
        )
    return _of_ranks(state, moments, _norms_of)


def optimizer_norms(state: State) -> Any:
    """Return the optimizers' metrics of each parameter and the L2 norms of all gradients, under the reference's names.

    An optimizer may have a method ``report_per_parameter_metrics(parameter, name, metrics)``, which returns ``metrics``
    with its own added; its tensors are read without waiting. With sharded weights it is not called, because it may
    ask other ranks: in its place are the norms of moments and weights. Reference:
    ``composer/callbacks/optimizer_monitor.py``."""
    gradients = _gradients(state)
    parameters = dict(state.model.named_parameters())
    reporters = {id(one): reporter for one, reporter in _reporters(state)}
    if any(map(_layout, gradients.values())):
        reported = [name for name in gradients if id(parameters[name]) in reporters]
        moments = _moments(state) if reported else {}
        named = {f"l2_norm/moment/{name}": moments[name] for name in reported if name in moments}
        named |= {f"l2_norm/param/{name}": parameters[name] for name in reported}
        return _of_ranks(state, named | {f"{_GRADIENT}{name}": one for name, one in gradients.items()}, _with_global)
    metrics: dict[str, Any] = {}
    missing: dict[str, Tensor] = {}
    for name, gradient in gradients.items():
        key = f"{_GRADIENT}{name}"
        if (reporter := reporters.get(id(parameters[name]))) is not None:
            metrics = reporter(parameters[name], name, metrics)
        if key not in metrics:
            # A place for the norm, which is computed for all at once.
            metrics[key] = None
            missing[key] = gradient
    metrics.update(_norms_of(missing))
    norms = [metrics[f"{_GRADIENT}{name}"] for name in gradients]
    return {**metrics, _GLOBAL: _joint([torch.as_tensor(one) for one in norms])}


def _with_global(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    norms = _norms_of(tensors)
    return norms | {_GLOBAL: _joint([norm for name, norm in norms.items() if name.startswith(_GRADIENT)])}


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

    def norms(self) -> Any:
        before, self._before = self._before, {}
        if self._trouble is not None:
            raise ConfigurationError(self._trouble)
        if not before:
            raise ConfigurationError(
                "the optimizers have not stepped in this batch, or it began before the field was requested"
            )

        def changes(after: Mapping[str, Tensor]) -> dict[str, Tensor]:
            kept = [before[name][0] for name in after]
            torch._foreach_sub_(kept, [one.detach() for one in after.values()])
            return dict(zip(after, l2_norms(kept), strict=True))

        return _of_ranks(self._state, {name: parameter for name, (_, parameter) in before.items()}, changes)

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        state = self._state
        batch = state.timestamp.values.batch
        if batch == self._kept_at or all(optimizer is not one for one in state.optimizers):
            return
        self._kept_at = batch
        self._before, self._trouble = {}, None
        if self._is_due():
            parameters = {name: one for name, one in state.model.named_parameters() if one.requires_grad}
            try:
                own = [one.detach().to_local() if _layout(one) else one.detach() for one in parameters.values()]
                kept = [torch.empty_like(one) for one in own]
                torch._foreach_copy_(kept, own, non_blocking=True)
            # This runs within the optimizer's step: a copy that does not fit into memory must not end the training.
            except RuntimeError as error:
                self._trouble = f"{type(error).__name__}: {error}".splitlines()[0]
                return
            self._before = {name: (old, parameters[name]) for name, old in zip(parameters, kept, strict=True)}


@torch.no_grad()
def _histograms_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the number of values in each of the bins, see :mod:`offloop.bus.types.histograms`."""
    found = {}
    for name, tensor in tensors.items():
        values = _dense(tensor.detach())
        values = torch.view_as_real(values) if values.is_complex() else values
        counts = torch.zeros(BINS + 1, dtype=torch.int64, device=values.device)
        one = counts.new_ones(())
        # In parts, because their bins take more memory than they do.
        for part in torch.split(values.flatten(), _AT_ONCE):
            exponents = torch.frexp(part.float())[1].clamp(max=MAX_EXPONENT)
            size = (exponents - (MIN_EXPONENT - 1)).clamp(min=0).where(part != 0, 0)
            bins = (SIDE + size * part.sign()).where(part.isfinite(), BINS).long()
            counts.scatter_add_(0, bins, one.expand(len(bins)))
        found[name] = counts
    return found


_AFTER_STEP = frozenset({Event.BATCH_END})

NORM_FIELDS: dict[str, Field] = {
    "gradient_norm": Field(lambda state: _of_ranks(state, _gradients(state), _norm_of_all), BATCH_RESULTS),
    "gradient_norms": Field(lambda state: _of_ranks(state, _gradients(state), _norms_of), BATCH_RESULTS),
    "parameter_norm": Field(lambda state: _of_ranks(state, _parameters(state), _norm_of_all)),
    "parameter_norms": Field(lambda state: _of_ranks(state, _parameters(state), _norms_of)),
    "moment_norms": Field(moment_norms, _AFTER_STEP),
    "update_norms": Field(UpdateProbe.norms, _AFTER_STEP, probe=UpdateProbe),
    "optimizer_norms": Field(optimizer_norms, _AFTER_STEP),
    "gradient_histograms": Field(lambda state: _of_ranks(state, _gradients(state), _histograms_of), BATCH_RESULTS),
    "parameter_histograms": Field(lambda state: _of_ranks(state, _parameters(state), _histograms_of)),
}
