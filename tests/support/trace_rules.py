"""Reads a timeline as strictly as those who open it: Perfetto, chrome://tracing, and the format's own rules."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import Any, NamedTuple

KINDS = {"M", "X", "B", "E", "i", "C"}
METADATA = {
    "process_name": "name",
    "process_sort_index": "sort_index",
    "thread_name": "name",
    "thread_sort_index": "sort_index",
}


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
    """Reads a whole file.

    Raises :class:`AssertionError` for what any of the readers would refuse, leave out or show otherwise."""
    events = json.loads(text, parse_float=Decimal, parse_constant=_no)
    names: dict[tuple[int, int], str] = {}
    processes: dict[int, str] = {}
    for event in events:
        assert event["ph"] in KINDS, event
        assert type(event["pid"]) is int, event
        assert type(event["tid"]) is int, event
        assert 0 < event["tid"] < 2**32, event
        assert event["ts"] >= 0, event
        assert event["ts"] * 1000 == int(event["ts"] * 1000), event
        assert isinstance(event.get("args", {}), dict)
        if event["ph"] != "E":
            assert isinstance(event["name"], str), event
        if event["ph"] == "M":
            # Others are a warning in chrome://tracing.
            value = event["args"][METADATA[event["name"]]]
            if event["name"] == "process_name":
                assert processes.setdefault(event["pid"], value) == value
            elif event["name"] == "thread_name":
                assert (event["pid"], event["tid"]) not in names, "named twice"
                names[event["pid"], event["tid"]] = value
    tids = [tid for _, tid in names]
    assert len(set(tids)) == len(tids), "Perfetto finds a track's name by its number alone"
    assert not set(tids) & set(processes), "a track with a process's number is its main thread"
    shown = [event for event in events if event["ph"] != "M"]
    assert all(event["pid"] in processes for event in shown)
    assert all((event["pid"], event["tid"]) in names for event in shown if event["ph"] != "C")
    slices = list(_slices((event for event in shown if event["ph"] in "XBE"), names))
    instants = []
    for event in shown:
        if event["ph"] == "i":
            assert event["s"] == "t", event
            name = names[event["pid"], event["tid"]]
            instants.append(Slice(event["pid"], name, event["name"], event["ts"], event["ts"], event.get("args", {})))
    return TraceFile(processes, slices, instants, _counters(event for event in shown if event["ph"] == "C"))


def _no(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def _slices(events: Iterable[dict[str, Any]], names: dict[tuple[int, int], str]) -> Iterator[Slice]:
    """The spans of each track, which lie within one another or side by side."""
    tracks: defaultdict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        tracks[event["pid"], event["tid"]].append(event)
    for place, on_track in tracks.items():
        rank, track = place[0], names[place]
        begun: list[dict[str, Any]] = []
        free_from = Decimal(0)
        for event in on_track:
            assert event["ts"] >= free_from, f"{event} overlaps with what was before on track {track}"
            if event["ph"] == "B":
                begun.append(event)
                free_from = event["ts"]
            elif event["ph"] == "E":
                began = begun.pop()
                args = {**began.get("args", {}), **event.get("args", {})}
                yield Slice(rank, track, began["name"], began["ts"], event["ts"], args)
                free_from = event["ts"]
            else:
                assert event["dur"] >= 0, event
                free_from = event["ts"] + event["dur"]
                yield Slice(rank, track, event["name"], event["ts"], free_from, event.get("args", {}))
        for event in begun:
            yield Slice(rank, track, event["name"], event["ts"], None, event.get("args", {}))


def _counters(events: Iterable[dict[str, Any]]) -> dict[str, list[tuple[Decimal, float]]]:
    counters: defaultdict[str, list[tuple[Decimal, float]]] = defaultdict(list)
    for event in events:
        assert event["args"], event
        for series, value in event["args"].items():
            assert isinstance(value, int | Decimal), event
            counters[f"{event['name']} {series}"].append((event["ts"], float(value)))
    return dict(counters)
