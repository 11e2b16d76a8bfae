"""The terminal dashboard as lines of text, for any size of a terminal."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offloop.bus.printing import one_line
from offloop.bus.types.metrics import groups_of
from offloop.bus.types.units import SECONDS, duration, number_text
from offloop.consumers.dashboard.view.log import LogEntry, folded
from offloop.consumers.dashboard.view.phases import PHASES
from offloop.consumers.dashboard.view.run_view import RunView, names_of
from offloop.consumers.dashboard.view.series import Points

if TYPE_CHECKING:
    from rich.text import Text


_LEVELS = "▁▂▃▄▅▆▇█"
_ODD = "!"
_LEAST_SPARKLINE = 8
_LEAST_ABOVE = 4
_ENOUGH_ABOVE = 20
_MOST_FACTS = 3
_PHASE_LINES = 3
_VALUE_WIDTH = 10
_RECENT_STEPS = 20
_TIME_WIDTH = 9
_LEAST_LOG_WIDTH = 2

STATES = {
    "waiting": ("○", "yellow"),
    "live": ("●", "green"),
    "replay": ("●", "cyan"),
    "paused": ("‖", "yellow"),
    "finished": ("✓", "green"),
    "stopped": ("■", "yellow"),
    "failed": ("✗", "bold red"),
    "lost": ("?", "bold red"),
    "unreadable": ("!", "bold red"),
}
"""The sign and the style of each status of a run."""

_PHASE_STYLES = ("yellow", "blue", "cyan", "magenta", "green", "red", "white", "bright_black")
_LETTERS = {name: name[0] if name != "other" else "." for name in PHASES}
_KIND_STYLES = {"command": "bold yellow", "end": "bold", "text": "cyan", "output": "dim"}


@dataclass
class Shown:
    page: str = "run"  # run or log
    scroll: int = 0  # lines above the visible metrics, or below the visible log
    commands: bool = True  # the training accepts commands
    message: str | None = None  # A question, or the result of a command, in place of the keys


def frame(view: RunView, shown: Shown, width: int, height: int) -> "list[Text]":
    lines = [_header(view, shown, width), _progress(view, width)]
    room = max(height - len(lines) - 1, 0)
    if shown.page == "log":
        body = [rule("log", width), *_whole_log(view, shown, width, room - 1)]
    else:
        body = _run(view, shown, width, room)
    body = body[:room] + [text_line()] * (room - len(body))
    lines = [*lines, *body, _footer(view, shown, width)][:height]
    for line in lines:
        line.truncate(width, overflow="crop")
    return lines


def _header(view: RunView, shown: Shown, width: int) -> "Text":
    status = "replay" if view.status == "live" and not shown.commands else view.status
    sign, style = STATES[status]
    line = text_line()
    line.append(f"{sign} {status}", style)
    line.append(f"  {one_line(view.run_name)}", "bold")
    if view.attempt > 1:
        line.append(f"  attempt {view.attempt}", "dim")
    if view.error or view.reason:
        line.append(f"  {one_line(view.error or view.reason or '')}", "red" if view.error else "yellow")
        line.truncate(width, overflow="ellipsis")
        return line
    progress = view.progress()
    parts = [f"epoch {progress.epoch}", f"batch {progress.batch}", duration(progress.elapsed)]
    return spread(line, text_line("  ".join(parts)), width)


def _progress(view: RunView, width: int) -> "Text":
    progress = view.progress()
    if progress.fraction is None:
        rest = "no planned end" if progress.max_duration is None else f"of {progress.max_duration}"
        return text_line(f"{progress.sample} samples, {rest}", "dim")
    goes_on = progress.seconds_left if view.status in ("live", "paused") else None
    left = f"  {duration(goes_on)} left" if goes_on else ""
    # Beside a reason, the header has no room for it.
    batch = f" batch {progress.batch}," if view.error or view.reason else ""
    text = f"{batch} {progress.fraction:4.0%} of {progress.max_duration}{left}"
    room = max(width - len(text), 0)
    done = int(progress.fraction * room)
    line = text_line()
    line.append("━" * done, "green")
    line.append("─" * (room - done), "dim")
    line.append(text)
    return line


def _run(view: RunView, shown: Shown, width: int, room: int) -> "list[Text]":
    """Metrics, phases, ranks and the log: the most important parts stay in a small terminal."""
    below = _phases(view, width) + _ranks(view, width)
    if room < len(below) + _LEAST_ABOVE:
        below = below[:_PHASE_LINES] if room >= _PHASE_LINES + _LEAST_ABOVE else []
    entries = folded(view.log())
    log_room = min(max((room - len(below)) // 4, room - len(below) - _ENOUGH_ABOVE), len(entries))
    log = [rule("log", width), *_log(entries, width, log_room)] if log_room > 0 else []
    metrics_room = room - len(below) - len(log)
    metrics = _metrics(view, shown, width, metrics_room)
    return [*metrics, *[text_line()] * (metrics_room - len(metrics)), *below, *log]


def _metrics(view: RunView, shown: Shown, width: int, room: int) -> "list[Text]":
    names = view.names()
    short = names_of(names).short
    rows: list[tuple[str, bool]] = []
    for group, members in groups_of(names).items():
        rows += [(group or "metrics", True), *((name, False) for name in members)]
    if not rows:
        return [text_line("nothing has been logged yet", "dim")]
    lines, below = [], []
    if len(rows) > room > 1:
        below.append(text_line(f"… {len(names):,} metrics: ↑ ↓", "dim"))
    room = max(room - len(below), 0)
    shown.scroll = max(min(shown.scroll, len(rows) - room), 0)
    rows = rows[shown.scroll : shown.scroll + room]
    labels = ["" if is_head else short(name) for name, is_head in rows]
    label_width = min(max(map(len, labels), default=0) + 1, max(width // 3, 8))
    curve = width - label_width - _VALUE_WIDTH - 4
    for label, (name, is_head) in zip(labels, rows, strict=True):
        if is_head:
            lines.append(text_line(name, "dim"))
            continue
        series = view.series(name)
        value = series.last
        line = text_line()
        line.append(f"  {fitted(label, label_width)}")
        is_finite = value is None or value - value == 0
        line.append(f"{number_text(value, (), 4) or '-':>{_VALUE_WIDTH}}  ", "bold" if is_finite else "bold red")
        if curve >= _LEAST_SPARKLINE:
            line.append_text(sparkline(series.points(width=curve), curve))
        lines.append(line)
    return lines + below


def _phases(view: RunView, width: int) -> "list[Text]":
    phases = view.phases(width=None)
    shares = phases.shares(_RECENT_STEPS)
    if not shares:
        return []
    seconds = sum(float(one[-_RECENT_STEPS:].mean()) for one in phases.seconds.values())
    publishing = view.publishing()
    cost = ""
    if publishing.microseconds is not None:
        cost = f"publishing {publishing.microseconds:.0f} µs, {publishing.share or 0.0:.1%}"
    device = ", on the GPU" if phases.on_device else ""
    parts = [(name, shares[name], f"reverse {style}") for name, style in zip(PHASES, _PHASE_STYLES, strict=True)]
    bar = stacked_bar([(_LETTERS[name], share, style) for name, share, style in parts], width)
    legend = text_line()
    for name, share, style in sorted(parts, key=lambda part: -part[1]):
        if share >= 0.001 and len(legend) + len(name) + 7 <= width:
            legend.append(_LETTERS[name], style)
            legend.append(f" {name} {share:.0%}  ")
    return [rule(f"step  {number_text(seconds, SECONDS, 3)}{device}", width, cost), bar, legend]


def _ranks(view: RunView, width: int) -> "list[Text]":
    if view.rank_count < 2:
        return []
    ranks = view.rank_map()
    hosts = f" on {len(ranks.hosts):,} host{'s' * (len(ranks.hosts) > 1)}" if ranks.has_hosts else ""
    facts = [text_line(text, "yellow") for _, text in ranks.facts()[:_MOST_FACTS]]
    return [rule(f"{view.rank_count:,} ranks{hosts}", width), *facts]


def _log(entries: Sequence[LogEntry], width: int, room: int) -> "list[Text]":
    lines = [_log_line(entry, one_line(entry.text), True) for entry in entries[-room:]] if room > 0 else []
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def _whole_log(view: RunView, shown: Shown, width: int, room: int) -> "list[Text]":
    """Return the entries in as many lines as they need, up to ``shown.scroll`` lines above the end of the log."""
    from rich.cells import chop_cells

    rows = []
    for entry in folded(view.log()):
        parts = chop_cells(one_line(entry.text), max(width - _TIME_WIDTH, _LEAST_LOG_WIDTH)) or [""]
        rows += [(entry, part, place == 0) for place, part in enumerate(parts)]
    shown.scroll = max(min(shown.scroll, len(rows) - room), 0)
    end = len(rows) - shown.scroll
    return [_log_line(*row) for row in rows[max(end - max(room, 0), 0) : end]]


def _log_line(entry: LogEntry, text: str, is_first: bool) -> "Text":
    line = text_line()
    line.append(time.strftime("%H:%M:%S ", time.localtime(entry.time)) if is_first else " " * _TIME_WIDTH, "dim")
    line.append(text, _KIND_STYLES.get(entry.kind, ""))
    return line


def _footer(view: RunView, shown: Shown, width: int) -> "Text":
    if shown.message is not None:
        message = text_line(shown.message, "reverse")
        message.truncate(width, overflow="ellipsis")
        return message
    keys = ["q quit", "↑↓ scroll", "e log"]
    if shown.commands and view.status in ("waiting", "live", "paused"):
        keys += ["S stop", "p pause", "c checkpoint"]
    return key_line(keys, width)


def text_line(text: str = "", style: str = "") -> "Text":
    from rich.text import Text

    return Text(one_line(text) if text.strip() else text, style)


def rule(title: str, width: int, right: str = "") -> "Text":
    title = one_line(title)
    line = text_line()
    line.append("── ", "dim")
    line.append(title, "bold")
    right = right if line.cell_len + len(right) + 9 <= width else ""
    rest = width - line.cell_len - 1 - (len(right) + 2 if right else 0)
    line.append(f" {'─' * max(rest, 0)}", "dim")
    if right:
        line.append(f" {right} ")
    return line


def spread(left: "Text", right: "Text", width: int) -> "Text":
    blank = width - left.cell_len - right.cell_len
    if blank < 1:
        return left
    left.append(" " * blank)
    return left.append_text(right)


def fitted(name: str, width: int) -> str:
    """Return the end of a name in ``width`` columns: the start says less."""
    from rich.cells import cell_len, set_cell_size

    name = one_line(name)
    if cell_len(name) >= width:
        while name and cell_len(name) > width - 2:
            name = name[1:]
        name = f"…{name}"
    return set_cell_size(name, width)


def key_line(keys: Sequence[str], width: int) -> "Text":
    line = text_line()
    for text in keys:
        if len(line) + len(text) + 2 > width:
            break
        key, _, meaning = text.partition(" ")
        line.append(key, "bold")
        line.append(f" {meaning}  ", "dim")
    return line


def sparkline(points: "Points", width: int) -> "Text":
    """Return a curve in one line.

    Each character shows the point of its part of the axis that is farthest from the mean; a red ``!`` marks NaN and
    infinities."""
    line = text_line()
    finite = list(filter(math.isfinite, points.ys.tolist()))
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    middle = sum(value / len(finite) for value in finite)
    for values in _columns(points.xs.tolist(), points.ys.tolist(), width):
        if not all(map(math.isfinite, values)):
            line.append(_ODD, "bold red")
        elif values:
            shown = max(values, key=lambda value: abs(value - middle))
            line.append(_LEVELS[_level(shown, low, high, len(_LEVELS))])
        else:
            line.append(" ")
    return line


def stacked_bar(shares: Sequence[tuple[str, float, str]], width: int) -> "Text":
    line = text_line()
    done = 0.0
    for letter, share, style in shares:
        done += share
        line.append(letter * (min(round(done * width), width) - len(line)), style)
    return line


def _columns(xs: list[float], ys: list[float], width: int) -> list[list[float]]:
    if len(xs) <= width:
        return [[value] for value in ys]
    columns: list[list[float]] = [[] for _ in range(width)]
    for x, y in zip(xs, ys, strict=True):
        columns[_level(x, xs[0], xs[-1], width)].append(y)
    return columns


def _level(value: float, low: float, high: float, levels: int) -> int:
    # Divided first: the difference of two large numbers may be infinite; of the smallest ones it is 0 then.
    span = high / 2 - low / 2
    if span <= 0:
        return levels // 2
    return min(int((value / 2 - low / 2) / span * levels), levels - 1)
