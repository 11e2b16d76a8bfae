"""The page of all runs: a table of them, and links to the page of one or several."""

import asyncio
import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from offloop.bus.errors import OffloopError
from offloop.bus.index.columns import Column, progress_of
from offloop.bus.index.entry import RunEntry
from offloop.bus.index.table import NEWEST_FIRST, OF_EVERY_RUN, Chosen, Group, RunTable
from offloop.bus.printing import one_line
from offloop.bus.types.units import BYTES, difference, number_text
from offloop.consumers.api.optional import ui, ui_events
from offloop.consumers.dashboard.web.access import Opening, Role
from offloop.consumers.dashboard.web.explore import ExploreLook, explored
from offloop.consumers.dashboard.web.frames import Frames, element_of, look_in
from offloop.consumers.dashboard.web.places import AllRuns
from offloop.consumers.dashboard.web.top import NEGATIVE, PRIMARY, PageTop, is_sure, show_error

MOST_COMPARED = 50  # limit of compared runs

_FRAME_SECONDS = 0.5
_MOST_ROWS = 400
_MOST_NAMES = 2000
_MOST_COLUMNS = 40
_MOST_SELECTED = 1000
_MOST_NAMED = 5
_HERE = Path(__file__).parent
_STYLES = tuple(_HERE / f"{name}.css" for name in ("page", "home", "explore"))
_KEYS = (
    ("/", "search and filter"),
    ("d", "dark, light, or as the system has it"),
    ("?", "this list"),
    ("↑ / ↓ / Page Up / Page Down", "in the table: scroll"),
    ("Enter", "on a name: the page of that run; on a column's head: sort by it"),
    ("Shift + ← / →", "on a column's head: move the column"),
    ("+ / -", "on a column's head: make the column wider / narrower"),
    ("arrows / Space / Enter", "on a plot: next run / select it / its page"),
    ("Escape", "leave a tag or a note as it was"),
    ("Tab", "next button, link or box"),
)


class CompareLook(msgspec.Struct, frozen=True):
    group: str = ""  # the column that groups them
    folded: bool = False  # groups are closed except for those in toggled; otherwise these are the closed ones
    toggled: frozenset[str] = frozenset()
    baseline: str = ""  # the run that others are compared with

    def is_closed(self, group: Group) -> bool:
        return self.folded != (group.text in self.toggled)

    def lines(self, table: RunTable, chosen: Chosen, order: str) -> Sequence[Group | RunEntry]:
        by = table.column_or_none(self.group)
        if by is None:
            return chosen.entries
        groups = chosen.groups(by, order, table.column_or_none(order.removeprefix("-")))
        return [line for one in groups for line in (one, *(() if self.is_closed(one) else one.entries))]


def _head(group: Group, columns: Sequence[Column], is_closed: bool) -> dict[str, Any]:
    heads = [group.head(column) for column in columns]
    return {
        "group": group.text,
        "count": len(group.entries),
        "isClosed": is_closed,
        "cells": [{"text": text, "range": range_ or None} if text else None for text, range_ in heads],
    }


def _row(entry: RunEntry, columns: Sequence[Column], chosen: Chosen, base: RunEntry | None) -> dict[str, Any]:
    return {
        "run": key_of(entry.run),
        "label": one_line(entry.run),
        "name": one_line(entry.run.rpartition("/")[2]),
        "isBaseline": entry is base,
        "status": one_line(entry.status),
        "why": one_line(entry.error or entry.reason or entry.problem or ""),
        "pinned": entry.pinned,
        "archived": entry.archived,
        "tags": list(entry.tags),
        "note": entry.note,
        "cells": [_cell(entry, column, chosen, None if entry is base else base) for column in columns],
    }


def _cell(entry: RunEntry, column: Column, chosen: Chosen, base: RunEntry | None) -> dict[str, Any] | None:
    if column.kind in ("status", "tags", "note"):
        return None
    if column.kind == "time":
        return {"time": column.value(entry)}
    cell: dict[str, Any] = {"text": column.text(entry)}
    if column.kind == "progress":
        cell["part"] = progress_of(entry)
    elif column.metric is not None:
        cell["best"] = chosen.best(column) == entry.run
        value = column.value(entry)
        if base is not None and value is not None:
            apart = difference(column.direction, value, column.value(base), column.scale(entry))
            cell["difference"], cell["judged"] = apart
    elif column.is_hyperparameter:
        cell["whole"] = column.text(entry, whole=True)
        cell["differs"] = base is not None and column.value(base) != column.value(entry)
    return cell


def key_of(run: str) -> str:
    try:
        run.encode()
    except UnicodeEncodeError:
        return one_line(run)
    return run


class TableLook(msgspec.Struct, frozen=True):
    find: str = ""
    sort: str = NEWEST_FIRST
    columns: tuple[str, ...] | None = None
    archived: bool = False
    first: Annotated[int, msgspec.Meta(ge=0)] = 0
    count: Annotated[int, msgspec.Meta(ge=0, le=_MOST_ROWS)] = 50
    hidden: bool = False
    names: str = ""  # a part of the names of columns to choose from
    explore: ExploreLook | None = None
    compare: CompareLook = CompareLook()


def _texts(value: Any) -> list[str]:
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []


def window(table: RunTable, look: TableLook) -> dict[str, Any]:
    chosen = table.choose(look.find, look.sort, look.archived)
    columns = table.columns(None if look.columns is None else look.columns[:_MOST_COLUMNS])
    lines = look.compare.lines(table, chosen, look.sort)
    first = min(look.first, max(len(lines) - look.count, 0))
    baseline = look.compare.baseline
    base = table.entries.get(baseline)
    return {
        "total": len(table.entries),
        "found": len(chosen.entries),
        "archived": chosen.archived,
        "error": chosen.error and one_line(chosen.error),
        "first": first,
        "columns": [
            {
                "name": column.name,
                "title": one_line(column.title),
                "hint": one_line(column.metric or column.name),
                "which": column.which,
                "kind": column.kind,
                "downwards": column.downwards,
            }
            for column in columns
        ],
        "lines": len(lines),
        "rows": [
            _head(line, columns, look.compare.is_closed(line))
            if isinstance(line, Group)
            else _row(line, columns, chosen, base)
            for line in lines[first : first + look.count]
        ],
        "baseline": {"label": one_line(baseline), "isThere": base is not None} if baseline else None,
        **({} if look.explore is None else {"explored": explored(table, chosen.entries, look.explore, key_of)}),
    }


class HomePage:
    def __init__(self, runs: AllRuns, opening: Opening) -> None:
        self._runs = runs
        self._opening = opening
        self._look: TableLook | None = None
        self._found = ""  # the last valid filter
        self._seen: object = None
        self._frames = Frames(self._send_frame)

    def build(self) -> None:
        self._runs.open()
        ui.context.client.on_delete(self._runs.close)
        for style in _STYLES:
            ui.add_css(style)
        ui.page_title("all runs · offloop")
        ui.query("body").classes("home-page")
        ui.html('<a class="skip" href="#table">Skip to the table</a>', sanitize=False)
        ui.colors(primary=PRIMARY, negative=NEGATIVE)
        opening = self._opening
        top = PageTop(opening.role, opening.view_link, _KEYS)
        self._table = element_of("home")
        self._table.props["runsPage"] = "/runs"
        self._may_change = opening.role is Role.COMMAND and not self._runs.place.is_elsewhere
        self._table.props["mayChange"] = self._may_change
        self._table.props["folder"] = one_line(self._runs.place.in_words)
        self._table.props["mostCompared"] = MOST_COMPARED
        self._table.on("look", self._on_look)
        self._table.on("all", self._on_all)
        self._table.on("help", top.show_keys)
        self._table.on("annotate", self._on_annotate)
        self._table.on("remove", self._on_remove)
        self._box = ui.element("div")
        ui.timer(_FRAME_SECONDS, self._frames.refresh)

    async def _send_frame(self) -> None:
        look, library = self._look, self._runs.library
        if look is None or look.hidden:
            return
        table = library.table
        seen = (look, table, library.waiting, library.problem)
        if seen == self._seen:
            return
        whole = window(table, look)
        if whole["error"]:
            # The results of the last valid filter stay while the filter is typed.
            whole = {
                **window(table, msgspec.structs.replace(look, find=self._found)),
                "error": whole["error"],
            }
        else:
            self._found = look.find
        whole["waiting"] = library.waiting
        whole["problems"] = [one_line(library.problem)] if library.problem else []
        metrics, of_metrics = _some(table.known.metrics, look.names)
        hyperparameters, of_hyperparameters = _some(table.known.hyperparameters, look.names)
        whole["names"] = {
            "usual": list(table.usual_columns),
            "every": [name for name in OF_EVERY_RUN if table.has_folders or name != "folder"],
            "hyperparameters": hyperparameters,
            "metrics": metrics,
            "more": of_metrics + of_hyperparameters,
            "rated": [name for name in metrics if table.known.direction(name) is not None],
        }
        frame = self._frames.news(whole)
        self._seen = seen
        if not frame:
            return
        is_drawn, _ = await self._frames.draw(self._table, frame)
        if not is_drawn:
            self._seen = None

    async def _on_look(self, event: "ui_events.GenericEventArguments") -> None:
        self._look = look_in(event.args, TableLook)
        await self._frames.refresh()

    async def _on_all(self, event: "ui_events.GenericEventArguments") -> None:
        look, table = self._look or TableLook(), self._runs.library.table
        found = table.choose(look.find, look.sort, look.archived)
        self._table.run_method("selectAll", [key_of(entry.run) for entry in found.entries[:_MOST_SELECTED]])

    async def _on_annotate(self, event: "ui_events.GenericEventArguments") -> None:
        given = event.args
        if not isinstance(given, dict) or not self._may_change:
            return
        changes: dict[str, Any] = {
            name: given[name] for name in ("pinned", "archived") if isinstance(given.get(name), bool)
        }
        changes |= {name: _texts(given[name]) for name in ("add", "remove") if name in given}
        if isinstance(given.get("note"), str):
            changes["note"] = given["note"]

        def annotate() -> None:
            refusal = None
            for run in _texts(given.get("runs"))[:_MOST_SELECTED]:
                try:
                    self._runs.library.annotate(run, **changes)
                except OffloopError as error:
                    refusal = refusal or error
            if refusal is not None:
                raise refusal

        await self._do(annotate)

    async def _on_remove(self, event: "ui_events.GenericEventArguments") -> None:
        if not self._may_change:
            return
        known = self._runs.library.table.entries
        asked = [known[run] for run in dict.fromkeys(_texts(event.args)) if run in known]
        ended = [entry for entry in asked if not entry.is_going_on]
        if len(ended) < len(asked):
            live = [one_line(entry.run) for entry in asked if entry.is_going_on]
            self._say(f"{_listed(live)}: cannot be deleted before the training ends")
        if ended and await self._is_sure(ended):
            remove = self._runs.library.remove
            removed = [entry.run for entry in ended if await self._do(functools.partial(remove, entry.run))]
            self._table.run_method("deselect", [key_of(run) for run in removed])

    async def _is_sure(self, entries: Sequence[RunEntry]) -> bool:
        count = "this run" if len(entries) == 1 else f"these {len(entries):,} runs"
        size = number_text(sum(entry.size for entry in entries), BYTES)
        question = [
            f"Delete {count}?",
            _listed([one_line(entry.run) for entry in entries]),
            f"This frees {size}. Recordings and checkpoints are gone for good.",
        ]
        with self._box:
            return await is_sure(question, "Delete", "Keep")

    def _say(self, text: str) -> None:
        with self._box:
            show_error(text)

    async def _do(self, change: Callable[[], object]) -> bool:
        try:
            await asyncio.to_thread(change)
        except OffloopError as error:
            self._say(str(error))
            return False
        finally:
            await self._frames.refresh()
        return True


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more:,} more" if more > 0 else "")


def _some(names: Iterable[str], wanted: str) -> tuple[list[str], int]:
    """Return the names to send, those with a wanted part first, and the number of others."""
    known = sorted(filter(str.isprintable, names))
    if len(known) > _MOST_NAMES and wanted:
        known.sort(key=lambda name: wanted.lower() not in name.lower())
    return known[:_MOST_NAMES], max(len(known) - _MOST_NAMES, 0)
