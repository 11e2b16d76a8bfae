"""Makes windows from the events of a host's ranks."""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from offloop.bus.protocol import host_windows
from offloop.bus.protocol.host_windows import HostWindow, Quantity, is_finite, summarize
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.health import Health
from offloop.bus.types.phases import PHASES, read_phases

LATE_NS = 5_000_000_000  # how long to wait for other ranks after the first one has finished a window
_LEAST_NS = 1_000_000_000
_STEADY = 3
_RESERVED = "reserved_bytes.all.current"


class _Batch(NamedTuple):
    ended_ns: int
    values: dict[str, float]
    samples: int | None
    shards: int  # as in HostWindow


class _Window(NamedTuple):
    """A window that its first rank has finished."""

    first: int
    last: int
    began_ns: int
    ended_ns: int


@dataclass
class _Rank:
    batch: int = 0  # number of trained batches
    batches: dict[int, _Batch] = field(default_factory=dict)  # batches of open windows, and the one before


class HostWindows:
    """Makes windows from the ``batch_end`` events of a host's ranks. It takes times from events only.

    A window has the smallest power of two of batches that takes at least a second, by the duration of its own batches,
    and ends with a batch that is divisible by it. It is closed when all ``count`` ranks have finished it, or
    :data:`LATE_NS` after the first one. ``after`` is the last batch of existing windows."""

    def __init__(
        self,
        host: str,
        attempt: int,
        ranks: Iterable[int],
        world_size: int,
        count: int,
        after: int | None = None,
    ) -> None:
        self._host = host
        self._attempt = attempt
        self._world_size = world_size
        self._count = count
        self._ranks = {rank: _Rank() for rank in ranks}
        self._after = self._closed = after or 0
        self._furthest = 0
        # First batch of the open window, and end of the batch before it, or of the first batch seen.
        self._first: int | None = None
        self._mark: tuple[int, int] | None = None
        self._ended: deque[_Window] = deque()
        self._lengths: deque[int] = deque(maxlen=_STEADY)
        self.health: Health | None = None  # for the next window
        self.batches: int | None = None
        """Usual number of batches in a window, a power of two, once known.

        It changes only when three windows agree, and so not by an evaluation, or for steps of about half a second."""

    def take(self, snapshot: Snapshot) -> list[HostWindow]:
        """Add the end of a batch; return the windows closed by it."""
        batch, now_ns = snapshot.timestamp.values.batch, snapshot.time_ns
        rank = self._ranks.setdefault(snapshot.rank, _Rank())
        if batch <= rank.batch:
            return []
        rank.batch = batch
        if batch <= self._closed:
            # Of earlier batches only the end is needed, as the start of the next one.
            rank.batches.clear()
        rank.batches[batch] = _Batch(now_ns, *_values(snapshot))
        if batch > self._furthest:
            self._furthest = batch
            self._look(batch, now_ns)
        return self.close_late(now_ns)

    def _look(self, batch: int, now_ns: int) -> None:
        """End the open window if this batch, which the first rank has just finished, completes it."""
        if batch <= self._after:
            self._mark = batch, now_ns
            return
        if self._first is None:
            self._first = batch if self._mark is None else self._after + 1
        if self._mark is None:
            # Its duration is unknown.
            self._mark = batch, now_ns
            return
        before, began_ns = self._mark
        took = max(now_ns - began_ns, 1) / (batch - before)
        length: int = 1 << max(0, math.ceil(math.log2(_LEAST_NS / took)))
        if batch % length == 0:
            self._ended.append(_Window(self._first, batch, began_ns, now_ns))
            self._first, self._mark = batch + 1, (batch, now_ns)
            self._note_length(length)

    def _note_length(self, length: int) -> None:
        lengths = self._lengths
        lengths.append(length)
        if len(lengths) == _STEADY and (self.batches is None or len(set(lengths)) == 1):
            self.batches = sorted(lengths)[_STEADY // 2]

    def close_late(self, now_ns: int) -> list[HostWindow]:
        """Close and return windows that all ranks have finished, and late ones."""
        closed = []
        while self._ended:
            window = self._ended[0]
            ended = sum(rank.batch >= window.last for rank in self._ranks.values())
            if ended < max(self._count, len(self._ranks)) and now_ns < window.ended_ns + LATE_NS:
                break
            closed.append(self._close(self._ended.popleft()))
        return closed

    def finish(self) -> list[HostWindow]:
        """Close and return all windows at the end of the stream; the last one may be short."""
        if self._first is not None and self._mark is not None and self._furthest >= self._first:
            ended_ns = max(known.batches[self._furthest].ended_ns for known in self._at(self._furthest))
            self._ended.append(_Window(self._first, self._furthest, self._mark[1], ended_ns))
            self._first = self._furthest + 1
        return [self._close(self._ended.popleft()) for _ in range(len(self._ended))]

    def _at(self, batch: int) -> list[_Rank]:
        return [rank for rank in self._ranks.values() if batch in rank.batches]

    def _close(self, window: _Window) -> HostWindow:
        first, last = window.first, window.last
        ranks = sorted(self._ranks)
        values: dict[str, dict[int, list[tuple[int, float]]]] = {}
        for rank in ranks:
            for name, batch, value in self._quantities(rank, first, last):
                values.setdefault(name, {}).setdefault(rank, []).append((batch, value))
        made = HostWindow(
            self._host,
            self._attempt,
            tuple(ranks),
            self._world_size,
            first,
            last,
            max((known.batches[last].ended_ns for known in self._at(last)), default=window.ended_ns),
            (window.ended_ns - window.began_ns) / 1e9,
            tuple(self._ranks[rank].batch for rank in ranks),
            tuple(rank for rank in ranks if self._ranks[rank].batch < last),
            {name: _summary(name, ranks, of_ranks) for name, of_ranks in values.items()},
            self.health,
            max((known.batches[last].shards for known in self._at(last)), default=0),
        )
        self.health = None
        self._closed = last
        for known in self._ranks.values():
            kept = max((batch for batch in known.batches if batch <= last), default=0)
            known.batches = {batch: one for batch, one in known.batches.items() if batch >= kept}
        return made

    def _quantities(self, rank: int, first: int, last: int) -> Iterator[tuple[str, int, float]]:
        """Yield a rank's values in a window: name, number of batches trained, value."""
        batches = self._ranks[rank].batches
        took = samples = 0.0
        for batch in range(first, last + 1):
            here, before = batches.get(batch), batches.get(batch - 1)
            if here is None:
                continue
            for name, value in here.values.items():
                if name != host_windows.SHARD_NORM or batch == last:
                    yield name, batch, value
            if before is not None:
                seconds = (here.ended_ns - before.ended_ns) / 1e9
                yield host_windows.STEP, batch, seconds
                if here.samples is not None:
                    took, samples = took + seconds, samples + here.samples
        if took > 0:
            yield host_windows.THROUGHPUT, last, samples / took


def _values(snapshot: Snapshot) -> tuple[dict[str, float], int | None, int]:
    """Return the values of a batch by name, its number of samples, and the number of ranks with shards."""
    get = snapshot.get
    values: dict[str, float] = {}
    for name, value in ((host_windows.LOSS, get("loss")), (host_windows.GRADIENT_NORM, get("gradient_norm"))):
        if isinstance(value, int | float):
            values[name] = float(value)
    shards = 0
    match get("gradient_norm"):
        case {"shards": int() | float() as norm, "ranks": int() as shards}:
            values[host_windows.SHARD_NORM] = float(norm)
    memory = get("memory_stats")
    if isinstance(memory, dict) and isinstance(reserved := memory.get(_RESERVED), int | float):
        values[host_windows.MEMORY] = float(reserved)
    phases = read_phases(get("phases"))
    if phases is not None:
        for name, nanoseconds in phases.totals().items():
            if name in PHASES:
                values[host_windows.PHASE + name] = nanoseconds / 1e9
        if starts := phases.starts("backward"):
            values[host_windows.ARRIVAL] = (starts[0] - snapshot.time_ns) / 1e9
    samples = get("batch_size")
    return values, samples if type(samples) is int else None, max(shards, 0)


def _summary(name: str, ranks: Sequence[int], of_ranks: Mapping[int, list[tuple[int, float]]]) -> Quantity:
    values = [[value for _, value in of_ranks.get(rank, ())] for rank in ranks]
    not_finite = ((batch, rank) for rank, found in of_ranks.items() for batch, value in found if not is_finite(value))
    return summarize(name, ranks, values, min(not_finite, default=None))
