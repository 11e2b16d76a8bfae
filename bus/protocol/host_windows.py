"""The report of a host on its ranks about once a second, for runs on many hosts: a small message in place of all
events."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, TypeAlias

import msgpack
import msgspec

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
"""Begins the name of a phase's time: seconds for each batch, see :data:`offloop.bus.types.phases.PHASES`."""


_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class Quantity(msgspec.Struct, array_like=True, frozen=True):
    """One quantity of a host's ranks over a window of batches."""

    ranks: tuple[float, ...]
    """Its mean over the window for each of :attr:`HostWindow.ranks`; not a number where there is none."""
    least: float
    mean: float
    greatest: float
    """Of all values of all ranks in the window; not a number where there are none."""
    worst: _Count | None
    """The rank with the greatest mean, of throughput that with the least; ``None`` without one."""
    count: _Count
    """Number of values."""
    first_nan: tuple[_Count, _Count] | None = None
    """The first value that was not finite: its batch and its rank."""


class HostWindow(msgspec.Struct, array_like=True, frozen=True):
    """A window of batches of one host."""

    host: str
    attempt: _Count
    ranks: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=MAX_RANKS)]
    """The ranks of the host, in order."""
    world_size: _Count
    """The ranks of all hosts."""
    first: _Count
    last: _Count
    """The batches that it is about, by the number of batches trained at their ends."""
    time_ns: _Count
    """When the last of them ended, nanoseconds since 1970 by the host's clock."""
    seconds: float
    """Duration of the window."""
    batches: tuple[_Count, ...]
    """Batches that each rank has trained at its end."""
    late: tuple[_Count, ...] = ()
    """The ranks that had not ended batch :attr:`last` when it was sent."""
    quantities: Annotated[Mapping[str, Quantity], msgspec.Meta(max_length=MAX_QUANTITIES)] = {}


_decode = msgspec.msgpack.Decoder(HostWindow).decode


def encode_window(window: HostWindow) -> bytes:
    """Packs a window; numbers are 32 bits wide."""
    return bytes(msgpack.packb(msgspec.to_builtins(window), use_single_float=True))


def decode_window(data: bytes) -> HostWindow:
    """Reads a window. Raises ProtocolError: it is malformed."""
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
    """The value is a number of 32 bits, as those in windows are: greater ones are infinite there."""
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
