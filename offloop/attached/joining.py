"""The ranks of a training in another framework's loop, which offloop did not start."""

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from offloop.bus.errors import ConfigurationError, RankError
from offloop.trainer.distributed.ranks import Ranks

PATIENCE = 60.0  # seconds that the ranks wait for each other when offloop is attached

_attached: Ranks | None = None
_group: Any = None
_times = 0  # number of joins, the same on all ranks


def join_ranks() -> Ranks | None:
    """Return the ranks of torch's default process group, or ``None`` for one process. Called by all ranks.

    Raises RankError if a rank does not call it within :data:`PATIENCE`; ConfigurationError for several processes
    without a process group."""
    global _attached, _group, _times
    if not (dist.is_available() and dist.is_initialized()):
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigurationError(
                f"this is one of {os.environ['WORLD_SIZE']} processes, and torch.distributed is not initialized: "
                "call torch.distributed.init_process_group() before offloop is attached"
            )
        return None
    if dist.get_world_size() == 1:
        return None
    _times += 1
    store = dist.distributed_c10d._get_default_store()
    names = [f"offloop/attached/{_times}/{rank}" for rank in range(dist.get_world_size())]
    store.set(names[dist.get_rank()], "1")
    try:
        store.wait(names, timedelta(seconds=PATIENCE))
    except (RuntimeError, dist.DistError):
        raise RankError(
            f"offloop is not attached on all {len(names)} ranks within {PATIENCE:g} s: attach it on every rank",
            rank=dist.get_rank(),
        ) from None
    if _attached is None or _attached.closed or _group is not dist.group.WORLD:
        _attached, _group = Ranks(owns_group=False), dist.group.WORLD
    return _attached
