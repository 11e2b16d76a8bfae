"""Good messages, and strategies that spoil good input."""

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgpack
from hypothesis import reject
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from offloop.bus.protocol.frames import Topic, event_encoder, pack_map
from offloop.bus.types.demand import Demand
from offloop.bus.types.event import Event

EVENT_FIELDS = {"loss": 0.5, "lr": {"SGD": [0.1]}, "batch_size": 32, "train_metrics": {"accuracy": 0.5}}
CONTEXT = {"max_duration": "5ep", "dataloader_label": "train", "dataloader_len": 45, "world_size": 1}
DEMAND = Demand.of([Event.BATCH_START]).to_wire() | {
    "batch_end": {"every": [1], "fields": {"gradient_norm": [10, 15], "images": [100]}}
}


def event_frame(
    seq: int,
    name: str = "batch_end",
    fields: dict[str, Any] | None = None,
    *,
    run: str = "r",
    rank: int = 0,
    attempt: int = 1,
    base_seq: int | None = None,
) -> bytes:
    counters = [0, 1, seq, seq, 0, 1, 0, seq, seq, 0, seq, seq, seq, 1]
    encode = event_encoder(Topic(run, name, rank), attempt)
    number = seq if base_seq is None else base_seq
    return encode(seq, number, seq, counters, counters, EVENT_FIELDS if fields is None else fields, pack_map(CONTEXT))


def packed(value: Any) -> bytes:
    return bytes(msgpack.packb(value))


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


_NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.sampled_from((-(2**63), 2**31, 2**53, 2**63 - 1, 2**64 - 1))
_TEXTS = st.text(max_size=300) | st.sampled_from(("../..", "/etc/passwd", "a\0b", "x" * 300, "-1ba", "%s%n", "$end"))
_EXTENSIONS = st.sampled_from((msgpack.ExtType(5, b"abc"), msgpack.Timestamp(0, 1), msgpack.Timestamp(2**40, 5)))
_VALUES = (
    st.recursive(
        st.none() | st.booleans() | _NUMBERS | st.floats() | _TEXTS | st.binary(max_size=40) | _EXTENSIONS,
        lambda inner: st.lists(inner, max_size=15) | st.dictionaries(_TEXTS | _NUMBERS, inner, max_size=8),
        max_leaves=20,
    )
    | st.sampled_from((1, 15, 16, 17, 18, 100, 400)).map(nested)
    | st.sampled_from((300, 1 << 12)).map(lambda length: [0] * length)
    | st.sampled_from((51, 65)).map(lambda length: {f"k{number}": number for number in range(length)})
)


@st.composite
def spoiled(draw: DrawFn, value: Any, values: SearchStrategy[Any] = _VALUES) -> Any:
    if not value or not isinstance(value, dict | list | tuple):
        return draw(spoiled_bytes(value) | values if isinstance(value, bytes) else values)
    pairs: list[Any] = list(value.items()) if isinstance(value, dict) else [(None, item) for item in value]
    at = draw(st.integers(0, len(pairs) - 1))
    key, item = pairs[at]
    match draw(st.integers(0, 7)):
        case 0:
            del pairs[at]
        case 1:
            pairs.insert(draw(st.integers(0, len(pairs))), (draw(_TEXTS), item))
        case 2:
            pairs.insert(at, (draw(_TEXTS | _NUMBERS), draw(values)))
        case _:
            pairs[at] = key, draw(spoiled(item, values))
    return dict(pairs) if isinstance(value, dict) else [item for _, item in pairs]


@st.composite
def spoiled_bytes(draw: DrawFn, data: bytes, pieces: Sequence[bytes] = (b"\xff" * 8,)) -> bytes:
    for _ in range(draw(st.integers(1, 4))):
        at, other = draw(st.integers(0, len(data))), draw(st.integers(0, len(data)))
        until = at + draw(st.sampled_from((0, 1, 1, 2, 4, 8, 32, len(data))))
        new = st.binary(max_size=8) | st.sampled_from((data[other : other + 32], *pieces))
        data = data[:at] + draw(new) + data[until:]
    return data


@st.composite
def spoiled_packed(draw: DrawFn, data: bytes) -> bytes:
    try:
        value = msgpack.unpackb(data, strict_map_key=False)
    except (ValueError, TypeError, RecursionError):
        return draw(spoiled_bytes(data))
    for _ in range(draw(st.integers(1, 3))):
        value = draw(spoiled(value))
    try:
        return packed(value)
    except ValueError:  # nested too deep, or a number added to one of its limits
        reject()


@st.composite
def spoiled_frame(draw: DrawFn, data: bytes) -> bytes:
    topic, delimiter, body = data.partition(b"\0")
    if draw(st.integers(0, 4)) == 4:
        return draw(spoiled_bytes(topic)) + delimiter + body
    return topic + delimiter + draw(spoiled_packed(body))


_JSON = (b"1e999", b"-1", b"NaN", b"Infinity", b'"x"', b"null", b"[]", b"{}", b"[" * 3000, b"9" * 5000, b'"\\ud800"')


@st.composite
def spoiled_json(draw: DrawFn, data: bytes) -> bytes:
    try:
        value = draw(spoiled(json.loads(data), st.just("@")))
    except (ValueError, RecursionError):
        return draw(spoiled_bytes(data, _JSON))
    return json.dumps(value).encode().replace(b'"@"', draw(st.sampled_from(_JSON)))


class Target(NamedTuple):
    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]  # good input to start with
    spoiled: Callable[[bytes], SearchStrategy[bytes]]  # makes bad input from good input
