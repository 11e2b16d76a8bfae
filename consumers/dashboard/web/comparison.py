"""The comparison of the runs of a page: groups with the same value of a column, and a baseline run."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias
from urllib.parse import parse_qsl, urlencode, urlsplit

import msgspec

from offloop.bus.printing import one_line
from offloop.bus.types.hyperparameters import value_text as hyperparameter_text
from offloop.bus.types.metrics import direction_of, goals_in
from offloop.bus.types.units import Scale, difference, number_text
from offloop.consumers.dashboard.view.run_view import RunView
from offloop.consumers.dashboard.web.frames import look_in

OF_RUNS = ("status", "tags")  # columns that need no hyperparameter

MOST_COLUMNS = 200
_LONGEST = 200
_LONGEST_VALUE = 60
_KEYS = ("group", "singles", "baseline")
_STARTED_WITH = "config/"
_Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=_LONGEST)]
NAMED = 8  # runs with a colour from the stylesheet: --run-0 and so on in page.css

_HUES = 17
_DASHES = 3
_APART = 7  # neighbours in a list are far from one another
_FIRST = 212


class Comparison(msgspec.Struct, frozen=True):
    group: _Name | None = None  # runs with the same value of this column are drawn as one
    singles: bool = False  # lines of single runs are drawn too
    baseline: _Name | None = None  # the name of the run that the others are compared with

    @classmethod
    def from_query(cls, asked: Sequence[tuple[str, str]]) -> "Comparison":
        return look_in(dict(asked) | {"singles": dict(asked).get("singles") == "1"}, cls)

    def link(self, link: str) -> str:
        parts = urlsplit(link)
        kept = [(name, value) for name, value in parse_qsl(parts.query, keep_blank_values=True) if name not in _KEYS]
        own = [("group", self.group), ("singles", "1" if self.singles else None), ("baseline", self.baseline)]
        return parts._replace(query=urlencode([*kept, *((name, value) for name, value in own if value)])).geturl()


@dataclass(frozen=True)
class CurveGroup:
    label: str  # for people: lr = 0.01
    members: tuple[int, ...]  # the numbers of its runs
    color: int

    @property
    def id(self) -> str:
        return f"group {self.label}"


class Compared:
    def __init__(
        self,
        comparison: Comparison,
        runs: Sequence[RunView],
        labels: Sequence[str],
        hidden: Collection[int] = (),
        tags_of: Callable[[RunView], Sequence[str]] = lambda run: (),
    ) -> None:
        self._runs, self._labels, self._hidden = runs, labels, hidden
        self._hyperparameters = [run.hyperparameters for run in runs]
        self._goals = goals_in(self._hyperparameters)
        self._tags_of = tags_of
        self.singles: bool = comparison.singles
        self.column: str | None = self._find(comparison.group)  # the whole name of the column that groups runs
        wanted = comparison.baseline or ""  # of several attempts, the newest
        named = [number for number, run in enumerate(runs) if wanted.rpartition("/")[2] == run.run_name]
        self.baseline: int | None = named[-1] if named else None  # the number of the run that others are compared with
        self.groups: tuple[CurveGroup, ...] = self._groups() if self.column is not None else ()

    def _find(self, name: str | None) -> str | None:
        if name is None or name in OF_RUNS:
            return name
        known = {known for values in self._hyperparameters for known in values}
        endings = sorted(known_name for known_name in known if known_name.endswith(f"/{name}"))
        found = [one for one in (name, _STARTED_WITH + name) if one in known] or endings[:1]
        return found[0] if found else None

    def columns(self) -> list[str]:
        texts: dict[str, dict[str, int]] = {}
        for hyperparameters in self._hyperparameters:
            for name, value in hyperparameters.items():
                texts.setdefault(name, {})[_text(value)] = 1
        known = {name for name, values in texts.items() if len(values) > 1}
        known |= {name for name in texts if any(name not in one for one in self._hyperparameters)}
        if self.column is not None and self.column not in OF_RUNS:
            known.add(self.column)
        ordered = sorted(known, key=lambda name: (not name.startswith(_STARTED_WITH), name))
        return [*ordered[:MOST_COLUMNS], *OF_RUNS]

    def _value(self, number: int) -> Any:
        if self.column == "status":
            return self._runs[number].status
        if self.column == "tags":
            return ", ".join(sorted(self._tags_of(self._runs[number]))) or None
        return self._hyperparameters[number].get(self.column or "")

    def _groups(self) -> tuple[CurveGroup, ...]:
        members: dict[str, list[int]] = {}
        values: dict[str, Any] = {}
        for number in range(len(self._runs)):
            value = self._value(number)
            text = "" if value is None else _text(value)
            values.setdefault(text, value)
            members.setdefault(text, []).append(number)
        title = short_name(self.column or "")
        ordered = sorted(members, key=lambda text: _order(values[text]))
        return tuple(
            CurveGroup(f"{title} = {text}" if text else f"no {title}", tuple(members[text]), color)
            for color, text in enumerate(ordered)
        )

    def shown_members(self, group: CurveGroup) -> list[int]:
        return [number for number in group.members if number not in self._hidden]

    def lines(self) -> list[dict[str, Any]]:
        runs: list[dict[str, Any]] = [
            {"id": number, "label": self._labels[number], "color": color, "dash": dash}
            for number, (color, dash) in enumerate(self.looks())
        ]
        if self.baseline is not None:
            runs[self.baseline]["baseline"] = True
        if self.column is None:
            return runs
        lines: list[dict[str, Any]] = []
        for group in self.groups:
            names = {self._runs[number].run_name for number in self.shown_members(group)}
            if not names:
                continue
            label = f"{group.label} · {len(names)} run{'s' if len(names) > 1 else ''}"
            color, kind = look_of(group.color, len(self.groups))
            own = {"id": group.id, "label": label, "color": color, "dash": kind}
            lines.append(own | {"isGroup": True, "size": len(names)})
        for group in self.groups if self.singles else ():
            lines += [runs[number] | {"faint": True} for number in group.members if number != self.baseline]
        if self.baseline is not None:
            lines.append(runs[self.baseline])
        return lines

    def draws(self, number: int) -> bool:
        return self.column is None or self.singles or number == self.baseline

    def looks(self) -> list[tuple[str, int]]:
        found = [look_of(number, len(self._runs)) for number in range(len(self._runs))]
        for group in self.groups:
            for number in group.members:
                found[number] = look_of(group.color, len(self.groups))
        if self.baseline is not None:
            found[self.baseline] = "var(--ink)", 0
        return found

    def latest(self, metric: str, values: Mapping[int, float], scale: Scale) -> dict[str, Any]:
        """Return the newest values of a metric by line: the text, and the difference to the baseline and its sense."""
        shown: dict[int | str, float] = {number: value for number, value in values.items() if self.draws(number)}
        for group in self.groups:
            own = [values[number] for number in self.shown_members(group) if number in values]
            if own:
                shown[group.id] = sum(value / len(own) for value in own)
        base = None if self.baseline is None else values.get(self.baseline)
        direction = direction_of(metric, self._goals)
        shown_as: dict[str, Any] = {}
        for line, value in shown.items():
            apart, sense = difference(direction, value, None if line == self.baseline else base, scale)
            shown_as[str(line)] = {"last": number_text(value, scale), "apart": apart, "sense": sense}
        return shown_as


def short_name(column: str) -> str:
    return one_line(column.removeprefix(_STARTED_WITH))


def _text(value: Any) -> str:
    return one_line(hyperparameter_text(value))[:_LONGEST_VALUE]


def _order(value: Any) -> tuple[int, float, str]:
    if isinstance(value, bool | int | float) and value == value:
        return 0, float(max(min(value, 1e308), -1e308)), ""
    return (2, 0.0, "") if value is None else (1, 0.0, _text(value))


def look_of(number: int, count: int) -> tuple[str, int]:
    """Return the colour of a run or group, for styles, and its kind of line: 0 is solid.

    Of more than eight each has a hue, and beyond 17 another kind of line."""
    if count <= NAMED:
        return f"var(--run-{number % NAMED})", 0
    hue = round(_FIRST + number * _APART % _HUES * 360 / _HUES) % 360
    return f"hsl({hue} var(--run-tone))", number // _HUES % _DASHES
