"""What a host says of its ranks about once a second, for runs on many hosts: a small message in place of all events."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack

from offloop.bus.errors import ProtocolError

MAX_WINDOW = 256 * 1024
"""Bytes of the longest message that is read."""
_GREATEST = 3.4028234663852886e38
MAX_RANKS = 4096
"""Ranks of one host."""
MAX_QUANTITIES = 64

STEP = "step"
"""Seconds that a batch took, from the end of the one before to its end."""
ARRIVAL = "arrival"
"""Seconds before the end of a batch at which the rank began its first backward pass, negative: ranks that train
together end a batch together, so the greatest value is the rank that the others waited for. No two clocks are
compared."""
LOSS = "loss"
MEMORY = "memory"
"""Bytes of the device's memory that are in use, or of the process where there is no such device."""
GRADIENT_NORM = "gradient_norm"
THROUGHPUT = "throughput"
"""Samples a second."""
PHASE = "phase/"
"""Begins the name of a phase's time: seconds for each batch, see :data:`offloop.bus.trace.phases.PHASES`."""


@dataclass(frozen=True)
class Quantity:
    """One quantity of a host's ranks over a window of batches."""

    ranks: tuple[float, ...]
    """Its mean over the window for each of :attr:`HostWindow.ranks`; not a number where there is none."""
    least: float
    mean: float
    greatest: float
    """Of all values of all ranks in the window; not a number where there are none."""
    worst: int | None
    """The rank with the greatest mean, of throughput that with the least; ``None`` without one."""
    count: int
    """How many values there were."""
    first_nan: tuple[int, int] | None = None
    """The first value that was not finite: its batch and its rank."""


@dataclass(frozen=True)
class HostWindow:
    """A window of batches of one host."""

    host: str
    attempt: int
    ranks: tuple[int, ...]
    """The ranks of the host, in order."""
    world_size: int
    """The ranks of all hosts."""
    first: int
    last: int
    """The batches that it is about, by the number of batches trained at their ends."""
    time_ns: int
    """When the last of them ended, nanoseconds since 1970 by the host's clock."""
    seconds: float
    """How long it took."""
    batches: tuple[int, ...]
    """How many batches each rank has trained at its end."""
    late: tuple[int, ...] = ()
    """The ranks that had not ended batch :attr:`last` when it was sent."""
    quantities: Mapping[str, Quantity] = field(default_factory=dict)


def encode_window(window: HostWindow) -> bytes:
    """Packs a window; numbers are 32 bits wide."""
    quantities = {
        name: [_wide(one.ranks), one.least, one.mean, one.greatest, one.worst, one.count, one.first_nan]
        for name, one in window.quantities.items()
    }
    packed = [
        window.host,
        window.attempt,
        window.ranks,
        window.world_size,
        window.first,
        window.last,
        window.time_ns,
        window.seconds,
        window.batches,
        window.late,
        quantities,
    ]
    return bytes(msgpack.packb(packed, use_single_float=True))


def decode_window(data: bytes) -> HostWindow:
    """Reads a window.

    Raises:
        ProtocolError: it is malformed.
    """
    if len(data) > MAX_WINDOW:
        raise ProtocolError(f"a host's window of {len(data):,} bytes: at most {MAX_WINDOW:,} are read")
    try:
        read = msgpack.unpackb(data, use_list=False, strict_map_key=True)
        host, attempt, ranks, world_size, first, last, time_ns, seconds, batches, late, quantities = read
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError):
        raise ProtocolError("a host's window is malformed") from None
    ranks, batches, late = _whole_numbers(ranks), _whole_numbers(batches), _whole_numbers(late)
    _whole_numbers((attempt, world_size, first, last, time_ns))
    is_good = (
        isinstance(host, str)
        and len(late) <= len(ranks) == len(batches) <= MAX_RANKS
        and isinstance(quantities, dict)
        and len(quantities) <= MAX_QUANTITIES
    )
    if not is_good:
        raise ProtocolError("a host's window is malformed")
    made = {str(name): _quantity(value, len(ranks)) for name, value in quantities.items()}
    return HostWindow(host, attempt, ranks, world_size, first, last, time_ns, _number(seconds), batches, late, made)


def _wide(values: Iterable[float]) -> list[float]:
    return [float(value) for value in values]


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise ProtocolError("a host's window has something else than a number")
    return float(value)


def _whole_numbers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple) or any(type(value) is not int or value < 0 for value in values):
        raise ProtocolError("a host's window has something else than whole numbers")
    return values


def _quantity(value: Any, ranks: int) -> Quantity:
    if not isinstance(value, tuple) or len(value) != 7 or not isinstance(value[0], tuple) or len(value[0]) != ranks:
        raise ProtocolError("a host's window is malformed")
    means, least, mean, greatest, worst, count, first_nan = value
    if worst is not None:
        _whole_numbers((worst,))
    _whole_numbers((count,))
    if first_nan is not None:
        first_nan = _whole_numbers(first_nan)
        if len(first_nan) != 2:
            raise ProtocolError("a host's window is malformed")
    numbers = tuple(_number(one) for one in means)
    return Quantity(numbers, _number(least), _number(mean), _number(greatest), worst, count, first_nan)


def is_finite(value: float) -> bool:
    """Whether a value is a number of 32 bits, as those in windows are: greater ones are infinite there."""
    return -_GREATEST <= value <= _GREATEST


def summarize(
    name: str, ranks: Sequence[int], values: Sequence[Sequence[float]], first_nan: tuple[int, int] | None = None
) -> Quantity:
    """The quantity of that name from the values of each rank; ``first_nan`` is as in :class:`Quantity`."""
    finite = [[value for value in of_rank if is_finite(value)] for of_rank in values]
    means = tuple(math.fsum(of_rank) / len(of_rank) if of_rank else math.nan for of_rank in finite)
    there = [value for of_rank in finite for value in of_rank]
    known = [(mean, rank) for mean, rank in zip(means, ranks, strict=True) if not math.isnan(mean)]
    worst = (min if name == THROUGHPUT else max)(known)[1] if len(known) > 0 else None
    return Quantity(
        means,
        min(there, default=math.nan),
        math.fsum(there) / len(there) if there else math.nan,
        max(there, default=math.nan),
        worst,
        sum(map(len, values)),
        first_nan,
    )
