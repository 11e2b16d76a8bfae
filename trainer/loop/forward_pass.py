"""How the model of a training is run: by itself or by several ranks, whole or sharded, compiled or not."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from trainer.arguments.checks import check_compile_config
from trainer.distributed.parallel import DataParallel, Parallel
from trainer.distributed.ranks import Ranks
from trainer.engine.state import State

if TYPE_CHECKING:
    from trainer.distributed.sharding import FullySharded


class ForwardPass:
    """The forward pass of the training; its arguments, beside the ranks, are those of :class:`trainer.Trainer`.

    Raises :class:`bus.errors.ConfigurationError` for a configuration that is not allowed."""

    def __init__(
        self,
        ranks: Ranks | None,
        *,
        compile_config: Mapping[str, Any] | None,
        find_unused_parameters: bool,
        fsdp_config: Mapping[str, Any] | None,
    ) -> None:
        self.parallel: Parallel | None = None
        """How the ranks share the work, once it is settled; ``None`` for one by itself."""
        self._ranks = ranks
        self._find_unused_parameters = find_unused_parameters
        self._compile_config = check_compile_config(compile_config)
        self._fsdp_config = None if fsdp_config is None else _check_fsdp(fsdp_config, ranks)
        self._compiled: Callable[[Any], Any] | None = None

    @property
    def is_sharded(self) -> bool:
        """Whether each rank has a part of the model only."""
        return self._fsdp_config is not None

    @property
    def in_step(self) -> Ranks | None:
        """The ranks, if each forward pass takes all of them."""
        return self._ranks if self.is_sharded else None

    def shard(self, state: State) -> "FullySharded | None":
        """Spreads the model over the ranks, if that is how it is to be run."""
        if self._fsdp_config is None:
            return None
        from trainer.distributed.sharding import FullySharded

        self.parallel = sharding = FullySharded(state.model, state.device, state.optimizers, **self._fsdp_config)
        return sharding

    def prepare(self, state: State) -> Callable[[Any], Any] | None:
        """What to call with a batch; ``None`` for the model itself."""
        forward = None
        if self._ranks is not None:
            if self.parallel is None:
                unused = any(getattr(one, "find_unused_parameters", False) for one in state.algorithms)
                self.parallel = DataParallel(state.model, state.device, unused or self._find_unused_parameters)
            forward = self.parallel.forward
        if self._compile_config is not None:
            if self._compiled is None:
                self._compiled = torch.compile(state.model if forward is None else forward, **self._compile_config)
            forward = self._compiled
        return forward

    def close(self) -> None:
        """Gives back what is held of the ranks' process group; nothing can be computed afterwards."""
        if self.parallel is not None:
            self.parallel.close()


def _check_fsdp(config: Any, ranks: Ranks | None) -> dict[str, Any]:
    # Takes long to import, and few trainings need it.
    from trainer.distributed.sharding import check_fsdp_config

    return check_fsdp_config(config, 1 if ranks is None else ranks.world_size)
