"""Reads a timeline as those who open it show it."""

import json
from collections import defaultdict
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, NamedTuple


class Slice(NamedTuple):
    """A span or an instant as it is shown; microseconds."""

    rank: int
    track: str
    name: str
    began: Decimal
    ended: Decimal | None
    """``None`` for one that had not ended when the file did."""
    args: dict[str, Any]


class TraceFile(NamedTuple):
    """What a timeline shows."""

    processes: dict[int, str]
    slices: list[Slice]
    instants: list[Slice]
    counters: dict[str, list[tuple[Decimal, float]]]
    """Name and series to its values."""

    def on(self, track: str, rank: int = 0) -> list[Slice]:
        """The spans of a track, in the order in which they began."""
        found = [one for one in self.slices if one.track == track and one.rank == rank]
        return sorted(found, key=lambda one: one.began)


def read_trace(text: str) -> TraceFile:
    """Reads a whole file; spans of a track have to lie within one another or side by side."""
    tracks: defaultdict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    names: dict[tuple[int, int], str] = {}
    found = TraceFile({}, [], [], defaultdict(list))
    for event in json.loads(text, parse_float=Decimal, parse_constant=_no):
        place = event["pid"], event["tid"]
        if event["ph"] == "M" and event["name"] == "process_name":
            found.processes[event["pid"]] = event["args"]["name"]
        elif event["ph"] == "M" and event["name"] == "thread_name":
            assert event["tid"] not in {tid for _, tid in names}, "Perfetto finds a track's name by its number alone"
            names[place] = event["args"]["name"]
        elif event["ph"] == "C":
            for series, value in event["args"].items():
                found.counters[f"{event['name']} {series}"].append((event["ts"], float(value)))
        elif event["ph"] == "i":
            args = event.get("args", {})
            found.instants.append(Slice(place[0], names[place], event["name"], event["ts"], event["ts"], args))
        elif event["ph"] in "XBE":
            tracks[place].append(event)
    for place, events in tracks.items():
        found.slices.extend(_slices(place[0], names[place], events))
    return found


def _no(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def _slices(rank: int, track: str, events: list[dict[str, Any]]) -> Iterator[Slice]:
    begun: list[dict[str, Any]] = []
    within: list[Decimal] = []
    for event in sorted(events, key=lambda one: one["ts"]):
        while within and within[-1] <= event["ts"]:
            within.pop()
        ended = event["ts"] + event.get("dur", 0)
        assert not within or ended <= within[-1], f"{event} overlaps with what was before on track {track}"
        if event["ph"] == "B":
            begun.append(event)
        elif event["ph"] == "X":
            within.append(ended)
            yield Slice(rank, track, event["name"], event["ts"], ended, event.get("args", {}))
        else:
            began = begun.pop()
            args = {**began.get("args", {}), **event.get("args", {})}
            yield Slice(rank, track, began["name"], began["ts"], event["ts"], args)
    for event in begun:
        yield Slice(rank, track, event["name"], event["ts"], None, event.get("args", {}))
