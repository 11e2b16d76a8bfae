"""The folder that a training is saved in when its weights are spread over the ranks.

Torch's distributed checkpoint lets each rank write the parts that it has, as safetensors files in the folder
``shards``. Beside it is ``training.safetensors``, a file of :mod:`offloop.trainer.checkpoints.file` with everything
else: what all ranks have, which tensor stands where in the tree, and the checksums of the files. No pickle is in it.
The format is in ``docs/checkpoints.md``.
"""

import contextlib
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from offloop.bus.errors import CheckpointError
from offloop.bus.files import atomic_replace
from offloop.trainer.checkpoints.file import read_checkpoint, read_part, write_checkpoint
from offloop.trainer.distributed.ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


_TRAINING = "training.safetensors"
SHARDS = "shards"
"""The folder in a checkpoint that has the parts of the ranks."""
_CHUNK = 1 << 20


def training_file(path: Path) -> Path:
    """The file with the small parts of a checkpoint, or the checkpoint itself where it is a file."""
    return path / _TRAINING if path.is_dir() else path


def is_sharded(path: Path) -> bool:
    return (path / _TRAINING).is_file()


def write_sharded(path: Path | None, tree: Mapping[str, Any], ranks: Ranks) -> None:
    """Writes a tree as ``write_checkpoint`` does, to a folder. All ranks have to call this, the first one with a path
    that all can write to, the others with ``None``.

    Each rank writes its part of the tensors in the tree that are ``DTensor``; all else is taken from the first rank's.
    The folder replaces an existing one when it is complete and on the disk.

    Raises ``CheckpointError`` on every rank when any of them cannot write; the existing folder then stays."""
    rest, sharded = _take_apart(tree)

    def make_draft() -> str:
        assert path is not None  # the first rank has one
        return str(stack.enter_context(atomic_replace(path)))

    def own_checksums() -> dict[str, str]:
        files = sorted((draft / SHARDS).iterdir())
        return _checksums(draft, files[ranks.rank :: ranks.world_size])

    with contextlib.ExitStack() as stack:
        # Only the first rank makes and moves folders.
        draft = Path(on_first(ranks, make_draft))
        _save(draft / SHARDS, {_name(place): tensor for place, tensor in sharded})
        checksums = ranks.each(lambda: _checked(own_checksums))
        contents = {
            "files": {name: checksum for one in checksums for name, checksum in one.items()},
            "tensors": {
                _name(place): [place, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
                for place, tensor in sharded
            },
        }
        on_first(ranks, lambda: write_checkpoint(draft / _TRAINING, {**rest, "shards": contents}))
        on_first(ranks, stack.close)


def read_sharded(
    path: Path, mesh: "DeviceMesh | None" = None, ranks: Ranks | None = None, part: str | None = None
) -> dict[str, Any]:
    """The tree that was written, on the CPU, or its part under one key. Every byte of the folder is checked.

    With a mesh of the ranks all of them have to call this, of any number, and each gets its part of the tensors that
    were sharded, by rows, on the mesh's device. Without one the tensors are whole.

    Raises ``CheckpointError`` when anything is missing or damaged, with a mesh on every rank."""
    tree = read_checkpoint(path / _TRAINING)
    contents = tree.pop("shards", None)
    try:
        files, entries = contents["files"], [(name, *entry) for name, entry in contents["tensors"].items()]
        selected = [entry for entry in entries if part in (None, entry[1][0])]
        tensors = {name: _empty(shape, getattr(torch, dtype), mesh) for name, _, shape, dtype in selected}
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"checkpoint {path} does not say what is in its shards: use another one", path=path
        ) from error
    if mesh is None or ranks is None:
        _check_files(path, files)
    else:
        own = dict(sorted(files.items())[ranks.rank :: ranks.world_size])
        ranks.each(lambda: _check_files(path, own))
    _load(path / SHARDS, tensors, alone=mesh is None)
    for name, place, _, _ in selected:
        _put(tree, place, tensors[name])
    return tree if part is None else {part: tree.get(part)}


def check_sharded(path: Path) -> None:
    """Raises ``CheckpointError`` unless each byte in the folder is as it was written."""
    read_checkpoint(path / _TRAINING, device="meta")
    contents = read_part(path / _TRAINING, "shards")
    _check_files(path, contents["files"])


def _take_apart(tree: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[list[str | int], Any]]]:
    """A copy of the tree with ``None`` in place of sharded tensors, and these with their places."""
    from torch.distributed.tensor import DTensor

    sharded: list[tuple[list[str | int], Any]] = []

    def walk(value: Any, place: list[str | int]) -> Any:
        if isinstance(value, DTensor):
            sharded.append((place, value.detach()))
            return None
        if isinstance(value, Mapping):
            return {key: walk(item, [*place, key]) for key, item in value.items()}
        if isinstance(value, list):
            return [walk(item, [*place, index]) for index, item in enumerate(value)]
        return value

    return walk(tree, []), sharded


def _put(tree: Any, place: Sequence[str | int], tensor: Tensor) -> None:
    for key in place[:-1]:
        tree = tree[key]
    tree[place[-1]] = tensor


def _name(place: Sequence[str | int]) -> str:
    return ".".join(map(str, place))


def _empty(shape: Sequence[int], dtype: torch.dtype, mesh: "DeviceMesh | None") -> Tensor:
    if mesh is None:
        return torch.empty(shape, dtype=dtype)
    from torch.distributed.tensor import Shard, empty

    return empty(*shape, dtype=dtype, device_mesh=mesh, placements=[Shard(0)])


def _save(folder: Path, tensors: dict[str, Any]) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        save(tensors, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    except CheckpointException as error:
        raise CheckpointError(f"cannot write {folder}: {_reason(error)}", path=folder) from error


def _load(folder: Path, tensors: dict[str, Any], alone: bool) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        with warnings.catch_warnings():
            # That is the expected result.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=alone)
    except CheckpointException as error:
        raise CheckpointError(
            f"checkpoint {folder.parent} cannot be read: {_reason(error)}", path=folder.parent
        ) from error


def _reason(error: Any) -> str:
    rank, (first, _) = min(error.failures.items(), key=lambda failure: failure[0])
    return f"{type(first).__name__} on rank {rank}: {str(first).splitlines()[0] if str(first) else ''}"


def _checksums(path: Path, files: Sequence[Path]) -> dict[str, str]:
    found = {}
    for file in files:
        checksum = 0
        try:
            with open(file, "rb") as content:
                while chunk := content.read(_CHUNK):
                    checksum = zlib.crc32(chunk, checksum)
        except OSError as error:
            raise CheckpointError(f"cannot read {file}: {error.strerror or error}", path=file) from error
        found[file.relative_to(path).as_posix()] = f"{checksum:08x}"
    return found


def _check_files(path: Path, files: Mapping[str, str]) -> None:
    for name, checksum in files.items():
        if not (path / name).is_file():
            raise CheckpointError(f"checkpoint {path} is incomplete: it has no {name}; use another one", path=path)
        if _checksums(path, [path / name])[name] != checksum:
            raise CheckpointError(
                f"checkpoint {path} is damaged: the checksum of {name} is wrong; use another one", path=path
            )


def on_first(ranks: Ranks, do: Callable[[], Any]) -> Any:
    """The result of a function that the first rank calls, on every rank: text or ``None``, or the error."""
    return ranks.each(lambda: _checked(do), among={0})[0]


def _checked(do: Callable[[], Any]) -> Any:
    try:
        return do()
    except OSError as error:
        raise CheckpointError(str(error)) from error
