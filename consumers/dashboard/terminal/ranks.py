"""Ranks in a terminal: a heat map that folds to its width, and the slowest by name."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from offloop.bus.printing import one_line
from offloop.bus.protocol.host_windows import ARRIVAL, MEMORY, PHASE, STEP, THROUGHPUT
from offloop.consumers.dashboard.terminal.draw import LEVELS, number
from offloop.consumers.dashboard.terminal.lines import fitted, rule, text_line
from offloop.consumers.dashboard.view.progress import seconds_text
from offloop.consumers.dashboard.view.rank_map import FEW_RANKS, RankMap, quantity_text, usual_quantity

if TYPE_CHECKING:
    from rich.text import Text

_STYLES = ("blue", "blue", "cyan", "cyan", "yellow", "yellow", "red", "bold red")
"""One for each level: the height says the same where there are no colours."""
_UNKNOWN, _SILENT, _LATE = "·", "x", "?"
_WAITED = "bold white on red"
_WIDE = 66
_LONGEST_NAME = 14
_GAP = 2
_MAP_SHARE = 0.6
_LEAST_MAP = 2
_MOST_FACTS = 3
_FACT_STYLES = {"nan": "bold red", "silent": "red", "waiting": "yellow", "late": "yellow", "unknown": "dim"}


def rank_lines(ranks: RankMap, quantity: str | None, width: int, room: int, with_map: bool = False) -> "list[Text]":
    """A title, what stands out, a map where there are many ranks, and the slowest ranks: at most ``room`` lines."""
    names = ranks.quantities
    if not names:
        return [rule(f"{len(ranks):,} ranks", width)][:room]
    chosen = quantity if quantity in names else usual_quantity(names)
    low, high = ranks.range(chosen)
    scale = f"{quantity_text(chosen)} {_value_text(chosen, low)} {LEVELS} {_value_text(chosen, high)}"
    hosts = f" on {len(ranks.hosts):,} host{'s' * (len(ranks.hosts) > 1)}" if ranks.has_hosts else ""
    lines = [rule(f"{len(ranks):,} ranks{hosts}", width, scale)]
    facts = ranks.facts()[: min(_MOST_FACTS, max(room - 3, 0))]
    lines += [text_line(text, _FACT_STYLES[kind]) for kind, text in facts]
    left = room - len(lines)
    if left > 0 and (with_map or ranks.has_hosts or len(ranks) > FEW_RANKS):
        lines += _map(ranks, chosen, width, min(max(int(left * _MAP_SHARE), _LEAST_MAP), left))
    lines += [_row(ranks, chosen, cell, width) for cell in ranks.slowest(chosen, max(room - len(lines), 0))]
    return lines[: max(room, 0)]


def _row(ranks: RankMap, quantity: str, cell: int, width: int) -> "Text":
    one, value, median = ranks.row(cell), float(ranks.values(quantity)[cell]), ranks.median(quantity)
    apart = f"{_value_text(quantity, abs(value - median))} {'below' if value < median else 'above'}"
    host = f"  {fitted(one.host, _LONGEST_NAME)}" if one.host else ""
    text = f"rank {one.rank:<6}{host}{_value_text(quantity, value):>10} {apart:>16}"
    if width >= _WIDE:
        text += " the median"
        text += f"  last {one.last_share:.0%}" if one.last_share else ""
    text += f"  {one.behind} behind" if one.behind else ""
    return text_line(text, "bold red" if ranks.waiting is not None and ranks.waiting.cell == cell else "")


def _map(ranks: RankMap, quantity: str, width: int, room: int) -> "list[Text]":
    """A cell for each rank, host by host where they fit, else one for each few neighbours with the worst of them."""
    from rich.text import Text

    across = max(len(host.ranks) for host in ranks.hosts)
    names = min(max(len(one_line(host.name)) for host in ranks.hosts) + 1, _LONGEST_NAME)
    per_line = (width + _GAP) // (names + 1 + across + _GAP)
    blocks: list[Text] = []
    if ranks.has_hosts and per_line and math.ceil(len(ranks.hosts) / per_line) <= room:
        begin = 0
        for host in ranks.hosts:
            block = Text()
            block.append(fitted(host.name, names) + " ", "dim")
            for cell in range(begin, begin := begin + len(host.ranks)):
                block.append(*_cell(ranks, quantity, [cell]))
            block.append(" " * (names + 1 + across - block.cell_len + _GAP))
            blocks.append(block)
        return [Text().join(blocks[first : first + per_line]) for first in range(0, len(blocks), per_line)]
    together = math.ceil(len(ranks) / max(width * (room - 1), 1))
    lines = [text_line(f"each the worst of {together:,} ranks", "dim")] if together > 1 and room > 1 else []
    for first in range(0, len(ranks), width * together):
        line = Text()
        for begin in range(first, min(first + width * together, len(ranks)), together):
            line.append(*_cell(ranks, quantity, range(begin, min(begin + together, len(ranks)))))
        lines.append(line)
    return lines[:room]


def _cell(ranks: RankMap, quantity: str, cells: Sequence[int]) -> tuple[str, str]:
    """The letter and the style for the worst of some ranks."""
    low, high = ranks.range(quantity)
    known = [value for value in ranks.values(quantity)[cells].tolist() if math.isfinite(value)]
    style = _WAITED if ranks.waiting is not None and ranks.waiting.cell in cells else ""
    if all(ranks.host_of(cell).silent is not None for cell in cells):
        return _SILENT, style or "red"
    if any(cell in ranks.late for cell in cells):
        return _LATE, style or "bold yellow"
    if not known:
        return _UNKNOWN, style or "dim"
    share = (min(known) if quantity == THROUGHPUT else max(known)) / (high - low) - low / (high - low)
    share = 1 - share if quantity == THROUGHPUT else share
    level = min(max(int(share * len(LEVELS)), 0), len(LEVELS) - 1)
    return LEVELS[level], style or _STYLES[level]


def _value_text(quantity: str, value: float) -> str:
    if quantity in (STEP, ARRIVAL) or quantity.startswith(PHASE):
        return seconds_text(value)
    if quantity == MEMORY:
        return f"{value / (1 << 30):.3g} GiB"
    return f"{number(value)}/s" if quantity == THROUGHPUT else number(value)
