"""The checkpoint file: what goes in comes out, and a file that is not whole is never taken for one that is."""

import collections
import itertools
import json
import math
import os
import random
import re
import resource
import signal
import struct
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exact_trees import exactly
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import ROOT
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from offloop.bus.errors import CheckpointError
from offloop.trainer.checkpoints.file import (
    read_checkpoint,
    read_part,
    read_weights,
    write_checkpoint,
)

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn),
    *(torch.float8_e5m2, torch.complex64),
]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Tensors of any bits: of no dimension, without elements, transposed, conjugated."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    data = torch.tensor(list(draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8)
    tensor = (data & 1).bool().reshape(shape) if dtype == torch.bool else data.view(dtype).reshape(shape)
    if len(shape) > 1 and draw(st.booleans()):
        tensor = tensor.transpose(0, 1)
    return tensor.conj() if dtype.is_complex and draw(st.booleans()) else tensor


KEYS = (
    st.text(max_size=4) | st.integers() | st.sampled_from(["$tensor", "$dict", "a.b", "0", "__metadata__", "model.a"])
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | tensors()
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | inner.map(lambda one: [one, (one,)])
    ),
    max_leaves=12,
)
PARTS = st.sampled_from(["model", "a", "__metadata__", ""]) | st.text().filter(lambda name: not name.startswith("$"))
TREES = st.dictionaries(PARTS, VALUES, max_size=4)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.safetensors"


def some_tree() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    weights = {f"net.{name}": torch.randn(5, 3, generator=generator) for name in ("a", "b")}
    return {
        "model": weights,
        "optimizers": {"SGD": {"state": {0: {"step": torch.tensor(3.0), "momentum": weights["net.a"] * 2}}}},
        "empty": torch.empty(0, 7),
        "lr": 0.1,
        "betas": (0.9, 0.999),
    }


@pytest.mark.slow
@given(TREES)
@settings(max_examples=150, deadline=None)
def test_a_checkpoint_reads_back_as_written(tmp_path_factory: pytest.TempPathFactory, tree: dict[str, Any]) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    write_checkpoint(path, tree)
    assert exactly(read_checkpoint(path)) == exactly(tree)


def test_subclasses_become_plain_types_and_nans_keep_their_bits(path: Path) -> None:
    (odd,) = struct.unpack(">d", bytes.fromhex("fff8000000001234"))
    pair = collections.namedtuple("pair", "a b")
    tree = {
        "map": collections.OrderedDict(a=1),
        "pair": pair(1, 2),
        "weight": nn.Parameter(torch.ones(2)),
        "number": np.float64(0.5),
        "odd": [odd, -0.0],
        "\udcff": torch.ones(2),
    }
    write_checkpoint(path, tree)
    back = read_checkpoint(path)
    kinds = [type(value) for value in back.values()]
    assert kinds == [dict, tuple, torch.Tensor, float, list, torch.Tensor]
    assert [struct.pack(">d", value).hex() for value in back["odd"]] == ["fff8000000001234", "8000000000000000"]
    assert not back["weight"].requires_grad
    # What was read can be changed, and the file stays.
    back["weight"].zero_()
    assert torch.equal(read_checkpoint(path)["weight"], torch.ones(2))


def test_the_code_in_the_docs_reads_it(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "checkpoints.md").read_text(), re.DOTALL)
    write_checkpoint(path, {"run": "mine", "model": nn.Linear(3, 2).state_dict()})
    monkeypatch.setattr(sys, "argv", ["code", str(path)])
    exec(code, {})
    assert capsys.readouterr().out == "['model', 'run']\n{'weight': [2, 3], 'bias': [2]}\n"


def test_tied_weights_are_stored_once_and_tied_again(path: Path) -> None:
    shared = torch.randn(100, 100)
    write_checkpoint(path, {"model": {"embedding": shared, "head": shared}, "ema": [shared.t()]})
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == {"model.embedding", "ema.0"}
    weights = read_checkpoint(path)["model"]
    assert weights["embedding"] is weights["head"]
    assert set(read_weights(path)) == {"embedding", "head"}


def test_views_of_one_memory_come_back_each_with_its_values(path: Path) -> None:
    memory = torch.arange(12.0)
    views = [memory[:6], memory[6:], memory[3:9], memory, memory.view(3, 4), memory.view(torch.int32), memory[4:4]]
    write_checkpoint(path, {"views": views})
    assert exactly(read_checkpoint(path)["views"]) == exactly(views)


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        np.zeros(2),
        {(1, 2): 3},
        torch.zeros(2, dtype=torch.complex128),
        torch.zeros(2).to_sparse(),
        torch.zeros(2, device="meta"),
    ],
)
def test_unsupported_values_are_refused_with_their_place(path: Path, value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"a\.1\.b"):
        write_checkpoint(path, {"a": [0, {"b": value}]})
    assert list(path.parent.iterdir()) == []


def test_a_tree_that_is_no_checkpoint_is_refused(path: Path) -> None:
    within: dict[str, Any] = {}
    within["again"] = [within]
    trees: tuple[Any, ...] = ({0: 1}, {"$tensor": 1}, within)
    for tree in trees:
        with pytest.raises(CheckpointError):
            write_checkpoint(path, tree)


# Damage


def assert_damage_is_found(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    for read in (read_checkpoint, read_weights):
        with pytest.raises(CheckpointError, match=re.escape(str(path))):
            read(path)


def test_a_file_that_is_cut_short_or_something_else_is_refused(path: Path) -> None:
    write_checkpoint(path, some_tree())
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    for length in [*range(0, header + 1, 8), *range(header, len(content), 64), len(content) - 1]:
        assert_damage_is_found(path, content[:length])
    for other in (content + b"\0", b"hello", b"\0" * 100, b"\xff" * 100):
        assert_damage_is_found(path, other)
    path.unlink()
    for read in (read_checkpoint, read_weights):
        for wrong in (path, path.parent):
            with pytest.raises(CheckpointError):
                read(wrong)


def test_a_flipped_bit_is_found_wherever_it_is_and_never_gives_wrong_weights(path: Path) -> None:
    write_checkpoint(path, some_tree())
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    dice = random.Random(5)
    places = [dice.randrange(header) for _ in range(200)] + [dice.randrange(header, len(whole)) for _ in range(100)]
    refused = 0
    for place in places:
        content = bytearray(whole)
        content[place] ^= 1 << dice.randrange(8)
        path.write_bytes(content)
        with pytest.raises(CheckpointError):
            read_checkpoint(path)
        try:
            weights = read_weights(path)
        except CheckpointError:
            refused += 1
        else:
            # The bit was in a tensor that is none of the model's.
            assert exactly(weights) == exactly(some_tree()["model"])
    assert refused > 200


def test_a_tensor_too_many_or_too_few_is_damage(path: Path) -> None:
    write_checkpoint(path, {"a": torch.zeros(3), "b": torch.ones(0)})
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    for tensors in ({"a": torch.zeros(3)}, {"a": torch.zeros(3), "b": torch.ones(0), "c": torch.ones(0)}):
        save_file(tensors, path, metadata)
        with pytest.raises(CheckpointError):
            read_checkpoint(path)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "nonsense",
        "[" * 100_000,
        '{"version": 1}',
        '{"version": 2, "all": "different"}',
        *(
            json.dumps({"version": 1, "tree": {"a": value}, "tensors": {}})
            for value in ({"$tensor": [1]}, {"$dict": [[{"$dict": []}, 1]]}, {"$int": "nonsense"}, {"$bytes": "?"})
        ),
    ],
)
def test_a_header_that_is_no_description_is_refused(path: Path, text: str) -> None:
    save_file({}, path, {"offloop": text, "offloop_crc32": f"{zlib.crc32(text.encode()):08x}"})
    with pytest.raises(CheckpointError):
        read_checkpoint(path)


# Parts, weights, devices


def test_a_part_is_read_without_the_others(path: Path) -> None:
    write_checkpoint(path, some_tree())
    content = bytearray(path.read_bytes())
    with safe_open(path, framework="pt") as file:
        weight = file.get_tensor("model.net.a")
    content[bytes(content).index(bytes(weight.view(-1).view(torch.uint8).tolist()))] ^= 1
    path.write_bytes(content)
    assert read_part(path, "betas") == (0.9, 0.999)
    assert exactly(read_part(path, "optimizers")) == exactly(some_tree()["optimizers"])
    with pytest.raises(CheckpointError):
        read_part(path, "model")
    with pytest.raises(CheckpointError, match="algorithms"):
        read_part(path, "algorithms")


def test_weights_of_other_tools_files_are_read_unchanged(path: Path) -> None:
    save_file({"module.w": torch.ones(2), "b": torch.zeros(1)}, path, {"format": "pt"})
    weights = read_weights(path)
    assert exactly(weights) == exactly({"b": torch.zeros(1), "module.w": torch.ones(2)})
    with pytest.raises(CheckpointError):
        read_checkpoint(path)


def test_on_the_meta_device_the_file_is_checked_and_has_no_values(path: Path) -> None:
    write_checkpoint(path, some_tree())
    weight = read_checkpoint(path, device="meta")["model"]["net.a"]
    assert weight.is_meta
    assert (weight.shape, weight.dtype) == ((5, 3), torch.float32)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError):
        read_checkpoint(path, device="meta")


# Writing


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """No file can grow beyond a size, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_the_file_before_it_and_nothing_else(path: Path) -> None:
    write_checkpoint(path, {"model": {"w": torch.ones(2)}})
    with files_up_to(100_000), pytest.raises(CheckpointError, match=r"a\.safetensors"):
        write_checkpoint(path, {"model": {"w": torch.ones(1_000_000)}})
    assert list(path.parent.iterdir()) == [path]
    assert exactly(read_weights(path)) == exactly({"w": torch.ones(2)})
    for wrong in (path / "b", path.parent):
        with pytest.raises(CheckpointError):
            write_checkpoint(wrong, {})
    assert list(path.parent.iterdir()) == [path]


def test_a_large_file_is_written_and_leaves_the_cache_piece_by_piece(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = {"a": torch.arange(90_000), "b": torch.ones(3), "c": torch.arange(1_000.0), "d": torch.arange(90_000)}
    write_checkpoint(path, tree)
    at_once = path.read_bytes()
    dropped = [0]
    on_disk, fdatasync, fadvise = [0], os.fdatasync, os.posix_fadvise

    def record_sync(descriptor: int) -> None:
        fdatasync(descriptor)
        on_disk.append(os.fstat(descriptor).st_size)

    def record_drop(descriptor: int, *where: int) -> None:
        fadvise(descriptor, *where)
        assert where == (0, 0, os.POSIX_FADV_DONTNEED)
        dropped.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr(os, "fdatasync", record_sync)
    monkeypatch.setattr(os, "posix_fadvise", record_drop)
    monkeypatch.setattr("offloop.bus.checkpoints.image._PIECE", 100_000)
    write_checkpoint(path, tree)
    assert path.read_bytes() == at_once
    assert on_disk == dropped
    assert all(100_000 <= after - before < 200_000 for before, after in itertools.pairwise(dropped))
    assert len(at_once) - dropped[-1] < 100_000


def test_the_next_write_removes_what_a_killed_one_left(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(path, {"a": 1})
    if (pid := os.fork()) == 0:
        monkeypatch.setattr(os, "fsync", lambda descriptor: os.kill(os.getpid(), signal.SIGKILL))
        write_checkpoint(path, {"a": 2})
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    assert read_checkpoint(path) == {"a": 1}
    assert len(list(path.parent.iterdir())) == 2
    write_checkpoint(path, {"a": 3})
    assert list(path.parent.iterdir()) == [path]


def test_the_file_is_on_the_disk_before_it_gets_its_name_and_obeys_the_umask(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []
    fsync, replace = os.fsync, os.replace

    def record_fsync(descriptor: int) -> None:
        steps.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def record_replace(source: Any, target: Any) -> None:
        steps.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    before = os.umask(0o027)
    try:
        write_checkpoint(path, {})
    finally:
        os.umask(before)
    assert steps == [path.name, "replace", path.parent.name]
    assert path.stat().st_mode & 0o777 == 0o640
