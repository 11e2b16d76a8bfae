"""The file format of checkpoints: one safetensors file, written completely or not at all.

The format is in ``docs/checkpoints.md``. Nothing in a file is executed: it has no pickle."""

import contextlib
import functools
import itertools
import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from offloop.bus.checkpoints.image import (
    CRC_KEY,
    DRAFT_KEY,
    SHARDS,
    TEXT_KEY,
    VERSION,
    check_size,
    crc_of,
    main_file,
    metadata_of,
    text_of,
    write_image,
)
from offloop.bus.errors import CheckpointError, ConfigurationError
from offloop.bus.files import atomic_replace, sync
from offloop.bus.tensors.view import tensor_places

PathLike = str | os.PathLike[str]


# JSON readers in other languages round integers beyond this.
_EXACT_INT = 2**53
_SEQUENCES = (list, tuple)

_LONGEST = 200


class CheckpointDraft(NamedTuple):
    tensors: dict[str, Tensor]  # by their names in the file, without gradients; in the memory of the tree's tensors
    contents: dict[str, Any]  # the tree without its tensors, and the prefix of each tensor's bytes for its checksum

    def metadata(self) -> dict[str, str]:
        """Return the metadata of an image that ``bus.checkpoints.image.write_draft`` completes in another process."""
        try:
            # Five times as fast as text_of, but without its escapes for invalid Unicode.
            return {DRAFT_KEY: check_size(msgspec.json.encode(self.contents).decode())}
        except UnicodeEncodeError:
            return {DRAFT_KEY: text_of(self.contents)}


def draft_checkpoint(tree: Mapping[str, Any], what: object) -> CheckpointDraft:
    """Take apart a tree as :func:`write_checkpoint` does, without reading a tensor."""
    for key in tree:
        if not isinstance(key, str) or key.startswith("$"):
            raise CheckpointError(
                f"cannot write {what}: {key!r} cannot be the key of a part: use a str without $ in front"
            )
    table = _TensorTable()
    try:
        # The model comes first, so that tensors shared with other parts have its names.
        packed = {key: _pack(tree[key], key, table) for key in sorted(tree, key=lambda key: key != "model")}
    except RecursionError:
        raise CheckpointError(f"cannot write {what}: it contains itself, or is nested too deeply") from None
    kinds = {name: _kind_of(tensor.dtype, tensor.shape) for name, tensor in table.stored.items()}
    return CheckpointDraft(table.stored, {"version": VERSION, "tree": packed, "tensors": kinds})


def write_checkpoint(path: PathLike, tree: Mapping[str, Any], shards: Path | None = None) -> None:
    """Write a tree to a file, and make its folder if needed.

    The file appears under its name once it is complete and on the disk; until then an existing one stays. With a folder
    of ``shards``, see :mod:`offloop.trainer.checkpoints.sharded`, it writes a folder and moves the shards into it.

    The tree is a dict of parts by name. A part consists of dicts, lists and tuples of ``None``, bools, ints, floats,
    strings, bytes and dense tensors of any device and of every dtype of safetensors. Subclasses of these (an
    ``OrderedDict``, a named tuple, a parameter) come back as the plain type. Tensors that are the same in memory are
    stored once. Tensors are copied only from a device or if they are not contiguous.

    Raises ``CheckpointError`` for anything else in the tree, and when the file cannot be written."""
    path = Path(path)
    draft = draft_checkpoint(tree, path)
    stored = {name: tensor.resolve_conj().resolve_neg().cpu().contiguous() for name, tensor in draft.tensors.items()}
    kinds = draft.contents["tensors"]
    checksums = {name: crc_of(kinds[name], _bytes_of(tensor)) for name, tensor in stored.items()}
    try:
        metadata = metadata_of({**draft.contents, "tensors": checksums})
        layout = tensor_places({name: tensor_spec(tensor) for name, tensor in stored.items()}).layout(metadata)
    except (CheckpointError, ConfigurationError) as error:
        raise CheckpointError(f"cannot write {path}: {error}", path=path) from None
    with atomic_replace(path) as place:
        if shards is not None:
            place.mkdir()
            shards.rename(place / SHARDS)
        write_image(main_file(place), layout.header, (_bytes_of(stored[name]) for name in layout.starts))
        if shards is not None:
            sync(main_file(place))


def read_checkpoint(path: PathLike, device: str | torch.device = "cpu") -> dict[str, Any]:
    """Return the tree in a file, its tensors on a device. Every byte of the file is checked.

    Tensors that were one in memory are one again. On the CPU they are pages of the file, loaded on use. With
    ``device="meta"`` the file is checked too, and the tensors have no values.

    Raises ``CheckpointError`` for a file that is missing, damaged, not a checkpoint, or of another version."""
    with _opened(path) as file:
        contents = _contents_of_checkpoint(file, path)
        tree: dict[str, Any] = _unpack(contents["tree"], _loader(file, contents, path, device))
        return tree


def read_part(path: PathLike, key: str) -> Any:
    """Return one part of a checkpoint's tree, on the CPU; other tensors are neither read nor checked."""
    with _opened(path) as file:
        contents = _contents_of_checkpoint(file, path)
        if key not in contents["tree"]:
            raise CheckpointError(
                f"checkpoint {path} holds no {key!r}, only {', '.join(contents['tree'])[:_LONGEST] or 'nothing'}",
                path=path,
            )
        return _unpack(contents["tree"][key], _loader(file, contents, path, "cpu"))


def read_weights(path: PathLike) -> dict[str, Any]:
    """Return the model's state dict in a checkpoint, or all tensors of any other safetensors file, on the CPU."""
    with _opened(path) as file:
        if _contents(file, path) is None:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is not a dict
    weights: dict[str, Any] = read_part(path, "model")
    return weights


class _TensorTable:
    def __init__(self) -> None:
        self.stored: dict[str, Tensor] = {}
        self._known: dict[int, list[str]] = {}

    def add(self, tensor: Tensor, path: str) -> str:
        if tensor.requires_grad:
            tensor = tensor.detach()
        if tensor.layout is not torch.strided or tensor.is_meta or _dtype_name(tensor.dtype) is None:
            raise CheckpointError(
                f"the tensor at {path!r} is {tensor.layout}, {tensor.dtype} on {tensor.device}, which safetensors "
                "cannot store: make it a dense tensor of another dtype"
            )
        known = self._known.setdefault(tensor.data_ptr(), [])
        if known and tensor.numel():
            for name in known:
                if _identity(self.stored[name]) == _identity(tensor):
                    return name
        # A file name that is not Unicode is a valid string in Python, but not in a header.
        name = path if path.isascii() else path.encode(errors="backslashreplace").decode()
        if name in self.stored or name == "__metadata__":
            numbered = (f"{name}~{number}" for number in itertools.count(2))
            name = next(one for one in numbered if one not in self.stored)
        known.append(name)
        self.stored[name] = tensor
        return name


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    """Return the same value for two tensors at one address only if they are the same tensor."""
    return tensor.shape, tensor.dtype, tensor.stride(), tensor.device, tensor.is_conj(), tensor.is_neg()


def tensor_spec(tensor: Tensor) -> tuple[str, tuple[int, ...]]:
    name = _dtype_name(tensor.dtype) if tensor.layout is torch.strided else None
    if name is None:
        raise ConfigurationError(f"safetensors has no place for a tensor of {tensor.dtype}, {tensor.layout}")
    # Torch counts pairs of these numbers.
    return name, tensor.shape if name != "F4" else (*tensor.shape[:-1], tensor.shape[-1] * 2)


@functools.cache
def _dtype_name(dtype: torch.dtype) -> str | None:
    try:
        image = save({"": torch.empty(0, dtype=dtype)})
    except (KeyError, RuntimeError):
        return None
    (size,) = struct.unpack("<Q", image[:8])
    name: str = json.loads(image[8 : 8 + size])[""]["dtype"]
    return name


def _pack(value: Any, path: str, tensors: _TensorTable) -> Any:
    """Convert a value to JSON, and add its tensors to the table."""
    if isinstance(value, Tensor):
        return {"$tensor": tensors.add(value, path)}
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
    if isinstance(value, int):
        return _pack_int(value)
    if isinstance(value, dict):
        return _pack_dict(value, path, tensors)
    if isinstance(value, _SEQUENCES):
        items = [_pack(item, f"{path}.{index}", tensors) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, bytes):
        # Not in the text, which is written and checked for every checkpoint that a consumer requests.
        stored = torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0, dtype=torch.uint8)
        return {"$bytes": tensors.add(stored, path)}
    raise CheckpointError(
        f"the value at {path!r} is a {_kind(value)}, which a checkpoint cannot hold: use dicts, lists, tuples, None, "
        "bool, int, float, str, bytes and tensors"
    )


def _pack_int(value: int) -> Any:
    return int(value) if -_EXACT_INT < value < _EXACT_INT else {"$int": hex(value)}


def _pack_dict(value: dict[Any, Any], path: str, tensors: _TensorTable) -> dict[str, Any]:
    is_plain = True
    for key in value:
        if not isinstance(key, str):
            is_plain = False
            if not isinstance(key, int):
                raise CheckpointError(f"a key of the dict at {path!r} is a {_kind(key)}: use str or int")
        elif key.startswith("$"):
            is_plain = False
    packed = {key: _pack(item, f"{path}.{key}", tensors) for key, item in value.items()}
    if is_plain:
        return packed
    # A bool is an int, and stays a bool.
    return {"$dict": [[key if isinstance(key, str | bool) else _pack_int(key), it] for key, it in packed.items()]}


def _unpack(value: Any, load: Callable[..., Tensor]) -> Any:
    match value:
        case list():
            return [_unpack(item, load) for item in value]
        case {"$tensor": name}:
            return load(name)
        case {"$tuple": items}:
            return tuple(_unpack(item, load) for item in items)
        case {"$dict": items}:
            return {_unpack(key, load): _unpack(item, load) for key, item in items}
        case {"$int": digits}:
            return int(digits, 16)
        case {"$float": bits}:
            return struct.unpack(">d", bytes.fromhex(bits))[0]
        case {"$bytes": name}:
            return load(name, "cpu").numpy().tobytes()
        case dict():
            return {key: _unpack(item, load) for key, item in value.items()}
    return value


@contextlib.contextmanager
def _opened(path: PathLike) -> Iterator[Any]:
    """Open a safetensors file; all errors in the block become ``CheckpointError``."""
    if not Path(path).is_file():
        raise CheckpointError(f"there is no checkpoint {path}: give the path of a file that was saved", path=path)
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except OSError as error:
        raise CheckpointError(f"cannot read checkpoint {path}: {_first_line(error)}", path=path) from error
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged or not a checkpoint: {_first_line(error)}", path=path) from error
    except (LookupError, TypeError, ValueError, AttributeError, struct.error, RecursionError) as error:
        raise CheckpointError(
            f"checkpoint {path} is damaged: unexpected content ({_first_line(error)})", path=path
        ) from error


def _contents(file: Any, path: PathLike) -> dict[str, Any] | None:
    """Return the header of a checkpoint without the places of tensors; ``None`` for a foreign file."""
    metadata = file.metadata() or {}
    if TEXT_KEY not in metadata and CRC_KEY not in metadata:
        return None
    text = metadata.get(TEXT_KEY, "")
    if metadata.get(CRC_KEY) != crc_of(text):
        raise CheckpointError(
            f"checkpoint {path} is damaged: the checksum of its header is wrong; use another one", path=path
        )
    contents: dict[str, Any] = json.loads(text)
    version = contents["version"]
    if version != VERSION:
        raise CheckpointError(
            f"checkpoint {path} is of format {str(version)[:20]}, this version of offloop reads format {VERSION}",
            path=path,
        )
    if set(contents["tensors"]) != set(file.keys()):
        raise CheckpointError(
            f"checkpoint {path} is damaged: it has other tensors than it should; use another one", path=path
        )
    return contents


def _contents_of_checkpoint(file: Any, path: PathLike) -> dict[str, Any]:
    contents = _contents(file, path)
    if contents is None:
        raise CheckpointError(
            f"{path} is not a checkpoint but a safetensors file of something else: load it as weights", path=path
        )
    return contents


def _loader(file: Any, contents: dict[str, Any], path: PathLike, device: str | torch.device) -> Callable[..., Tensor]:
    @functools.cache
    def load(name: str, device: str | torch.device = device) -> Tensor:
        tensor: Tensor = file.get_tensor(name)
        if crc_of(_kind_of(tensor.dtype, tensor.shape), _bytes_of(tensor)) != contents["tensors"][name]:
            raise CheckpointError(
                f"checkpoint {path} is damaged: the checksum of {name!r} is wrong; use another one", path=path
            )
        return tensor.to(device)

    return load


@functools.lru_cache(4096)
def _kind_of(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _bytes_of(tensor: Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _first_line(error: BaseException) -> str:
    line = (str(error) or type(error).__name__).splitlines()[0]
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."
