"""The panel of ranks: a heat map of hosts and ranks, and the slowest by name."""

import base64
import math
from collections.abc import Sequence
from typing import Any

import msgspec

from offloop.bus.printing import one_line
from offloop.bus.protocol.host_windows import ARRIVAL, MEMORY, PHASE, STEP, THROUGHPUT
from offloop.bus.types.health import HEALTH
from offloop.bus.types.units import SECONDS, Scale, number_text, scale_of
from offloop.consumers.api.optional import np, ui, ui_events
from offloop.consumers.dashboard.view.own_events import OwnEvents
from offloop.consumers.dashboard.view.ranks import FEW_RANKS, RankMap, quantity_text, usual_quantity
from offloop.consumers.dashboard.view.run_view import RunView
from offloop.consumers.dashboard.web.frames import Frames, element_of, look_in
from offloop.consumers.dashboard.web.panel import Panel, PanelData

_SECONDS_BETWEEN = 1.0
_MOST_ROWS = 20
_DIGITS = 4


class RanksLook(msgspec.Struct, frozen=True):
    seen: bool = False
    run: int = 0
    quantity: str = ARRIVAL


class RanksPanel(Panel):
    def __init__(self) -> None:
        super().__init__("Ranks", "view_column", is_open=True)
        self._shown = PanelData()
        self._look = RanksLook()
        self._frames = Frames(self._send)
        with self.box:
            self._element = element_of("ranks")
            self._element.on("look", self._on_look)
        ui.timer(_SECONDS_BETWEEN, self._frames.refresh)

    def update(self, shown: PanelData) -> None:
        self._shown = shown
        # A single rank has no other to compare with.
        self.show(any(run.rank_count > 1 for run in shown.runs))

    async def _on_look(self, event: "ui_events.GenericEventArguments") -> None:
        self._look = look_in(event.args, RanksLook)
        await self._frames.refresh()

    async def _send(self) -> None:
        if not (self._look.seen and self.is_open):
            return
        news = self._frames.news(ranks_frame(self._shown.runs, self._shown.labels, self._look))
        if news:
            await self._frames.draw(self._element, news)


def ranks_frame(runs: Sequence[RunView], labels: Sequence[str], look: RanksLook) -> dict[str, Any]:
    chosen = [number for number, run in enumerate(runs) if run.rank_count > 1]
    if not chosen:
        return {"map": None, "rows": [], "runs": []}
    number = look.run if look.run in chosen else chosen[0]
    view = runs[number]
    ranks = view.rank_map()
    if ranks.waiting is not None and not ranks.has_hosts:
        # In a run on several hosts their windows have it.
        view.health = view.health or OwnEvents(view, HEALTH, view.take_health)
        view.health.look()
    names = ranks.quantities
    quantity = look.quantity if look.quantity in names else usual_quantity(names) if names else None
    some_speak = len(ranks.silent) < len(ranks.hosts)
    return {
        "runs": [[one, one_line(labels[one])] for one in chosen],
        "run": number,
        "quantities": [[name, quantity_text(name)] for name in names],
        "quantity": quantity,
        "hosts": [_host(one.name, one.ranks) for one in ranks.hosts],
        # Where all hosts are silent, none stands out.
        "silent": [place for place, host in enumerate(ranks.hosts) if host.silent is not None and some_speak],
        "late": list(ranks.late),
        "waiting": None if ranks.waiting is None else ranks.waiting.cell,
        "facts": [list(fact) for fact in ranks.facts()],
        "map": _map(ranks, quantity) if ranks.has_hosts or len(ranks) > FEW_RANKS else None,
        **_rows(ranks, quantity),
    }


def _host(name: str, ranks: Sequence[int]) -> list[Any]:
    in_order = len(ranks) > 0 and tuple(ranks) == tuple(range(ranks[0], ranks[0] + len(ranks)))
    return [one_line(name), len(ranks), ranks[0] if in_order else list(ranks)]


def _map(ranks: RankMap, quantity: str | None) -> dict[str, Any] | None:
    if quantity is None:
        return None
    values = ranks.values(quantity).astype("<f4")
    known = values[np.isfinite(values)]
    low, high = ranks.range(quantity)
    median, scale = ranks.median(quantity) if len(known) else None, _scale(quantity)
    return {
        "cells": base64.b64encode(values.tobytes()).decode("ascii"),
        "low": low,
        "high": high,
        "scale": scale,
        "lowText": ("≤ " if len(known) and known.min() < low else "") + _text(low, scale),
        "highText": ("≥ " if len(known) and known.max() > high else "") + _text(high, scale),
        "medianText": "" if median is None else _text(median, scale),
        "fewer": quantity == THROUGHPUT,
    }


def _rows(ranks: RankMap, quantity: str | None) -> dict[str, Any]:
    is_few = len(ranks) <= _MOST_ROWS
    cells = list(range(len(ranks))) if is_few or quantity is None else ranks.slowest(quantity, _MOST_ROWS)
    columns = [("rank", "rank"), *([("host", "host")] if ranks.has_hosts else [])]
    if quantity not in (None, STEP, ARRIVAL):
        columns.append(("value", quantity_text(str(quantity))))
    if not is_few:
        columns.append(("above", "below the median" if quantity == THROUGHPUT else "above the median"))
    columns += [("batch", "batch"), ("seconds", "seconds a batch"), ("last", "arrives last")]
    columns += [("late", "after the first"), ("behind", "batches behind")]
    rows = []
    for cell in cells:
        view = ranks.row(cell)
        value = math.nan if quantity is None else float(ranks.values(quantity)[cell])
        above = math.nan if quantity is None else value - ranks.median(quantity)
        texts = {
            "rank": str(view.rank),
            "host": one_line(view.host),
            "value": _text(value, _scale(quantity or "")),
            "above": _text(abs(above), _scale(quantity or "")),
            "batch": f"{view.batch:,}",
            "seconds": "" if view.seconds_per_batch is None else f"{view.seconds_per_batch:.4g}",
            "last": "" if view.last_share is None else f"{view.last_share:.0%} of batches",
            "late": "" if view.late is None else f"{1000 * view.late:.3g} ms",
            "behind": str(view.behind),
        }
        rows.append([texts[key] for key, _ in columns])
    title = "" if is_few or quantity is None else f"The worst by {quantity_text(quantity)}"
    return {"columns": [label for _, label in columns], "rows": rows, "title": title}


def _scale(quantity: str) -> Scale:
    if quantity in (STEP, ARRIVAL) or quantity.startswith(PHASE):
        return SECONDS
    if quantity == MEMORY:
        return scale_of("memory_bytes", {})
    return scale_of("samples_per_sec", {}) if quantity == THROUGHPUT else ()


def _text(value: float, scale: Scale) -> str:
    return "" if math.isnan(value) else number_text(value, scale, _DIGITS)
