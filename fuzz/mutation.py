"""Changes to good input that make it bad: of bytes, and of values before they are packed."""

import struct
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgpack

NUMBERS = (0, 1, -1, 2, 127, 128, 255, 256, 65535, 65536, 2**31, 2**32 - 1, 2**53, 2**63 - 1, -(2**63), 2**64 - 1)
FLOATS = (0.0, -0.0, 0.5, -1.5, 1e308, 5e-324, float("nan"), float("inf"), float("-inf"))
TEXTS = (
    "",
    "0",
    "x",
    "../..",
    "/etc/passwd",
    "a\0b",
    "\n",
    "x" * 300,
    "1ep",
    "-1ba",
    "é",
    "\U0001f600",
    "%s%n",
    "$end",
)
EXTENSIONS = (msgpack.ExtType(5, b"abc"), msgpack.Timestamp(0, 1), msgpack.Timestamp(2**40, 5))
LENGTHS = tuple(struct.pack(form, value) for form in (">B", ">H", ">I", ">Q", "<I", "<Q") for value in (0, 1, 127, 255))


def nested(depth: int) -> Any:
    """A list in a list, so many deep."""
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def mutate_bytes(random: Random, data: bytes, others: Sequence[bytes] = ()) -> bytes:
    """One to four small changes: bits, pieces that are missing, doubled or moved, lengths, parts of ``others``."""
    changed = bytearray(data or b"\0")
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(changed) + 1)
        until = min(len(changed), at + random.choice((1, 1, 2, 4, 8, 32)))
        match random.randrange(7):
            case 0 if at < len(changed):
                changed[at] ^= 1 << random.randrange(8)
            case 1 if at < len(changed):
                changed[at] = random.randrange(256)
            case 2:
                del changed[at:until]
            case 3:
                changed[at:at] = changed[at:until]
            case 4:
                length = random.choice(LENGTHS)
                changed[at : at + len(length)] = length
            case 5:
                del changed[at:]
            case _:
                other = random.choice(others) if others else b"\xff" * 8
                begin = random.randrange(len(other) + 1)
                changed[at:until] = other[begin : begin + random.choice((4, 16, 64, 256))]
    return bytes(changed)


def mutate_packed(random: Random, data: bytes) -> bytes:
    """Unpacks MessagePack, changes a value somewhere in it, and packs it again; bytes that are none are changed as
    such."""
    try:
        value = msgpack.unpackb(data, strict_map_key=False)
        return bytes(msgpack.packb(mutate_value(random, value)))
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException):
        return mutate_bytes(random, data)


def mutate_value(random: Random, value: Any) -> Any:
    """A copy of a value in which something is another value, missing, doubled, or in another place."""
    if isinstance(value, list | tuple) and value and random.random() < 0.85:
        return _mutate_list(random, list(value))
    if isinstance(value, dict) and value and random.random() < 0.85:
        return _mutate_map(random, dict(value))
    if isinstance(value, bytes) and random.random() < 0.7:
        return mutate_bytes(random, value)
    if isinstance(value, int) and random.random() < 0.5:
        return _within(value + random.choice((-2, -1, 1, 2, 1000, -1000, value, -value)))
    return _any_value(random)


def _within(number: int) -> int:
    return max(-(2**63), min(2**64 - 1, number))


def _mutate_list(random: Random, items: list[Any]) -> list[Any]:
    at = random.randrange(len(items))
    match random.randrange(6):
        case 0:
            del items[at]
        case 1:
            items.insert(at, items[random.randrange(len(items))])
        case 2:
            items.insert(at, _any_value(random))
        case _:
            items[at] = mutate_value(random, items[at])
    return items


def _mutate_map(random: Random, values: dict[Any, Any]) -> dict[Any, Any]:
    key = random.choice(list(values))
    match random.randrange(6):
        case 0:
            del values[key]
        case 1:
            values[random.choice((*TEXTS, *NUMBERS, None, 1.5))] = values[key]
        case 2:
            values[random.choice(TEXTS)] = _any_value(random)
        case _:
            values[key] = mutate_value(random, values[key])
    return values


_KINDS: tuple[Callable[[Random], Any], ...] = (
    lambda random: random.choice(NUMBERS),
    lambda random: random.choice(FLOATS),
    lambda random: random.choice(TEXTS),
    lambda random: random.choice((None, True, False)),
    lambda random: random.choice((b"", b"\0", b"\xff" * 40, random.randbytes(20))),
    lambda random: nested(random.choice((1, 15, 16, 17, 18, 100, 400))),
    lambda random: [random.choice(NUMBERS)] * random.choice((0, 1, 13, 14, 15, 300)),
    lambda random: {random.choice(TEXTS): random.choice(NUMBERS), random.choice(NUMBERS): random.choice(TEXTS)},
    lambda random: random.choice(EXTENSIONS),
    lambda random: {f"k{number}": number for number in range(random.choice((0, 51, 65)))},
)


def _any_value(random: Random) -> Any:
    return random.choice(_KINDS)(random)
