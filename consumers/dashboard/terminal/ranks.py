"""Ranks in a terminal: a heat map of blocks that folds to its width, and the slowest by name."""

import math
from typing import TYPE_CHECKING, NamedTuple

from offloop.bus.printing import one_line
from offloop.bus.protocol.host_windows import ARRIVAL, MEMORY, PHASE, STEP, THROUGHPUT
from offloop.consumers.dashboard.terminal.draw import number
from offloop.consumers.dashboard.terminal.lines import fitted, rule, text_line
from offloop.consumers.dashboard.view.progress import seconds_text
from offloop.consumers.dashboard.view.rank_map import FEW_RANKS, RankMap, RankView, quantity_text, usual_quantity

if TYPE_CHECKING:
    from rich.text import Text

_LEVELS = "▁▂▃▄▅▆▇█"
_STYLES = ("blue", "blue", "cyan", "cyan", "yellow", "yellow", "red", "bold red")
"""One for each level: the height says the same where there are no colours."""
_UNKNOWN, _SILENT, _LATE = "·", "x", "?"
_WAITED = "bold white on red"
_WIDE = 66
_LONGEST_NAME = 14
_BLOCK_GAP = 2
_MAP_SHARE = 0.6
_LEAST_MAP = 2
_MOST_FACTS = 3
_FACT_STYLES = {"nan": "bold red", "silent": "red", "waiting": "yellow", "late": "yellow", "unknown": "dim"}


class _Fold(NamedTuple):
    """What one cell of a map in a terminal stands for."""

    cells: list[range]
    """Of each, the cells of the map that it has the worst of."""
    per_block: int
    per_line: int
    """Blocks in a line."""
    names: int
    """How wide the name before each block is; 0 for none."""
    text: str


def rank_lines(ranks: RankMap, quantity: str | None, width: int, room: int, with_map: bool = False) -> "list[Text]":
    """A title, a map where there are many, and the ranks that stand out: at most ``room`` lines."""
    names = ranks.quantities
    if not names:
        return [rule(f"{len(ranks):,} ranks", width)][:room]
    chosen = quantity if quantity in names else usual_quantity(names)
    if not with_map and not ranks.has_hosts and len(ranks) <= FEW_RANKS:
        return _few(ranks, width, room)
    low, high = ranks.range(chosen)
    scale = f"{quantity_text(chosen)} {_value_text(chosen, low)} {_LEVELS} {_value_text(chosen, high)}"
    hosts = f" on {len(ranks.hosts):,} host{'s' * (len(ranks.hosts) > 1)}" if ranks.has_hosts else ""
    lines = [rule(f"{len(ranks):,} ranks{hosts}", width, scale)]
    facts = ranks.facts()[: min(_MOST_FACTS, max(room - 3, 0))]
    lines += [text_line(text, _FACT_STYLES[kind]) for kind, text in facts]
    left = room - len(lines)
    if left > 0:
        lines += _map(ranks, chosen, width, min(max(int(left * _MAP_SHARE), _LEAST_MAP), left))
    for cell in ranks.slowest(chosen, max(room - len(lines), 0)):
        lines.append(_named(ranks, chosen, cell, width))
    return lines[: max(room, 0)]


def _few(ranks: RankMap, width: int, room: int) -> "list[Text]":
    """A line for each, or for those that arrive last most often."""
    most = max(room - 1, 0)
    rows = [ranks.row(cell) for cell in range(len(ranks))]
    slow = None if ranks.waiting is None else rows[ranks.waiting.cell]
    shown = sorted(rows, key=lambda one: (-(one.last_share or 0.0), one.rank))[:most] if len(rows) > most else rows
    title = f"{len(rows)} ranks" + ("" if slow is None else f"  the others wait for rank {slow.rank}")
    lines = [rule(title, width)]
    lines += [_row(one, width, "bold red" if one is slow else "") for one in shown]
    if len(rows) > most:
        lines.append(text_line(f"and {len(rows) - most} more, which arrive earlier", "dim"))
    return lines


def _row(one: RankView, width: int, style: str) -> "Text":
    speed = "-" if one.seconds_per_batch is None else seconds_text(one.seconds_per_batch)
    if width < _WIDE:
        text = f"rank {one.rank:<2}{one.batch:>8}{speed:>9}"
    else:
        text = f"rank {one.rank:<4} batch {one.batch:<8} {f'{speed} a batch':<18}"
    if one.last_share is not None:
        text += f" last {one.last_share:4.0%}, {seconds_text(one.late or 0.0)} late"
    if one.behind:
        text += f"  {one.behind} behind"
    return text_line(text, style)


def _named(ranks: RankMap, quantity: str, cell: int, width: int) -> "Text":
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
    """A cell for each rank where they fit, else one for each host, or for several, with the worst of them."""
    from rich.text import Text

    fold = _fold(ranks, width, room)
    values = ranks.values(quantity).tolist()
    low, high = ranks.range(quantity)
    silent = {host.name for host in ranks.silent}
    late, waited = set(ranks.late), None if ranks.waiting is None else ranks.waiting.cell
    is_worse = min if quantity == THROUGHPUT else max

    def cell_of(cells: range) -> tuple[str, str]:
        known = [values[cell] for cell in cells if math.isfinite(values[cell])]
        style = _WAITED if waited is not None and waited in cells else ""
        if all(ranks.host_of(cell).name in silent for cell in cells):
            return _SILENT, style or "red"
        if any(cell in late for cell in cells):
            return _LATE, style or "bold yellow"
        if not known:
            return _UNKNOWN, style or "dim"
        share = (is_worse(known) - low) / (high - low)
        share = 1 - share if quantity == THROUGHPUT else share
        level = min(max(int(share * len(_LEVELS)), 0), len(_LEVELS) - 1)
        return _LEVELS[level], style or _STYLES[level]

    lines: list[Text] = [text_line(fold.text, "dim")] if fold.text else []
    per_line = fold.per_block * fold.per_line
    for begin in range(0, len(fold.cells), per_line):
        line = Text()
        for first in range(begin, min(begin + per_line, len(fold.cells)), fold.per_block):
            if first > begin and (fold.names or fold.per_line > 1):
                line.append(" " * (_BLOCK_GAP if fold.names else 1))
            if fold.names:
                line.append(fitted(ranks.host_of(fold.cells[first].start).name, fold.names) + " ", "dim")
            for cells in fold.cells[first : first + fold.per_block]:
                line.append(*cell_of(cells))
        lines.append(line)
    return lines


def _fold(ranks: RankMap, width: int, room: int) -> _Fold:
    from rich.cells import cell_len

    counts = {len(host.ranks) for host in ranks.hosts}
    starts, hosts = 0, []
    for host in ranks.hosts:
        hosts.append(range(starts, starts + len(host.ranks)))
        starts += len(host.ranks)
    single = [range(cell, cell + 1) for cell in range(len(ranks))]
    # Blocks are told apart by their places, so hosts that differ in their ranks have none.
    across = counts.pop() if ranks.has_hosts and len(counts) == 1 else 0
    if across:
        longest = max(cell_len(one_line(host.name)) for host in ranks.hosts) + 1
        for names, gap in ((min(longest, _LONGEST_NAME), _BLOCK_GAP), (0, 1)):
            block = across + gap + (names + 1 if names else 0)
            per_line = (width + gap) // block
            if per_line and -(-len(hosts) // per_line) <= room:
                return _Fold(single, across, per_line, names, "")
    if len(single) <= width * room:
        return _Fold(single, max(width, 1), 1, 0, "")
    units = hosts if len(hosts) > 1 else single
    what = "host" if len(hosts) > 1 else "rank"
    together = max(-(-len(units) // max(width * max(room - 1, 1), 1)), 1)
    cells = [
        range(units[place].start, units[min(place + together, len(units)) - 1].stop)
        for place in range(0, len(units), together)
    ]
    text = f"each the worst of {f'a {what}' if together == 1 else f'{together:,} {what}s'}"
    return _Fold(cells, max(width, 1), 1, 0, text if room > 1 else "")


def _value_text(quantity: str, value: float) -> str:
    if quantity in (STEP, ARRIVAL) or quantity.startswith(PHASE):
        return seconds_text(value)
    if quantity == MEMORY:
        return f"{value / (1 << 30):.3g} GiB"
    return f"{number(value)}/s" if quantity == THROUGHPUT else number(value)
