"""Reports of a host about its ranks, about one a second: for runs on many hosts, in place of all events."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, TypeAlias

import msgpack
import msgspec

from offloop.bus.errors import ProtocolError
from offloop.bus.types.health import Health

MAX_WINDOW = 256 * 1024  # limit of a message, in bytes
_GREATEST = 3.4028234663852886e38
MAX_RANKS = 4096  # limit of ranks on one host
MAX_QUANTITIES = 64

STEP = "step"  # seconds of a batch, from the end of the preceding one
ARRIVAL = "arrival"
"""Start of the rank's first backward pass, in seconds before the end of the batch: a negative number.

Synchronized ranks end a batch together, so the others waited for the rank with the greatest value. Clocks of different
hosts are not compared."""
LOSS = "loss"
MEMORY = "memory"  # bytes in use on the device
GRADIENT_NORM = "gradient_norm"
SHARD_NORM = "gradient_norm/shards"  # of the gradients of the rank's shards, at the last batch alone
THROUGHPUT = "throughput"  # samples a second
PHASE = "phase/"
"""Prefix of a phase's name, with the seconds of each batch: see :data:`offloop.bus.types.phases.PHASES`."""


_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class Quantity(msgspec.Struct, array_like=True, frozen=True):
    """One quantity of a host's ranks over a window of batches. NaN stands for missing values."""

    ranks: tuple[float, ...]  # mean over the window for each of ``HostWindow.ranks``
    least: float
    mean: float
    greatest: float  # these three are over all values of all ranks in the window
    worst: _Count | None  # rank with the greatest mean (for throughput the least), if any
    count: _Count  # number of values
    first_nan: tuple[_Count, _Count] | None = None  # batch and rank of the first value that was not finite


class HostWindow(msgspec.Struct, array_like=True, frozen=True):
    """A window of batches of one host."""

    host: str
    attempt: _Count
    ranks: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=MAX_RANKS)]  # ranks of the host, in order
    world_size: _Count  # number of ranks of all hosts
    first: _Count
    last: _Count  # first and last batch, each as the number of batches trained at its end
    time_ns: _Count  # end of the last batch, in nanoseconds since 1970 by the host's clock
    seconds: float  # duration of the window
    batches: tuple[_Count, ...]  # number of batches that each rank had trained at its end
    late: tuple[_Count, ...] = ()  # ranks that had not finished batch ``last`` when the window was sent
    quantities: Annotated[Mapping[str, Quantity], msgspec.Meta(max_length=MAX_QUANTITIES)] = {}
    health: Health | None = None  # measured since the window before
    shards: _Count = 0  # number of ranks of all hosts with a SHARD_NORM, known to the host of the first rank


_decode = msgspec.msgpack.Decoder(HostWindow).decode


def encode_window(window: HostWindow) -> bytes:
    """Pack a window, with 32-bit floats."""
    return bytes(msgpack.packb(msgspec.to_builtins(window), use_single_float=True))


def decode_window(data: bytes) -> HostWindow:
    if len(data) > MAX_WINDOW:
        raise ProtocolError(f"a host's window of {len(data):,} bytes: at most {MAX_WINDOW:,} are read")
    try:
        window: HostWindow = _decode(data)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a host's window is malformed: {error}") from None
    ranks = len(window.ranks)
    lengths = {len(window.batches), *(len(one.ranks) for one in window.quantities.values())}
    if len(window.late) > ranks or lengths != {ranks}:
        raise ProtocolError("a host's window is malformed")
    return window


def is_finite(value: float) -> bool:
    """Return whether a value is finite as a 32-bit float."""
    return -_GREATEST <= value <= _GREATEST


def summarize(
    name: str, ranks: Sequence[int], values: Sequence[Sequence[float]], first_nan: tuple[int, int] | None = None
) -> Quantity:
    """Compute a quantity from each rank's values; ``first_nan`` is as in :class:`Quantity`."""
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
