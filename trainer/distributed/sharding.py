"""Sharded training: each rank keeps a part of every weight.

Only sharded trainings import it, because its imports from torch take a second."""

import atexit
import contextlib
import functools
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from offloop.bus.errors import ConfigurationError
from offloop.trainer.device.device import Device
from offloop.trainer.distributed.ranks import make_equal

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
_POLICIES = {"mp_policy": MixedPrecisionPolicy, "offload_policy": OffloadPolicy}
_KEYS = ("shard", "reshard_after_forward", *_POLICIES)


def check_fsdp_config(config: Any, world_size: int) -> dict[str, Any]:
    if not isinstance(config, Mapping):
        raise ConfigurationError(
            f"fsdp_config is a {type(config).__name__}: give a dict, {{}} for torch's defaults, or None for DDP"
        )
    for key in config:
        if key not in _KEYS:
            raise ConfigurationError(f"fsdp_config has an unknown {key!r}: use {', '.join(_KEYS)}")
    for key, kind in _POLICIES.items():
        if not isinstance(config.get(key), kind | None):
            raise ConfigurationError(
                f"{key} in fsdp_config is a {type(config[key]).__name__}: use torch.distributed.fsdp.{kind.__name__}"
            )
    reshard = config.get("reshard_after_forward")
    if not isinstance(reshard, int | None):
        raise ConfigurationError(
            f"reshard_after_forward in fsdp_config is {reshard!r}: use True, False, None, or a number of ranks"
        )
    shard = config.get("shard")
    if shard is not None and not (
        isinstance(shard, Sequence) and not isinstance(shard, str) and all(isinstance(one, str | type) for one in shard)
    ):
        raise ConfigurationError(
            f"shard in fsdp_config is {shard!r}: use a list of classes of modules or of their names, such as ['Block']"
        )
    if world_size == 1:
        raise ConfigurationError(
            "fsdp_config needs several ranks, and this is a single process: "
            "start them with torchrun --nproc-per-node, or leave fsdp_config out"
        )
    return dict(config)


class FullySharded:
    """Keeps a part of each weight, its gradient and its optimizer state on every rank.

    torch's ``fully_shard`` gathers the weights of a unit of the model when they are needed, and averages the gradients.
    All ranks start with the first rank's weights, as with :class:`offloop.trainer.loop.forward_pass.DataParallel`, and
    use its buffers at the first forward pass of every batch.

    Args:
        model: the whole model, on the device. It is changed in place: its parameters are replaced by sharded ones, by
            rows (``DTensor``).
        device: of the model.
        optimizers: optimizers of the whole parameters continue with the sharded ones and their part of the state. Other
            parameters stay.
        shard: classes, or their names, of the modules that are units. By default these are the outermost modules in an
            ``nn.Sequential``, ``nn.ModuleList`` or ``nn.ModuleDict``. All other parameters are a last unit, and so are
            parameters of several units, such as tied weights.
        reshard_after_forward, mp_policy, offload_policy: as in torch; ``None`` is torch's default.

    Reference: Zhao et al. 2023, arXiv:2304.11277; ``torch.distributed.fsdp.fully_shard``."""

    def __init__(
        self,
        model: nn.Module,
        device: Device,
        optimizers: Iterable[torch.optim.Optimizer] = (),
        *,
        shard: Sequence[str | type[nn.Module]] | None = None,
        reshard_after_forward: bool | int | None = None,
        mp_policy: MixedPrecisionPolicy | None = None,
        offload_policy: OffloadPolicy | None = None,
    ) -> None:
        units = _without_shared_weights(model, _repeated(model) if shard is None else _of_classes(model, shard))
        self._mesh = init_device_mesh(device.torch_device.type, (dist.get_world_size(),))
        names = {parameter: name for name, parameter in model.named_parameters()}
        apply = functools.partial(
            fully_shard,
            mesh=self._mesh,
            reshard_after_forward=reshard_after_forward,
            mp_policy=mp_policy or MixedPrecisionPolicy(),
            offload_policy=offload_policy or OffloadPolicy(),
        )
        try:
            make_equal([*model.parameters(), *model.buffers()])
            for unit in [*units, model]:
                apply(unit)
        except (ValueError, NotImplementedError) as error:
            raise ConfigurationError(f"model {type(model).__name__} cannot be sharded: {error}") from error
        sharded = dict(model.named_parameters())
        _replace_parameters(optimizers, {parameter: sharded[name] for parameter, name in names.items()})
        self._model: Any = model
        self._is_accumulating = False
        self._begins_batch = True
        self.forward: Callable[[Any], Any] = self._forward_with_equal_buffers if list(model.buffers()) else model
        if hasattr(model, "eval_forward"):
            self._keep_sharded_between_evaluations()
        atexit.register(_free, weakref.ref(model))

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Keep gradients whole on their rank within this: for all microbatches but the last one."""
        self._is_accumulating = True
        self._model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._model.set_requires_gradient_sync(True)
            self._is_accumulating = False

    def close(self) -> None: ...

    def shard_tree(self, tree: Mapping[str, Any], optimizers: Mapping[str, torch.optim.Optimizer]) -> dict[str, Any]:
        """Return a checkpoint's tree with this rank's part of its whole tensors. Needs no other rank.

        It converts the model's weights, the state of the optimizers, given by name, and the tensors of algorithms under
        names of weights."""
        own, states = self._model.state_dict(), {}
        for name, saved in tree.get("optimizers", {}).items():
            groups = optimizers[name].param_groups if name in optimizers else []
            parameters = dict(enumerate(parameter for group in groups for parameter in group["params"]))
            values = {
                index: {key: _sharded_like(parameters.get(index), value) for key, value in one.items()}
                for index, one in saved["state"].items()
            }
            states[name] = {**saved, "state": values}
        named = {key: _shard_by_name(tree[key], own) for key in ("model", "algorithms") if key in tree}
        return {**tree, **named, "optimizers": states}

    def spread(self, rows: Tensor, shape: Sequence[int]) -> Tensor:
        whole = torch.empty(shape, device="meta")
        return DTensor.from_local(
            rows, self._mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )

    def _forward_with_equal_buffers(self, batch: Any) -> Any:
        if self._begins_batch:
            make_equal(self._model.buffers())
        self._begins_batch = not self._is_accumulating
        return self._model(batch)

    def _keep_sharded_between_evaluations(self) -> None:
        register_fsdp_forward_method(self._model, "eval_forward")
        model, eval_forward = self._model, self._model.eval_forward
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]

        @functools.wraps(eval_forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            outputs = eval_forward(*args, **kwargs)
            if not model.training:
                for unit in units:
                    unit.reshard()
            return outputs

        model.eval_forward = forward


@torch.no_grad()
def _replace_parameters(optimizers: Iterable[torch.optim.Optimizer], sharded: Mapping[Any, Tensor]) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [sharded.get(parameter, parameter) for parameter in group["params"]]
        for parameter in [one for one in optimizer.state if one in sharded]:
            own, values = sharded[parameter], optimizer.state.pop(parameter)
            optimizer.state[own] = {key: _sharded_like(own, value) for key, value in values.items()}


def _sharded_like(own: Any, value: Any) -> Any:
    if not isinstance(own, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    if own.shape != value.shape:
        return value
    # Every rank has the whole tensor, so nothing is sent.
    return distribute_tensor(value, own.device_mesh, own.placements, src_data_rank=None)


def _shard_by_name(tree: Any, weights: Mapping[str, Any]) -> Any:
    if isinstance(tree, Mapping):
        return {
            key: _sharded_like(weights.get(key), value) if isinstance(value, Tensor) else _shard_by_name(value, weights)
            for key, value in tree.items()
        }
    return [_shard_by_name(value, weights) for value in tree] if isinstance(tree, list) else tree


def _free(model: "weakref.ref[nn.Module]") -> None:
    living = model()
    if living is not None:
        for module in list(living.modules()):
            vars(module).clear()
        gc.collect()


def _repeated(module: nn.Module) -> list[nn.Module]:
    found: list[nn.Module] = []
    for child in module.children():
        if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict) and not isinstance(child, _CONTAINERS):
            found.append(child)
        else:
            found += _repeated(child)
    return found


def _of_classes(model: nn.Module, classes: Sequence[str | type[nn.Module]]) -> list[nn.Module]:
    modules = [module for module in model.modules() if module is not model and not isinstance(module, _CONTAINERS)]
    found: list[nn.Module] = []
    for kind in classes:
        of_kind = [
            one for one in modules if (type(one).__name__ == kind if isinstance(kind, str) else type(one) is kind)
        ]
        if not of_kind:
            name = kind if isinstance(kind, str) else kind.__name__
            names = ", ".join(sorted({type(one).__name__ for one in modules}))
            raise ConfigurationError(
                f"shard in fsdp_config names {name}, and the model has no module of that class to shard: it has {names}"
            )
        found += of_kind
    return [module for module in reversed(modules) if module in found]


def _without_shared_weights(model: nn.Module, units: Iterable[nn.Module]) -> list[nn.Module]:
    places = _places(model)
    kept = []
    for unit in dict.fromkeys(units):
        own = _places(unit)
        if own and all(places[parameter] == count for parameter, count in own.items()):
            kept.append(unit)
    return kept


def _places(module: nn.Module) -> Counter[Any]:
    return Counter(parameter for _, parameter in module.named_parameters(remove_duplicate=False))
