"""Many events of one kind at once, as columns of numbers: a long history is read so in a fraction of the time.

Events of a topic are nearly always alike but for their numbers, which stand at the same places of their bodies. One of
them is decoded, as strictly as every other; those whose remaining bytes are the same have been checked by that, and
their numbers are taken out together."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from offloop.bus.errors import ProtocolError
from offloop.bus.protocol.frames import EventBody, decode_event, decode_whole_event
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.event import Event
from offloop.bus.types.timestamp import TrainingTime

if TYPE_CHECKING:
    import numpy as np

    Numbers: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

Path: TypeAlias = tuple[int | str, ...]
"""Where a number stands in an event: the index in its array, then keys and indices."""

SEQ, BASE_SEQ, TIME, TIMESTAMP, PREVIOUS, FIELDS, CONTEXT = 2, 3, 4, 5, 6, 7, 8
_ATTEMPT = 1
WINDOW = 8192
"""So many records are looked at together."""
WINDOW_BYTES = 4 << 20
MAX_BODY = 2048
"""Larger bodies, and those of which fewer than :data:`MIN_ALIKE` are alike, are decoded one by one."""
MIN_ALIKE = 4
MAX_RARE = 8
"""After so many forms of bodies of one size that less than one in :data:`COMMON` have, the rest are decoded one by one:
comparing all with each form would take longer."""
COMMON = 64
MAX_LAYOUTS = 256
_LARGEST = 1 << 53


class Bulk(NamedTuple):
    """What is read in blocks."""

    event: Event
    numbers: frozenset[str]
    """The fields whose numbers are requested. Numbers of the context are there in any case."""
    by_step: frozenset[str]
    """The fields that are lists of pairs of a step and a map, whose numbers are requested, see
    :func:`steps_of`."""
    whole: frozenset[str]
    """The fields that are not numbers: an event with one of them is decoded as a whole, see
    :attr:`EventBlock.decoded`."""


def steps_of(field: Any) -> Iterator[tuple[int, int, Mapping[Any, Any]]]:
    """Of each pair of a step and a map in a list its place, its step and the map; what else is in there is left out."""
    for place, entry in enumerate(field if isinstance(field, list) else ()):
        if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], int) and isinstance(entry[1], Mapping):
            yield place, entry[0], entry[1]


class EventBlock:
    """Events of one rank and kind, as they followed one another, without one missing."""

    def __init__(self, run: str, bulk: Bulk, rank: int, table: "BlockTable", begin: int, end: int) -> None:
        self.run_name, self.event, self.rank = run, bulk.event, rank
        self._bulk, self._table, self._begin, self._end = bulk, table, begin, end
        self.decoded: dict[int, EventBody] = {
            row - begin: body for row, body in table.decoded.items() if begin <= row < end
        }
        """Row to event, in the order of rows, of those that were decoded as a whole; among them are all with a field of
        ``Bulk.whole``."""

    def __len__(self) -> int:
        return self._end - self._begin

    def whole_numbers(self, *path: int | str) -> "Numbers":
        """Of each event a number that every event has, such as ``TIME`` or ``TIMESTAMP, 2``."""
        column: Numbers = self._table.columns[path][1][self._begin : self._end]
        return column

    def numbers(self) -> "Iterator[tuple[Path, Numbers, Numbers]]":
        """Each path under which an event has a number: the rows of those that have, and their numbers."""
        for path, (rows, values) in self._table.columns.items():
            first, last = rows.searchsorted((self._begin, self._end)).tolist()
            if last > first:
                yield path, rows[first:last] - self._begin, values[first:last]

    def filter(self, see: Callable[[Snapshot], Snapshot | None]) -> None:
        """Replaces the events that were decoded as a whole by what ``see`` makes of them; ``None`` leaves one as it
        is."""
        for row, body in self.decoded.items():
            seen = see(self._snapshot(body))
            if seen is not None:
                self.decoded[row] = seen._body

    @property
    def numbers_of_last(self) -> tuple[int, int]:
        """``(seq, base_seq)`` of the last of the events."""
        return int(self.whole_numbers(SEQ)[-1]), int(self.whole_numbers(BASE_SEQ)[-1])

    @property
    def last(self) -> Snapshot:
        """The last of the events."""
        return self._snapshot(decode_event(self._table.bodies[self._end - 1]))

    def first(self, count: int) -> list[Snapshot]:
        """The first so many events."""
        bodies = self._table.bodies[self._begin : min(self._begin + count, self._end)]
        return [self._snapshot(decode_event(body)) for body in bodies]

    def _snapshot(self, body: EventBody) -> Snapshot:
        return Snapshot(self.event, self.run_name, self.rank, body)


class BlockReader:
    """Makes blocks of records that follow one another in a recording, for one reader of it: it knows the forms that the
    bodies had before."""

    def __init__(self, run: str, attempt: int, bulk: Bulk) -> None:
        self._run, self._attempt, self.bulk = run, attempt, bulk
        self._layouts: dict[int, list[_Layout]] = {}
        self._count = 0

    def table(self, rank: int, bodies: Sequence[bytes]) -> "BlockTable":
        """The numbers of events of one rank."""
        import numpy as np

        table = BlockTable(self._run, self.bulk, rank, bodies)
        sizes = np.fromiter(map(len, bodies), np.intp, len(bodies))
        for size in np.unique(sizes).tolist():
            rows = np.flatnonzero(sizes == size)
            if size <= MAX_BODY and len(rows) >= MIN_ALIKE:
                joined = b"".join(bodies if len(rows) == len(bodies) else [bodies[row] for row in rows.tolist()])
                matrix, rare = np.frombuffer(joined, np.uint8).reshape(len(rows), size), 0
                while len(rows) >= MIN_ALIKE and rare < MAX_RARE:
                    other = self._take_alike(table, rows, matrix)
                    taken = len(rows) - int(np.count_nonzero(other))
                    rare += taken < max(MIN_ALIKE, len(rows) / COMMON)
                    rows, matrix = rows[other], matrix[other]
            table.decode(rows.tolist())
        table.finish(self._attempt)
        return table

    def _take_alike(self, table: "BlockTable", rows: "Numbers", matrix: "Numbers") -> "Numbers":
        """Takes the rows that are like the first one; returns for each row whether it is not."""
        import numpy as np

        known = self._layouts.setdefault(matrix.shape[1], [])
        layout = next((one for one in known if not one.differs(matrix[:1]).any()), None)
        if layout is None:
            try:
                layout = _Layout(table.bodies[rows[0]], self.bulk)
            except ProtocolError:
                table.decode([int(rows[0])])
                return np.arange(len(rows)) > 0
            if self._count < MAX_LAYOUTS:
                known.append(layout)
                self._count += 1
        other = layout.differs(matrix)
        if layout.is_plain:
            layout.take(table, rows[~other], matrix[~other])
        else:
            table.decode(rows[~other].tolist())
        return other


class BlockTable:
    """The numbers of events of one rank, in the order of their bodies."""

    def __init__(self, run: str, bulk: Bulk, rank: int, bodies: Sequence[bytes]) -> None:
        self.bodies = bodies
        self.columns: dict[Path, tuple[Numbers, Numbers]] = {}
        """Path to rows, in order, and their numbers."""
        self.decoded: dict[int, EventBody] = {}
        self.rank = rank
        self._run, self._bulk = run, bulk
        self._pieces: dict[Path, list[tuple[Any, Any]]] = {}
        self._is_whole = True
        self._follows: Numbers | None = None

    def add(self, path: Path, rows: Any, values: Any) -> None:
        self._pieces.setdefault(path, []).append((rows, values))

    def decode(self, rows: Sequence[int]) -> None:
        """Takes events that are like no others."""
        singles: dict[Path, tuple[list[int], list[float]]] = {}
        for row in rows:
            try:
                body = decode_whole_event(self.bodies[row])
            except ProtocolError:
                self._is_whole = False
                continue
            if max(body.seq, *map(abs, body.timestamp)) > _LARGEST:
                self._is_whole = False
                continue
            self.decoded[row] = body
            for path, value in _numbers_of(body, self._bulk):
                places, values = singles.setdefault(path, ([], []))
                places.append(row)
                values.append(value)
        for path, (places, values) in singles.items():
            self.add(path, places, values)

    def finish(self, attempt: int) -> None:
        """Puts together what was taken."""
        import numpy as np

        self.decoded = dict(sorted(self.decoded.items()))
        for path, pieces in self._pieces.items():
            kind = np.int64 if path[0] in _WHOLE else np.float64
            rows = np.concatenate([np.asarray(rows, np.intp) for rows, _ in pieces])
            values = np.concatenate([np.asarray(values).astype(kind) for _, values in pieces])
            if len(pieces) > 1:
                order = rows.argsort(kind="stable")
                rows, values = rows[order], values[order]
            self.columns[path] = rows, values
        self._pieces.clear()
        if self._is_whole:
            seq, base, of = (self.columns[place,][1] for place in (SEQ, BASE_SEQ, _ATTEMPT))
            self._is_whole = bool((of == attempt).all())
            self._follows = np.diff(seq, prepend=0) > 0
            self._follows[1:] &= np.diff(base) == 1

    def block(self, begin: int, end: int, last: tuple[int, int], by_seq: bool) -> "EventBlock | None":
        """The rows from ``begin`` up to ``end`` as a block, if they are just the events that come after ``last``,
        ``(seq, base_seq)``; otherwise ``None``."""
        if not self._is_whole or self._follows is None or end - begin < MIN_ALIKE:
            return None
        seq, base = self.columns[SEQ,][1], self.columns[BASE_SEQ,][1]
        if seq[begin] <= last[0] or base[begin] != last[1] + 1 or not self._follows[begin + 1 : end].all():
            return None
        if by_seq and (seq[begin] != last[0] + 1 or seq[end - 1] - seq[begin] != end - 1 - begin):
            return None
        return EventBlock(self._run, self._bulk, self.rank, self, begin, end)


_WHOLE = frozenset((_ATTEMPT, SEQ, BASE_SEQ, TIME, TIMESTAMP, PREVIOUS))
_TIME_PATHS = [(TIMESTAMP, place) for place in range(len(TrainingTime._fields))]
_PREVIOUS_BATCH: Path = (PREVIOUS, TrainingTime._fields.index("batch"))


def _numbers_of(body: EventBody, bulk: Bulk) -> Iterator[tuple[Path, float]]:
    """The numbers of an event that a layout would take."""
    yield from (((_ATTEMPT,), body.attempt), ((SEQ,), body.seq), ((BASE_SEQ,), body.base_seq), ((TIME,), body.time))
    yield from zip(_TIME_PATHS, body.timestamp, strict=True)
    if body.previous is not None:
        yield _PREVIOUS_BATCH, body.previous.batch
    for name, value in body.fields.items():
        if name in bulk.numbers:
            yield from _leaves((FIELDS, name), value)
        elif name in bulk.by_step:
            for place, step, values in steps_of(value):
                yield (FIELDS, name, place, 0), step
                yield from _leaves((FIELDS, name, place, 1), values)
    for name, value in body.context.items():
        if value.__class__ is int:
            yield (CONTEXT, name), value


def _leaves(path: Path, value: Any) -> Iterator[tuple[Path, float]]:
    if isinstance(value, float | int):
        yield path, float(value)
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _leaves((*path, str(key)), one)
    elif isinstance(value, list):
        for place, one in enumerate(value):
            yield from _leaves((*path, place), one)


class _Layout:
    """Where the numbers stand in bodies like this one.

    Raises :class:`offloop.bus.errors.ProtocolError` when it is not an event."""

    def __init__(self, body: bytes, bulk: Bulk) -> None:
        import numpy as np

        event = decode_whole_event(body)
        self.is_plain = bulk.whole.isdisjoint(event.fields) and max(event.seq, *event.timestamp) <= _LARGEST
        for name in bulk.by_step.intersection(event.fields):
            field = event.fields[name]
            self.is_plain &= isinstance(field, list) and len(field) == sum(1 for _ in steps_of(field))
        self._slots: dict[Path, tuple[int, int, str]] = {}
        mask, numbers = bytearray(b"\xff" * len(body)), bulk.numbers | bulk.by_step
        for path, at, size, kind in _walk(body):
            if kind == "key":
                # Two maps of one form could have other keys.
                self.is_plain = False
            requested = path[0] == FIELDS and len(path) > 1 and path[1] in numbers
            if kind == "constant":
                # A truth value.
                self.is_plain = self.is_plain and not requested and path[0] in (FIELDS, CONTEXT)
                continue
            if kind in _BYTES:
                mask[at] = _BYTES[kind]
            else:
                mask[at : at + size] = bytes(size)
            if requested or (path[0] != FIELDS and kind[0] != "f"):
                self._slots[path] = at, size, _DTYPES[kind]
        self._mask = np.frombuffer(bytes(mask), np.uint8)
        self._like = np.frombuffer(body, np.uint8) & self._mask
        needed = [(_ATTEMPT,), (SEQ,), (BASE_SEQ,), (TIME,), *_TIME_PATHS]
        # As signed numbers are written only those below zero, of which there are none here.
        self.is_plain = self.is_plain and all(self._slots.get(path, _MISSING)[2][1] == "u" for path in needed)
        self._slots = {
            path: slot
            for path, slot in self._slots.items()
            if path[0] in (FIELDS, CONTEXT) or path in needed or path == _PREVIOUS_BATCH
        }

    def differs(self, matrix: "Numbers") -> "Numbers":
        """For each row whether it is not like it."""
        import numpy as np

        rows: Numbers = np.asarray(((matrix & self._mask) != self._like).any(axis=1))
        return rows

    def take(self, table: BlockTable, rows: "Numbers", matrix: "Numbers") -> None:
        """Takes the numbers of rows that are like it."""
        import numpy as np

        for path, (at, size, kind) in self._slots.items():
            column = np.ascontiguousarray(matrix[:, at : at + size]).view(kind)[:, 0]
            if kind == ">u8" and path[0] in _WHOLE and (column > _MOST[path[0]]).any():
                # Beyond what a signed number holds: nothing that a training writes.
                table.decode(rows.tolist())
                return
        for path, (at, size, kind) in self._slots.items():
            table.add(path, rows, np.ascontiguousarray(matrix[:, at : at + size]).view(kind)[:, 0])


_BYTES = {"small": 0x80, "negative": 0xE0}
"""What of a number that is written in a single byte says that it is one."""
_MISSING = (0, 0, "  ")
_MOST = {place: (1 << 63) - 1 if place == TIME else _LARGEST for place in _WHOLE}
_DTYPES = {
    "small": ">u1",
    "negative": ">i1",
    **{f"u{8 << power}": f">u{1 << power}" for power in range(4)},
    **{f"i{8 << power}": f">i{1 << power}" for power in range(4)},
    "f32": ">f4",
    "f64": ">f8",
}
_NUMBERS = {
    0xCA: ("f32", 4),
    0xCB: ("f64", 8),
    **{0xCC + power: (f"u{8 << power}", 1 << power) for power in range(4)},
    **{0xD0 + power: (f"i{8 << power}", 1 << power) for power in range(4)},
}
_TEXTS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_LISTS = {0xDC: 2, 0xDD: 4}
_MAPS = {0xDE: 2, 0xDF: 4}


def _walk(body: bytes) -> Iterator[tuple[Path, int, int, str]]:
    """Of each number in a body that is known to be good: its path, where it stands, its size, and its kind. A truth
    value is a ``constant``, a map with keys that are not texts a ``key``."""
    at = 0

    def length(size: int) -> int:
        nonlocal at
        at += size
        return int.from_bytes(body[at - size : at], "big")

    def text() -> str | None:
        """A key; ``None`` for what is not a text."""
        nonlocal at
        kind = body[at]
        at += 1
        if 0xA0 <= kind <= 0xBF:
            size = kind & 0x1F
        elif 0xD9 <= kind <= 0xDB:
            size = length(_TEXTS[kind])
        else:
            return None
        at += size
        return body[at - size : at].decode(errors="replace")

    def value(path: Path) -> Iterator[tuple[Path, int, int, str]]:
        nonlocal at
        kind = body[at]
        at += 1
        if kind <= 0x7F:
            yield path, at - 1, 1, "small"
        elif kind <= 0x8F or kind in _MAPS:
            for _ in range(kind & 0x0F if kind <= 0x8F else length(_MAPS[kind])):
                key = text()
                if key is None:
                    # What stands behind it is not found again: the layout is not used.
                    at = len(body)
                    yield path, at, 0, "key"
                    return
                yield from value((*path, key))
                if at >= len(body):
                    return
        elif kind <= 0x9F or kind in _LISTS:
            for place in range(kind & 0x0F if kind <= 0x9F else length(_LISTS[kind])):
                yield from value((*path, place))
                if at >= len(body):
                    return
        elif kind <= 0xBF:
            at += kind & 0x1F
        elif kind in _NUMBERS:
            name, size = _NUMBERS[kind]
            at += size
            yield path, at - size, size, name
        elif kind in _TEXTS:
            at += length(_TEXTS[kind])
        elif kind == 0xC0:
            pass
        elif kind in (0xC2, 0xC3):
            yield path, at - 1, 1, "constant"
        elif kind >= 0xE0:
            yield path, at - 1, 1, "negative"
        else:
            # An extension type, which our publishers do not write.
            at = len(body)
            yield path, at, 0, "key"

    yield from value(())
