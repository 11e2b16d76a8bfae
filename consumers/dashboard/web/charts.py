"""The data of charts for a browser: lines thinned to its width, and only new parts of them."""

import functools
import math
from collections import ChainMap, OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any, NamedTuple

import msgspec

from offloop.bus.printing import one_line
from offloop.bus.types.metrics import group_order, groups_of
from offloop.bus.types.units import Scale, number_text, scale_of
from offloop.consumers.api.optional import np
from offloop.consumers.dashboard.view.metrics import MAX_SERIES
from offloop.consumers.dashboard.view.phases import PhaseView
from offloop.consumers.dashboard.view.run_view import RunView, names_of
from offloop.consumers.dashboard.view.series import Axis, Parts, Points, Series, common_places, group_points
from offloop.consumers.dashboard.web.comparison import Compared
from offloop.consumers.dashboard.web.frames import look_in

PHASES_PREFIX = "phases"  # prefix of the names of charts of phases

_PHASES_GROUP = "step"

_PIXELS_TOGETHER = 2
_WIDTH_STEP = 64
_MIN_WIDTH = 64
_MAX_WIDTH = 2048
_TAIL_WIDTH = 64
_MAX_GROWTH = 2
_MAX_TAILS = 60
_MOST_KEPT = 2048
_MOST_CHOSEN = 200  # drawn metrics of very many
_MOST_LISTED = 100  # found metrics, and members of a group in a list of metrics
_MOST_ROWS = 1000  # of such a list
_MOST_PARTS = 3_200  # limit of all lines of a chart: a browser without a GPU draws this sixty times a second
_LARGEST_SHORT, _SMALLEST_SHORT = 1e38, 1e-37  # beyond, a number does not fit into 32 bits
_DECIMALS = 4


class Chart(NamedTuple):
    id: str  # the metric's name; for phases, their prefix and the run's number
    kind: str  # metric or phases
    title: str
    scale: Scale = ()  # the units of its values; empty for plain numbers, and for phases
    ranks: Sequence[int] = ()  # of phases: the ranks to choose from


class Look(msgspec.Struct, frozen=True):
    x: Axis = "batch"
    range: tuple[float, float] | None = None  # the chosen part of the axis; None for everything
    visible: dict[str, int] = {}  # chart to its width in pixels
    hidden: bool = False  # the page is in a background tab, or its window minimised
    marks: bool = False  # marks are shown in charts
    rank: int = 0  # the rank whose phases are shown
    left_out: frozenset[int] = frozenset()  # the numbers of the runs whose lines are hidden
    find: str = ""  # a part of the names in the list of metrics
    opened: frozenset[str] = frozenset()  # the opened groups in that list
    chosen: tuple[str, ...] = ()  # the metrics that are drawn if there are very many

    @classmethod
    def from_browser(cls, given: Any) -> "Look":
        look = look_in(given, cls)
        first, last = look.range or (0, 1)
        return look if -math.inf < first < last < math.inf else msgspec.structs.replace(look, range=None)

    def buckets(self, chart: str, lines: int = 1) -> int:
        """Return the number of parts of the axis, each with its least and greatest value.

        Many lines have fewer parts each. Browsers of about the same width share results."""
        wanted = min(self.visible[chart] // _PIXELS_TOGETHER, _MOST_PARTS // max(lines, 1))
        return min(max(-(-wanted // _WIDTH_STEP) * _WIDTH_STEP, _MIN_WIDTH), _MAX_WIDTH)


def charts_of(runs: Sequence[RunView], labels: Sequence[str], look: Look) -> list[tuple[str, list[Chart]]]:
    """Return the charts by group: of all metrics, or of very many the chosen ones."""
    names = all_names(runs)
    short = names_of(names).short
    if len(names) > MAX_SERIES:
        known = {*names}
        names = tuple(name for name in look.chosen[:_MOST_CHOSEN] if name in known)
    known_units = dict(ChainMap(*(run.hyperparameters for run in runs)))
    groups = {}
    for prefix, members in groups_of(names).items():
        charts = [Chart(name, "metric", short(name), scale_of(name, known_units)) for name in members]
        groups[prefix or "other"] = sorted(charts, key=lambda chart: chart.id)
    phases = []
    for number, run in enumerate(runs):
        if ranks := run.phase_ranks:
            title = f"{labels[number]}: time of a step by phase" if len(runs) > 1 else "time of a step by phase"
            phases.append(Chart(f"{PHASES_PREFIX}/{number}", "phases", title, ranks=ranks))
    ordered = [(title, groups[title]) for title in sorted(groups, key=group_order)]
    return [*ordered, *([(_PHASES_GROUP, phases)] if phases else [])]


def all_names(runs: Sequence[RunView]) -> tuple[str, ...]:
    return _together(frozenset(run.names() for run in runs))


@functools.lru_cache(maxsize=16)
def _together(named: frozenset[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(sorted({name for names in named for name in names}))


def listed_metrics(names: tuple[str, ...], look: Look) -> dict[str, Any] | None:
    """Return the list of very many metrics that a browser shows: what is found, or the groups by prefix."""
    if len(names) <= MAX_SERIES:
        return None
    wanted = look.find.lower()
    found = [name for name in names if wanted in name.lower()] if wanted else names
    rows = [_leaf(name, "", 0) for name in found[:_MOST_LISTED]] if wanted else _tree(names, "", look.opened)
    return {"count": len(names), "find": look.find, "found": len(found), "rows": list(islice(rows, _MOST_ROWS))}


def _leaf(name: str, prefix: str, depth: int) -> dict[str, Any]:
    return {"id": name, "title": one_line(name.removeprefix(prefix)), "depth": depth}


def _tree(names: Sequence[str], prefix: str, opened: Collection[str], depth: int = 0) -> Iterator[dict[str, Any]]:
    groups = [(part, list(members)) for part, members in groupby(names, lambda name: _first_part(name, prefix))]
    for part, members in groups[:_MOST_LISTED]:
        if part == members[0]:
            yield _leaf(part, prefix, depth)
            continue
        is_open = part in opened
        title = one_line(part.removeprefix(prefix))
        yield {"group": part, "title": title, "depth": depth, "count": len(members), "isOpen": is_open}
        if is_open:
            yield from _tree(members, part, opened, depth + 1)
    if len(groups) > _MOST_LISTED:
        yield {"more": len(groups) - _MOST_LISTED, "depth": depth}


def _first_part(name: str, prefix: str) -> str:
    end = name.find("/", len(prefix)) + 1
    return name[:end] if end else name


@dataclass
class _Sent:
    shown: tuple[object, ...]
    version: int
    last_x: float
    whole: int  # number of points when it was sent as a whole
    tail: int = 0  # number of points added since
    tails: int = 0


class Lines:
    def __init__(self) -> None:
        self._parts: OrderedDict[tuple[object, ...], Parts] = OrderedDict()
        self._sent: dict[tuple[str, int | str, Axis], _Sent] = {}

    def forget(self) -> None:
        """Forget what the browser has, for a new or unresponsive one."""
        self._sent.clear()

    def news(
        self, charts: Mapping[str, Chart], runs: Sequence[RunView], look: Look, compared: Compared | None = None
    ) -> list[dict[str, Any]]:
        """Return the new parts of the visible charts, which count as sent."""
        lines: list[dict[str, Any]] = []
        for run in runs:
            _request(run, look)
        for name in look.visible:
            chart = charts.get(name)
            if chart is None:
                continue
            if chart.kind == "phases":
                lines += self._phases(chart, runs, look)
                continue
            if compared is not None and compared.groups:
                lines += self._groups(name, runs, look, compared)
            for number, run in enumerate(runs):
                if compared is not None and not compared.draws(number):
                    continue
                try:
                    series = run.series(name)
                except KeyError:
                    continue
                shown = (look.range, look.buckets(name, len(runs)), run.refined)
                line = self._line(series, name, number, look, shown)
                if line is not None:
                    lines.append(line)
        return lines

    def _line(
        self, series: Series, chart: str, run: int, look: Look, shown: tuple[object, int, int]
    ) -> dict[str, Any] | None:
        version = series.version
        sent = self._sent.get((chart, run, look.x))
        if sent is not None and sent.shown == shown:
            if sent.version == version:
                return None
            if look.range is not None and sent.last_x > look.range[1]:
                sent.version = version  # new points come after the end of the visible part
                return None
            tail = self._tail(series, sent, look)
            if tail is not None:
                sent.version = version
                return {"c": chart, "r": run, "o": look.x, "a": 1, **_numbers(tail)}
        first, last = look.range or (None, None)
        points = series.points(look.x, first, last, shown[1])
        if not len(points.xs):
            return None
        self._sent[chart, run, look.x] = _Sent(shown, version, float(points.xs[-1]), len(points.xs))
        return {"c": chart, "r": run, "o": look.x, "a": 0, **_numbers(points)}

    def _groups(self, chart: str, runs: Sequence[RunView], look: Look, compared: Compared) -> list[dict[str, Any]]:
        members: dict[str, list[Series]] = {}
        for group in compared.groups:
            for number in compared.shown_members(group):
                try:
                    members.setdefault(group.id, []).append(runs[number].series(chart))
                except KeyError:
                    continue
        buckets = look.buckets(chart, 3 * len(members))
        # Groups share their places, so that they can be compared.
        shown = (look.range, buckets, tuple((key, tuple(map(id, own))) for key, own in members.items()))
        version = sum(one.version for own in members.values() for one in own)
        changed = [
            key
            for key in members
            if (sent := self._sent.get((chart, key, look.x))) is None or sent.shown != shown or sent.version != version
        ]
        if not changed:
            return []
        every = [one for own in members.values() for one in own]
        first, last = look.range or (None, None)
        places = common_places(every, look.x, first, last, buckets)
        lines = []
        for key in changed if len(places) else ():
            points = group_points(members[key], places, look.x, self._parts_of)
            self._sent[chart, key, look.x] = _Sent(shown, version, float(places[-1]), len(places))
            curves = {"y": points.mean, "low": points.low, "high": points.high}
            values = {name: _short(numbers) for name, numbers in curves.items()}
            counts = _short_x(points.runs)
            lines.append(
                {"c": chart, "r": key, "o": look.x, "a": 0, "x": _short_x(places), "n": [], **values, "count": counts}
            )
        return lines

    def _parts_of(self, series: Series, places: "np.ndarray[Any, Any]", x: Axis) -> Parts:
        key = (id(series), series.version, x, places.tobytes())
        if key not in self._parts:
            self._parts[key] = series.parts(places, x)
            if len(self._parts) > _MOST_KEPT:
                self._parts.popitem(last=False)
        return self._parts[key]

    def _tail(self, series: Series, sent: _Sent, look: Look) -> Points | None:
        if look.range is not None or sent.tails >= _MAX_TAILS:
            return None
        tail = series.points(look.x, sent.last_x, None, _TAIL_WIDTH)
        new = tail.xs >= sent.last_x
        xs, ys = tail.xs[new], tail.ys[new]
        if not len(xs) or xs[0] != sent.last_x or sent.whole + sent.tail + len(xs) > sent.whole * _MAX_GROWTH + 64:
            return None
        sent.tail += len(xs) - 1
        sent.tails += 1
        sent.last_x = float(xs[-1])
        return Points(xs, ys)

    def _phases(self, chart: Chart, runs: Sequence[RunView], look: Look) -> list[dict[str, Any]]:
        run = int(chart.id.rpartition("/")[2])
        rank = look.rank if look.rank in chart.ranks else chart.ranks[0]
        buckets = look.buckets(chart.id)
        _request(runs[run], look, rank)
        found = _phases_of(runs[run], rank, look, buckets)
        shown = (look.x == "batch" and look.range, buckets, rank, runs[run].refined)
        count, last = len(found.batches), float(found.batches[-1]) if len(found.batches) else 0.0
        sent = self._sent.get((chart.id, run, "batch"))
        if not count or (sent is not None and sent.shown == shown and sent.last_x == last):
            return []
        self._sent[chart.id, run, "batch"] = _Sent(shown, 0, last, count)
        xs = _short_x(found.batches)
        seconds = {name: _short(values) for name, values in found.seconds.items()}
        return [{"c": chart.id, "r": run, "o": "batch", "a": 0, "x": xs, "y": [], "n": [], "p": seconds}]


def _request(run: RunView, look: Look, rank: int = 0) -> None:
    if run.history is not None and look.range is not None:
        run.history.request(look.x, *look.range, rank)


def _phases_of(view: RunView, rank: int, look: Look, buckets: int) -> PhaseView:
    if look.range is None or look.x != "batch":
        return view.phases(rank, buckets)
    found = view.phases(rank)
    begin = max(int(found.batches.searchsorted(look.range[0], "left")) - 1, 0)
    end = int(found.batches.searchsorted(look.range[1], "right")) + 1
    stride = max((end - begin) // buckets, 1)
    chosen = slice(begin, end, stride)
    return PhaseView(found.batches[chosen], {name: one[chosen] for name, one in found.seconds.items()}, found.on_device)


def _numbers(points: Points) -> dict[str, Any]:
    odd = [(x, number_text(y)) for x, y in points.not_finite]
    return {"x": _short_x(points.xs), "y": _short(points.ys), "n": odd}


def _short_x(xs: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    whole = xs.astype(np.int64)
    return whole if np.array_equal(whole, xs) else np.ascontiguousarray(np.round(xs, 4))


def _short(ys: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    sizes = np.abs(ys[np.isfinite(ys) & (ys != 0)])
    fits = not len(sizes) or (sizes.max() < _LARGEST_SHORT and sizes.min() > _SMALLEST_SHORT)
    return ys.astype(np.float32) if fits else np.ascontiguousarray(ys)


class MarkNews:
    def __init__(self) -> None:
        self._sent: dict[int, tuple[object, int]] = {}

    def forget(self) -> None:
        self._sent.clear()

    def news(self, runs: Sequence[RunView]) -> list[dict[str, Any]]:
        """Return the new marks of each run, which count as sent: kind, places on each axis, time and text."""
        news = []
        for number, run in enumerate(runs):
            generation, last = self._sent.get(number, (None, 0))
            placed = run.marks(last)
            is_whole = placed.generation != generation
            if is_whole and last:
                placed = run.marks()
            if placed.marks:
                last = placed.marks[-1].mark.number
            elif not is_whole or generation is None:
                continue
            self._sent[number] = placed.generation, last
            marks = [
                [
                    *(one.mark.kind, one.mark.batch, round(one.sample, _DECIMALS), round(one.epoch, _DECIMALS)),
                    *(round(one.seconds, _DECIMALS), round(one.mark.time, 3), one.mark.text),
                ]
                for one in placed.marks
            ]
            news.append({"r": number, "a": 0 if is_whole else 1, "m": marks})
        return news
