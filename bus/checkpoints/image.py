"""The parts of a checkpoint file that need no torch, see ``docs/checkpoints.md``.

A trainer sends a checkpoint as a *draft*: a safetensors image without checksums, which cost processor time, and without
the names of earlier checkpoints, which the trainer does not know."""

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from offloop.bus.errors import CheckpointError, ConfigurationError, ProtocolError
from offloop.bus.files import atomic_replace
from offloop.bus.tensors.view import Tensors, tensor_places

VERSION = 1
TEXT_KEY = "offloop"
CRC_KEY = "offloop_crc32"
DRAFT_KEY = "offloop_draft"
SHARDS = "shards"  # folder within a checkpoint folder, with the rows of sharded weights that each rank has

# The library refuses headers over 100 MB. Each quotation mark in the text takes two bytes there.
_TEXT_LIMIT = 50_000_000
_HEADER_LIMIT = 100_000_000

_PIECE = 32 << 20

_to_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def crc_of(text: str, data: Any = b"") -> str:
    """Return the CRC-32 of a text and of the bytes after it, in a file's format."""
    return f"{zlib.crc32(data, zlib.crc32(text.encode())):08x}"


def text_of(contents: Mapping[str, Any]) -> str:
    try:
        text = _to_json(contents)
    except RecursionError:
        raise CheckpointError("something in it is nested too deeply") from None
    return check_size(text)


def check_size(text: str) -> str:
    if len(text) > _TEXT_LIMIT:
        raise CheckpointError(
            f"all values but tensors take {len(text):,} bytes, at most {_TEXT_LIMIT:,} are allowed: "
            "keep long lists of numbers in tensors"
        )
    return text


def metadata_of(contents: Mapping[str, Any]) -> dict[str, str]:
    text = text_of(contents)
    return {TEXT_KEY: text, CRC_KEY: crc_of(text)}


def write_draft(path: Path, draft: Tensors, saved: list[str] | None) -> None:
    """Write a draft as a checkpoint file, with the same bytes that the trainer would write.

    ``saved`` are the names of earlier checkpoints that are kept; ``None`` leaves the draft's value.

    Raises CheckpointError: the file cannot be written; ProtocolError: the draft is malformed."""
    try:
        contents = json.loads(draft.metadata[DRAFT_KEY])
        tree, kinds = contents["tree"], contents["tensors"]
        if kinds.keys() != draft.keys():
            raise ValueError("its tensors differ from its list")
        if saved is not None and "checkpoints" in tree:
            tree["checkpoints"] = {"saved": saved}
        contents["tensors"] = {name: crc_of(str(kind), draft[name].data) for name, kind in kinds.items()}
        metadata = metadata_of(contents)
        layout = tensor_places({name: (one.dtype, one.shape) for name, one in draft.items()}).layout(metadata)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, ConfigurationError) as error:
        raise ProtocolError(f"a checkpoint draft is malformed: {error!r:.200}") from None
    with atomic_replace(path) as place:
        write_image(place, layout.header, (draft[name].data for name in layout.starts))


def write_image(path: Path, header: bytes, parts: Iterable[Any]) -> None:
    """Write a header and the buffers after it. A large file does not stay in the system's cache.

    Its pages would displace those of the training's data, and fresh ones may take longer than the disk."""
    with open(path, "wb") as file:
        file.write(header)
        cached = len(header)
        for part in parts:
            view = memoryview(part)
            for start in range(0, len(view), _PIECE):
                cached += file.write(view[start : start + _PIECE])
                if cached >= _PIECE and hasattr(os, "posix_fadvise"):
                    file.flush()
                    # Only pages that are on the disk can be dropped.
                    os.fdatasync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                    cached = 0


def main_file(path: Path) -> Path:
    return path / "training.safetensors" if path.is_dir() else path


def read_contents(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return a checkpoint's contents without tensors; ``None`` if it is damaged or something else."""
    try:
        with open(main_file(Path(path)), "rb") as file:
            text = _metadata(file)[TEXT_KEY]
        contents = json.loads(text)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return contents if isinstance(contents, dict) else None


def _metadata(file: BinaryIO) -> Any:
    size = int.from_bytes(file.read(8), "little")
    if size > _HEADER_LIMIT:
        raise ValueError
    return json.loads(file.read(size))["__metadata__"]
