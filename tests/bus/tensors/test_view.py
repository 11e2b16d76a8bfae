import json
import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save
from safetensors.torch import save as save_torch

from offloop.bus.errors import ClosedError, ConfigurationError, FieldNotAvailableError, ProtocolError
from offloop.bus.tensors import view as tensors
from offloop.bus.tensors.segments import SegmentPool
from offloop.bus.tensors.view import Tensors, is_tensors, open_tensors, tensor_places

DTYPES = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def image_of(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def wired(image: bytes) -> dict[str, Any]:
    return {"$tensors": 1, "bytes": len(image), "image": image}


SMALL = save({"a": np.arange(6, dtype="<i4").reshape(2, 3), "é": np.ones(1)}, {"step": "7"})

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda name: name != "__metadata__")
shapes = st.lists(st.integers(0, 4), max_size=4)
specs = st.dictionaries(names, st.tuples(st.sampled_from(list(DTYPES)), shapes), max_size=8)
metadata = st.none() | st.dictionaries(names, st.text(st.characters(exclude_categories=["Cs"])), max_size=1)


# -- reading ----------------------------------------------------------------------------------------------------------


def test_tensors_are_those_of_the_file() -> None:
    assert is_tensors(wired(SMALL))
    with open_tensors(wired(SMALL)) as read:
        assert list(read) == ["é", "a"]
        assert len(read) == 2
        assert read["a"].dtype == "I32"
        assert read["a"].shape == (2, 3)
        assert read["a"].data == np.arange(6, dtype="<i4").tobytes()
        np.testing.assert_array_equal(read["a"].numpy(), [[0, 1, 2], [3, 4, 5]])
        assert read.metadata == {"step": "7"}
        assert read.image == SMALL
        with pytest.raises(KeyError):
            read["b"]
    for other in (None, 1, b"", [], {}, {"tensors": 1}, "$tensors", ["$tensors"]):
        assert not is_tensors(other)


@given(specs, metadata, st.binary(min_size=1, max_size=64))
@settings(max_examples=150)
def test_the_layout_is_that_of_safetensors(
    specs: dict[str, tuple[str, list[int]]], metadata: dict[str, str] | None, noise: bytes
) -> None:
    assume(specs or metadata != {})  # of nothing at all safetensors 0.8.0 writes what is not JSON
    stored: dict[str, torch.Tensor] = {}
    layout = tensor_places(specs).layout(metadata)
    image = bytearray(layout.size)
    image[: len(layout.header)] = layout.header
    for name, (dtype, shape) in specs.items():
        count = int(np.prod(shape, dtype=int)) * DTYPES[dtype].itemsize
        data = (noise * count)[:count] if dtype != "BOOL" else bytes(count)
        start = len(layout.header) + layout.starts[name]
        image[start : start + count] = data
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        stored[name] = flat.view(DTYPES[dtype]).reshape(shape)
    assert image == save_torch(stored, metadata)
    with Tensors.from_image(image) as read:
        assert list(read) == list(layout.starts)
        assert {name: (view.dtype, list(view.shape)) for name, view in read.items()} == {
            name: (dtype, shape) for name, (dtype, shape) in specs.items()
        }
        assert read.metadata == (metadata or {})


def test_metadata_keep_their_order() -> None:
    strings = {text: text for text in ("z", "a", "é", "b")}
    layout = tensor_places({"a": ("F32", [])}).layout(strings)
    with Tensors.from_image(layout.header + bytes(4)) as read:
        assert list(read.metadata.items()) == list(strings.items())
    assert load(layout.header + bytes(4))["a"].shape == ()


def test_numpy_has_the_values_that_torch_has() -> None:
    for dtype in (dtype for dtype in DTYPES if not dtype.startswith("F8")):
        values = torch.tensor([[0, 1, 2], [3, 5, 7]]).to(DTYPES[dtype])
        array = Tensors.from_image(save_torch({"a": values}))["a"].numpy()
        np.testing.assert_array_equal(array, values.float().numpy() if dtype == "BF16" else values.numpy())
        assert array.shape == (2, 3)
        assert array.dtype == (np.float32 if dtype == "BF16" else values.numpy().dtype)
    values = torch.tensor([float("inf"), float("nan"), -0.0, 1e-40, 3.14159]).bfloat16()
    array = Tensors.from_image(save_torch({"a": values}))["a"].numpy()
    assert array.tobytes() == values.float().numpy().tobytes()
    # Where numpy has no dtype, it is named.
    view = Tensors.from_image(save_torch({"a": torch.zeros(2, dtype=torch.float8_e4m3fn)}))["a"]
    with pytest.raises(ConfigurationError, match="numpy has no dtype for F8_E4M3"):
        view.numpy()
    assert bytes(view.data) == bytes(2)


@given(st.integers(0, len(SMALL) - 1), st.binary(min_size=1, max_size=4))
@settings(max_examples=200)
def test_a_damaged_file_is_refused_or_is_within_its_bytes(place: int, noise: bytes) -> None:
    image = (SMALL[:place] + noise + SMALL[place + len(noise) :])[: len(SMALL)]
    try:
        read = Tensors.from_image(image)
    except ProtocolError:
        return
    taken = sum(len(view.data) for view in read.values())
    assert taken == len(image) - 8 - struct.unpack("<Q", image[:8])[0]
    for view in read.values():
        assert view.dtype in tensors._BITS
        view.numpy()


FOUR = b"1234"


MALFORMED = [
    *(image_of({"a": entry(shape=shape)}, FOUR) for shape in ([2], [-1, -1], [True], [1] * 65)),
    *(image_of({"a": entry(offsets=at)}, FOUR) for at in ([-4, 0], [1 << 70, (1 << 70) + 4])),
    *(image_of({"a": entry(shape=shape, offsets=[0, 0])}) for shape in ([1 << 62, 4], [1 << 30, 1 << 30, 0])),
    image_of({"a": entry("F4", shape=[1], offsets=[0, 0])}),
    image_of({"a": entry(), "b": entry()}, FOUR),
    image_of({"a": entry(), "b": entry(offsets=[2, 6])}, FOUR + FOUR),
    image_of({"a": entry()}, FOUR + b"5"),
    image_of({"__metadata__": {"a": 1}}),
    image_of(b'{"__metadata__":{"\\ud800":""}}'),
    image_of(b" {}"),
    image_of(b"[" * 500_000),
    image_of(b'{"a":[' + b"1," * ((1 << 22) + 1) + b"1]}"),
    image_of(b'{"a":' + b"1" * 5000 + b"}"),
    struct.pack("<Q", 1 << 63) + b"{}",
]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["F32", "BF16"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "__metadata__", "a"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(json_values, st.binary(max_size=8))
@settings(max_examples=300)
def test_any_json_is_a_header_or_refused(header: Any, data: bytes) -> None:
    try:
        read = Tensors.from_image(image_of(header, data))
    except ProtocolError:
        return
    assert sum(len(view.data) for view in read.values()) == len(data)


def test_a_malformed_or_truncated_file_is_refused() -> None:
    for image in (*MALFORMED, *(SMALL[:length] for length in range(len(SMALL)))):
        with pytest.raises(ProtocolError):
            Tensors.from_image(image)


# -- laying out -------------------------------------------------------------------------------------------------------


def test_invalid_names_and_shapes_are_refused() -> None:
    specs: list[Any] = [("float32", [1]), ("F32", [-1]), ("F32", [1.5]), ("F4", [3]), ("U8", [1 << 49])]
    for name, spec in (*(("a", spec) for spec in specs), ("__metadata__", ("F32", [1])), ("\ud800", ("F32", [1]))):
        with pytest.raises(ConfigurationError, match="cannot be sent"):
            tensor_places({name: spec}).layout()


# -- the value of a field ---------------------------------------------------------------------------------------------


REFERENCE = {"pid": 1, "fd": 1, "token": bytes(16), "number": 1, "size": 8}


def test_invalid_tensor_values_are_refused() -> None:
    right = {"$tensors": 1, "bytes": len(SMALL), "image": SMALL}
    wrong: list[dict[str, Any]] = [{"$tensors": 2}, {"image": None}, {"bytes": None}, {"bytes": len(SMALL) + 1}]
    segments = ({}, {"pid": 1}, {**REFERENCE, "pid": -1}, {**REFERENCE, "size": 9})
    in_memory = [{"$tensors": 1, "bytes": 8, "segment": segment} for segment in segments]
    for value in (None, {}, *({**right, **changes} for changes in wrong), *in_memory):
        with pytest.raises(ProtocolError):
            open_tensors(value)


@pytest.fixture
def shared() -> Any:
    pool = SegmentPool(1, is_handled=lambda seq, field: True)
    segment = pool.reserve(len(SMALL), "weights")
    assert segment is not None
    segment.buffer[:] = SMALL
    reference = segment.publish(1)
    yield pool, {"$tensors": 1, "bytes": len(SMALL), "segment": reference}
    pool.close()


def test_tensors_in_shared_memory_are_read_in_place(shared: tuple[SegmentPool, dict[str, Any]]) -> None:
    pool, value = shared
    with open_tensors(value) as read:
        np.testing.assert_array_equal(read["a"].numpy(), [[0, 1, 2], [3, 4, 5]])
        assert read.image == SMALL
        assert not read["a"].numpy().flags.writeable
        assert pool.reserve(8, "weights") is None
    assert pool.reserve(8, "weights") is not None


def test_closed_tensors_are_errors_and_kept_arrays_stay_valid(shared: tuple[SegmentPool, dict[str, Any]]) -> None:
    pool, value = shared
    read = open_tensors(value)
    kept = read["a"].numpy()
    read.close()
    read.close()
    for look in (lambda: read["a"], lambda: read.image):
        with pytest.raises(ClosedError, match="copy them"):
            look()
    assert pool.reserve(8, "weights") is None
    np.testing.assert_array_equal(kept, [[0, 1, 2], [3, 4, 5]])
    del kept
    assert pool.reserve(8, "weights") is not None


def test_an_invalid_image_is_not_leased(shared: tuple[SegmentPool, dict[str, Any]]) -> None:
    pool, _ = shared
    segment = pool.reserve(16, "weights")
    assert segment is not None
    segment.buffer[:] = b"\xff" * 16
    value = {"$tensors": 1, "bytes": 16, "segment": segment.publish(2)}
    with pytest.raises(ProtocolError):
        open_tensors(value)
    assert pool.reserve(16, "weights") is not None


def test_only_images_of_another_machine_are_fetched(shared: tuple[SegmentPool, dict[str, Any]]) -> None:
    pool, value = shared
    fetched: list[Any] = []

    def fetch(reference: Any) -> bytes:
        fetched.append(reference)
        return SMALL

    open_tensors(value, fetch).close()
    assert fetched == []
    with open_tensors({**value, "segment": {**value["segment"], "token": bytes(16)}}, fetch) as read:
        assert read["a"].shape == (2, 3)
    assert fetched == [{**value["segment"], "token": bytes(16)}]
    with pytest.raises(FieldNotAvailableError, match="no such memory here"):
        open_tensors({**value, "segment": {**value["segment"], "token": bytes(16)}})
    assert pool.reserve(8, "weights") is not None
    with pytest.raises(FieldNotAvailableError, match="too late"):
        open_tensors(value, fetch)
    assert len(fetched) == 1
