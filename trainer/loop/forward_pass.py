"""The forward pass: on one rank or several, whole or sharded, compiled or not."""

import contextlib
import functools
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from offloop.bus.errors import ConfigurationError
from offloop.trainer.arguments.config import ComputeConfig
from offloop.trainer.device.device import Device
from offloop.trainer.distributed.ranks import Ranks
from offloop.trainer.engine.state import State

if TYPE_CHECKING:
    from offloop.trainer.distributed.sharding import FullySharded


class DataParallel:
    """Copies the model to every rank. torch's ``DistributedDataParallel`` averages the gradients."""

    def __init__(self, model: torch.nn.Module, device: Device, find_unused_parameters: bool = False) -> None:
        ids = [device.torch_device.index] if device.name == "gpu" else None
        self._model = DistributedDataParallel(model, device_ids=ids, find_unused_parameters=find_unused_parameters)
        self.forward: Callable[[Any], Any] = self._model

    def accumulating(self) -> contextlib.AbstractContextManager[None]:
        return self._model.no_sync()

    def close(self) -> None:
        """Release the process group. Nothing can be computed afterwards."""
        # While anything refers to the group, its connections stay open, and the other ranks keep waiting.
        for name in ("reducer", "logger", "process_group"):
            vars(self._model).pop(name, None)


class ForwardPass:
    def __init__(self, config: ComputeConfig, ranks: Ranks | None) -> None:
        self.parallel: DataParallel | FullySharded | None = None  # None for one rank, and before shard or prepare
        self._ranks = ranks
        self._find_unused_parameters = config.find_unused_parameters
        self._compile_config = _check_compile(config.compile_config)
        self._fsdp_config: dict[str, Any] | None = None
        if config.fsdp_config is not None:
            # Slow to import, and few trainings need it.
            from offloop.trainer.distributed.sharding import check_fsdp_config

            self._fsdp_config = check_fsdp_config(config.fsdp_config, 1 if ranks is None else ranks.world_size)
        self._compiled: Callable[[Any], Any] | None = None
        self._parameters: list[torch.nn.Parameter] = []

    @property
    def is_sharded(self) -> bool:
        return self._fsdp_config is not None

    @property
    def in_step(self) -> Ranks | None:
        return self._ranks if self.is_sharded else None

    def shard(self, state: State) -> "FullySharded | None":
        if self._fsdp_config is None:
            return None
        from offloop.trainer.distributed.sharding import FullySharded

        self.parallel = sharding = FullySharded(state.model, state.device, state.optimizers, **self._fsdp_config)
        return sharding

    def prepare(self, state: State) -> Callable[[Any], Any] | None:
        """Return the function to call with a batch; ``None`` for the model itself."""
        forward = None
        if self._ranks is not None:
            if self.parallel is None:
                unused = any(getattr(one, "find_unused_parameters", False) for one in state.algorithms)
                self.parallel = DataParallel(state.model, state.device, unused or self._find_unused_parameters)
            forward = self.parallel.forward
        if self._compile_config is not None:
            if self._compiled is None:
                self._parameters = list(state.model.parameters())
                self._compiled = torch.compile(state.model if forward is None else forward, **self._compile_config)
            forward = self._compiled
        return forward

    @property
    def accumulating(self) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """A context that keeps gradients on their rank: for all microbatches but the last one."""
        accumulating = contextlib.nullcontext if self.parallel is None else self.parallel.accumulating
        if _uses_cuda_graphs(self._compile_config):
            return functools.partial(_copy_gradients, self._parameters, accumulating)
        return accumulating

    def close(self) -> None:
        if self.parallel is not None:
            self.parallel.close()


def _uses_cuda_graphs(config: Mapping[str, Any] | None) -> bool:
    config = config or {}
    return config.get("mode") in {"reduce-overhead", "max-autotune"} or bool(
        (config.get("options") or {}).get("triton.cudagraphs")
    )


@contextlib.contextmanager
def _copy_gradients(
    parameters: list[torch.nn.Parameter], accumulating: Callable[[], contextlib.AbstractContextManager[None]]
) -> Iterator[None]:
    """Copy gradients out of the memory of CUDA graphs, which the next microbatch overwrites: torch's issue 169545."""
    with accumulating():
        yield
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = parameter.grad.clone()


def _check_compile(config: Any) -> dict[str, Any] | None:
    if config is None:
        return None
    if not isinstance(config, Mapping):
        raise ConfigurationError(
            f"compile_config is {config!r}: give a dict of arguments of torch.compile, {{}} for its defaults"
        )
    try:
        # Checks the arguments; torch compiles at the first call.
        if config:
            torch.compile(torch.nn.Identity(), **config)
    # Of any type, depending on the argument.
    except Exception as error:  # noqa: BLE001
        raise ConfigurationError(
            f"compile_config {dict(config)!r} is not allowed: {textwrap.shorten(str(error), 200)}"
        ) from None
    return dict(config)
