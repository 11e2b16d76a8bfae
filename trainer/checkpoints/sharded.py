"""Checkpoints of sharded weights: folders with a file of each rank. ``docs/checkpoints.md`` has the format."""

import contextlib
import functools
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offloop.bus.checkpoints.image import SHARDS, main_file
from offloop.trainer.checkpoints.file import read_checkpoint, read_part, write_checkpoint
from offloop.trainer.distributed.ranks import Ranks


@contextlib.contextmanager
def write_shards(path: Path | None, tree: Mapping[str, Any], ranks: Ranks) -> Iterator[tuple[dict[str, Any], Path]]:
    """Let each rank write its rows of the ``DTensor`` in a tree to a temporary folder. Returns the rest and the folder.

    The first rank must move the folder into the checkpoint within the block. All ranks must call this, the first one
    with the checkpoint's path, to which all can write. Raises ``CheckpointError`` on every rank when any of them cannot
    write."""
    from torch.distributed.tensor import DTensor

    sharded: dict[str, tuple[list[Any], Any]] = {}

    def take_apart(value: Any, place: list[Any]) -> Any:
        if isinstance(value, DTensor):
            sharded[".".join(map(str, place))] = place, value.detach()
            return None
        if isinstance(value, Mapping):
            return {key: take_apart(item, [*place, key]) for key, item in value.items()}
        if isinstance(value, list):
            return [take_apart(item, [*place, index]) for index, item in enumerate(value)]
        return value

    rest = take_apart(tree, [])
    # Beside the path, so that it can be moved there.
    draft = None if path is None else str(path.with_name(f".{path.name}.shards.{secrets.token_hex(4)}.tmp"))
    folder = Path(ranks.share(draft))
    own = {name: tensor.to_local() for name, (_, tensor) in sharded.items()}
    try:
        ranks.each(lambda: write_checkpoint(_file_of(folder, ranks.rank), {"rows": own}))
        places = [[place, list(tensor.shape)] for place, tensor in sharded.values()]
        yield {**rest, "shards": {"ranks": ranks.world_size, "tensors": places}}, folder
    finally:
        if ranks.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def read_sharded(
    path: Path,
    part: str | None = None,
    rank: int = 0,
    world_size: int = 1,
    spread: Callable[[Tensor, list[int]], Tensor] = lambda rows, shape: rows,
) -> dict[str, Any]:
    """Return the tree in a folder, or one part of it, on the CPU.

    Each of ``world_size`` ranks reads its rows of the sharded tensors; ``spread`` makes a tensor from these and the
    whole shape. A single rank reads all rows.

    Raises ``CheckpointError`` when anything that is read is missing or damaged."""
    tree = read_checkpoint(main_file(path))
    shards = tree.pop("shards")
    read = functools.cache(lambda number: read_part(_file_of(path / SHARDS, number), "rows"))

    def rows_of(name: str, begin: int, end: int, size: int) -> Tensor:
        parts = [
            read(number)[name][max(0, begin - number * size) : end - number * size]
            for number in range(begin // size, min(shards["ranks"], -(-end // size)))
        ]
        return torch.cat(parts) if len(parts) != 1 else parts[0]

    for place, shape in shards["tensors"]:
        if part not in (None, place[0]):
            continue
        name, rows = ".".join(map(str, place)), shape[0]
        # Rows of each rank, now and when it was written, as torch.chunk divides them.
        share, size = -(-rows // world_size), -(-rows // shards["ranks"])
        begin, end = min(rank * share, rows), min((rank + 1) * share, rows)
        found = rows_of(name, begin, end, size) if begin < end else read(0)[name][:0]
        *way, last = place
        functools.reduce(lambda inner, key: inner[key], way, tree)[last] = spread(found, shape)
    return tree if part is None else {part: tree.get(part)}


def check_sharded(path: Path) -> None:
    shards = read_part(main_file(path), "shards")
    read_checkpoint(main_file(path), device="meta")
    for number in range(shards["ranks"]):
        read_checkpoint(_file_of(path / SHARDS, number), device="meta")


def _file_of(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.safetensors"
