"""The `Trace Event Format <https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU>`_, written
so that both Perfetto and chrome://tracing read it, at any moment."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from offloop.bus.strict_json import plain

_TIDS_A_PROCESS = 10_000

_OPENING, _CLOSING = "[\n", "\n]\n"

_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=str).encode

Args = Mapping[str, Any] | None


class TraceEvents:
    """Makes the text of a trace: processes by number, each with tracks by name. Times are nanoseconds from the
    beginning of the trace.

    It is a JSON array that may lack its end. The comma comes before an event and not behind it, so what :meth:`take`
    has given up to any call can be read. On a track spans may lie within one another or side by side; what overlaps in
    another way is cut, because Perfetto leaves it out.

    Args:
        tracks: the names of tracks whose order is known; others come after them.
    """

    def __init__(self, tracks: Sequence[str]) -> None:
        self._tracks = list(tracks)
        self._named: dict[int, list[str]] = {}
        # Of each process and track: before when nothing more may begin, and how many spans are open.
        self._free_from: dict[tuple[int, str], int] = {}
        self._open: dict[tuple[int, str], int] = {}
        self._begun = False
        self._out: list[str] = []

    def process(self, pid: int, name: str, labels: str | None = None) -> None:
        """Names a process; ``labels`` are shown beside its name."""
        self._metadata("process_name", pid, {"name": name})
        self._metadata("process_sort_index", pid, {"sort_index": pid})
        if labels is not None:
            self._metadata("process_labels", pid, {"labels": labels})

    def span(self, pid: int, track: str, name: str, began: int, ended: int, args: Args = None) -> None:
        """Something that took a while and has ended."""
        tid = self._tid(pid, track)
        began = self._take_place(pid, track, began)
        ended = self._take_place(pid, track, ended)
        self._add("X", name, pid, tid, began, args, f',"dur":{_microseconds(ended - began)}')

    def begin(self, pid: int, track: str, name: str, at: int, args: Args = None) -> None:
        """Something that takes a while begins."""
        tid = self._tid(pid, track)
        self._add("B", name, pid, tid, self._take_place(pid, track, at), args)
        self._open[pid, track] = self._open.get((pid, track), 0) + 1

    def end(self, pid: int, track: str, at: int, args: Args = None) -> None:
        """Ends the innermost open span of the track, if there is one."""
        if self._open.get((pid, track)):
            self._open[pid, track] -= 1
            self._add("E", None, pid, self._tid(pid, track), self._take_place(pid, track, at), args)

    def end_all(self, at: int) -> None:
        """Everything that is open ends."""
        for (pid, track), count in list(self._open.items()):
            for _ in range(count):
                self.end(pid, track, at)

    def instant(self, pid: int, track: str, name: str, at: int, args: Args = None) -> None:
        """Something that took no time."""
        self._add("i", name, pid, self._tid(pid, track), at, args, ',"s":"t"')

    def counter(self, pid: int, name: str, values: Mapping[str, Any], at: int) -> None:
        """Sets one or several series from here on; other values than finite numbers are left out."""
        numbers = {
            series: value for series, value in values.items() if isinstance(value, float | int) and math.isfinite(value)
        }
        if numbers:
            self._add("C", name, pid, _main_tid(pid), at, numbers)

    def take(self) -> str:
        """The text of what was drawn since the last call."""
        if not self._out:
            return ""
        text = (",\n" if self._begun else _OPENING) + ",\n".join(self._out)
        self._out, self._begun = [], True
        return text

    def take_end(self) -> str:
        """The rest of the text: nothing follows."""
        text = self.take()
        return text + _CLOSING if self._begun else f"{_OPENING}]\n"

    def _tid(self, pid: int, track: str) -> int:
        """The track's number, which no other track has: Perfetto finds names by that alone. It shows tracks in the
        order of their numbers, chrome://tracing by their index."""
        if track not in self._tracks:
            self._tracks.append(track)
        index = self._tracks.index(track) + 1
        tid = _main_tid(pid) + index
        named = self._named.setdefault(pid, [])
        if track not in named:
            named.append(track)
            self._metadata("thread_name", pid, {"name": track}, tid)
            self._metadata("thread_sort_index", pid, {"sort_index": index}, tid)
        return tid

    def _take_place(self, pid: int, track: str, at: int) -> int:
        place = (pid, track)
        at = max(at, self._free_from.get(place, 0))
        self._free_from[place] = at
        return at

    def _metadata(self, name: str, pid: int, args: Mapping[str, Any], tid: int | None = None) -> None:
        self._add("M", name, pid, _main_tid(pid) if tid is None else tid, 0, args)

    def _add(self, kind: str, name: str | None, pid: int, tid: int, at: int, args: Args, more: str = "") -> None:
        named = "" if name is None else f',"name":{_json(name)}'
        arguments = f',"args":{_json(args)}' if args else ""
        self._out.append(f'{{"ph":"{kind}"{named},"pid":{pid},"tid":{tid},"ts":{_microseconds(at)}{more}{arguments}}}')


def _main_tid(pid: int) -> int:
    # Never a number that a process has, nor 0, which both mean something.
    return (pid + 1) * _TIDS_A_PROCESS


def _microseconds(nanoseconds: int) -> str:
    # As a float it would lose nanoseconds after some weeks.
    whole, rest = divmod(nanoseconds, 1000)
    return f"{whole}.{rest:03d}" if rest else str(whole)


def _json(value: Any) -> str:
    try:
        return _encode(value)
    except (TypeError, ValueError):
        return _encode(plain(value))
