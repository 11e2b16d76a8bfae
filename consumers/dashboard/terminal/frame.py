"""What the terminal dashboard shows, as lines of text: drawn from a view, for any size of a terminal."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offloop.bus.printing import one_line
from offloop.consumers.dashboard.terminal.draw import (
    chart,
    has_logarithm,
    is_smoothed,
    number,
    smoothed,
    sparkline,
    stacked_bar,
)
from offloop.consumers.dashboard.terminal.lines import fitted, key_line, rule, spread, text_line
from offloop.consumers.dashboard.terminal.ranks import rank_lines
from offloop.consumers.dashboard.view.log import LogEntry, folded
from offloop.consumers.dashboard.view.phases import PHASES
from offloop.consumers.dashboard.view.progress import duration, seconds_text
from offloop.consumers.dashboard.view.run_view import RunView
from offloop.consumers.dashboard.view.series import Axis

if TYPE_CHECKING:
    from rich.text import Text


_WIDE = 110
_RIGHT_SHARE = 0.42
_GAP = 2
_LEAST_SPARKLINE = 8
_LEAST_ABOVE = 4
_LEAST_WITH_CHART = 8
_LEAST_CHART = 4
_LEAST_WITH_MORE = 3
_ENOUGH_ABOVE = 28
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
"""The sign and the style of what becomes of a run."""

_PHASE_STYLES = ("yellow", "blue", "cyan", "magenta", "green", "red", "white", "bright_black")
_LETTERS = {name: name[0] if name != "other" else "." for name in PHASES}
_KIND_STYLES = {"command": "bold yellow", "end": "bold", "text": "cyan", "output": "dim", "event": ""}

HELP = (
    ("↑ ↓  k j", "choose a metric, which the chart shows; in the log and here: scroll"),
    ("PgUp PgDn", "a page up or down"),
    ("Home End", "the first or the last"),
    ("Enter", "keep the metric's chart beside those of others, or no longer"),
    ("/", "find metrics by name; Escape shows all again"),
    ("s a", "more or less smoothing"),
    ("x", "chart over batches, samples, epochs, or time"),
    ("l", "chart with a logarithmic scale, and back"),
    ("r", "the ranks alone, by what ↑ ↓ choose: arrival, step time, memory, ..., and back"),
    ("e", "the log of events alone, with the whole of its lines, and back"),
    ("S", "stop the training, after the batch at hand (asks first)"),
    ("p", "pause the training (asks first), or let it go on"),
    ("c", "write a checkpoint"),
    ("q", "quit, or go back to the table of all runs; the training goes on"),
    ("Escape", "go back to the table of all runs, where a run was chosen there"),
    ("Ctrl-L", "draw everything anew"),
    ("?", "this page, and back"),
)


@dataclass
class Shown:
    """What of a view is shown."""

    page: str = "run"
    """``run``, ``ranks``, ``log`` or ``help``."""
    quantity: str | None = None
    """By what ranks are shown; ``None`` for what tells stragglers apart."""
    metric: str | None = None
    """The metric that is chosen: a chart shows it."""
    kept: tuple[str, ...] = ()
    """Further metrics that have charts, as far as there is room."""
    find: str = ""
    """What the names of metrics have to contain, in any case."""
    is_typing: bool = False
    """Whether :attr:`find` is being typed."""
    smoothing: float = 0.0
    axis: Axis = "batch"
    logarithmic: bool = False
    scroll: int = 0
    """Of the log alone: how many lines it is above its end. Of the help: how many lines are above the first."""
    colors: bool = True
    commands: bool = False
    """Whether the training can be commanded."""
    is_replay: bool = False
    leaving: tuple[str, ...] = ("q quit",)
    """What the keys that lead away do."""
    message: str | None = None
    """A question, or what became of a command, in the place of the keys."""


def frame(view: RunView, shown: Shown, width: int, height: int) -> "list[Text]":
    """The lines of the whole terminal, none of them wider than it."""
    lines = [_header(view, shown, width), _progress(view, width)]
    room = max(height - len(lines) - 1, 0)
    if shown.page == "help":
        body = _help(width, shown.scroll, room)
    elif shown.page == "ranks":
        body = _all_ranks(view, shown, width, room)
    elif shown.page == "log":
        body = [rule("log", width), *_whole_log(folded(view.log()), shown.scroll, width, room - 1)]
    elif width >= _WIDE:
        right = int(width * _RIGHT_SHARE)
        body = _beside(_left(view, shown, width - right - _GAP, room), _right(view, shown, right, room), width - right)
    else:
        body = _stacked(view, shown, width, room)
    body = body[:room] + [text_line()] * (room - len(body))
    lines = [*lines, *body, _footer(view, shown, width)][:height]
    for line in lines:
        line.truncate(width, overflow="crop")
    return lines


def log_rows(height: int) -> int:
    """How many lines of the log its own page shows."""
    return max(height - 4, 1)


def log_length(entries: Sequence[LogEntry], width: int) -> int:
    """How many lines the log has on its own page."""
    return sum(len(_parts(entry, width)) for entry in folded(entries))


def metric_groups(view: RunView, shown: Shown) -> dict[str, list[str]]:
    """The metrics that are looked for, by group, in the order in which they are shown."""
    text = shown.find.lower()
    found = {group: [name for name in names if text in name.lower()] for group, names in view.groups().items()}
    return {group: names for group, names in found.items() if names}


def _header(view: RunView, shown: Shown, width: int) -> "Text":
    status = view.status
    if status == "live" and shown.is_replay:
        status = "replay"
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
        rest = "no end is known" if progress.max_duration is None else f"of {progress.max_duration}"
        return text_line(f"{progress.sample} samples, {rest}", "dim")
    goes_on = view.status in ("live", "paused") and progress.seconds_left
    left = f"  {duration(progress.seconds_left)} left" if goes_on else ""
    # The state's line has no room for it beside a reason.
    batch = f" batch {progress.batch}," if view.error or view.reason else ""
    told = f"{batch} {progress.fraction:4.0%} of {progress.max_duration}{left}"
    bar = max(width - len(told), 0)
    full = int(progress.fraction * bar)
    line = text_line()
    line.append("━" * full, "green")
    line.append("─" * (bar - full), "dim")
    line.append(told)
    return line


def _stacked(view: RunView, shown: Shown, width: int, room: int) -> "list[Text]":
    """Everything in one column: what is worth the most stays when there is little room."""
    below = _phases(view, shown, width) + _ranks(view, shown, width, 5)
    if room < len(below) + _LEAST_ABOVE:
        below = below[:_PHASE_LINES] if room >= _PHASE_LINES + _LEAST_ABOVE else []
    entries = folded(view.log())
    # A chart need not become any higher than it is in a usual terminal; a log is the better the more it shows.
    log_room = min(max((room - len(below)) // 4, room - len(below) - _ENOUGH_ABOVE), len(entries))
    log = [rule("log", width), *_log(entries, width, log_room)] if log_room > 0 else []
    return [*_left(view, shown, width, room - len(below) - len(log)), *below, *log]


def _left(view: RunView, shown: Shown, width: int, room: int) -> "list[Text]":
    """The chart, and below it as many metrics as there is room for, but at least as much as the chart has."""
    groups = metric_groups(view, shown)
    names = [name for group in groups.values() for name in group]
    if not names:
        empty = f"no metric is called '{shown.find}'" if shown.find else "nothing has been logged yet"
        return [rule("metrics", width), text_line(empty, "dim"), *(text_line() for _ in range(room - 2))]
    chosen = shown.metric if shown.metric in names else names[0]
    rows = len(names) + len(groups) + bool(shown.find)
    chart_height = max(room - rows, room // 2) if room >= _LEAST_WITH_CHART else 0
    lines = _charts(view, chosen, shown, width, chart_height) if chart_height else []
    if shown.find and room - len(lines) > 1:
        found = f"{len(names)} of {len(view.names())} metrics with '{shown.find}': Escape shows all"
        lines.append(text_line(found, "yellow"))
    lines += _metrics(view, groups, chosen, shown.kept, width, room - len(lines))
    return lines + [text_line()] * (room - len(lines))


def _charts(view: RunView, chosen: str, shown: Shown, width: int, height: int) -> "list[Text]":
    """The chosen metric's chart below those that are kept, as many as there is room for."""
    known = set(view.names())
    kept = [name for name in shown.kept if name in known and name != chosen]
    kept = kept[: max(height // _LEAST_CHART - 1, 0)]
    lines: list[Text] = []
    for place, name in enumerate([*kept, chosen]):
        # What does not divide evenly goes to the chosen one, which comes last.
        left = len(kept) + 1 - place
        lines += _chart(view, name, shown, width, (height - len(lines)) // left)
    return lines


def _right(view: RunView, shown: Shown, width: int, room: int) -> "list[Text]":
    above = _phases(view, shown, width) + _ranks(view, shown, width, max(room // 3, 3) + 1)
    return [*above, rule("log", width), *_log(folded(view.log()), width, room - len(above) - 1)]


def _chart(view: RunView, name: str, shown: Shown, width: int, height: int) -> "list[Text]":
    series = view.series(name)
    points = series.points(shown.axis, width=2 * width)
    smooths = is_smoothed(name, points, shown.smoothing)
    if smooths:
        points = smoothed(points, shown.smoothing)
    title = f"{view.metric_names().short(name)}  {number(series.last)}"
    if points.not_finite:
        x, value = points.not_finite[0]
        # A batch's own values stand at the number of batches that were trained before it.
        place = "step" if shown.axis == "batch" else shown.axis
        title += f"  {number(value)} at {place} {number(x)}"
    scale = f"over {shown.axis}"
    logarithmic = shown.logarithmic and has_logarithm(points)
    if smooths:
        scale = f"smoothed {shown.smoothing:g} {scale}"
    if shown.logarithmic:
        scale = f"log scale {scale}" if logarithmic else f"no logarithm of 0 and less, {scale}"
    return [rule(title, width, scale), *chart(points, width, height - 1, logarithmic)]


def _metrics(
    view: RunView, groups: dict[str, list[str]], chosen: str, kept: Sequence[str], width: int, room: int
) -> "list[Text]":
    """A line for each metric, under a line for its group; those around the chosen one. Where there are more above or
    below, a line says how many."""
    from rich.text import Text

    short = view.metric_names().short
    rows: list[tuple[str, str | None]] = []
    for group, names in groups.items():
        rows.append((group or "metrics", None))
        rows += [(short(name), name) for name in names]
    place = next(place for place, (_, name) in enumerate(rows) if name == chosen)
    if room == _LEAST_WITH_MORE - 1 and len(rows) > room:
        # No room for both directions.
        others = rows[:place] + rows[place + 1 :]
        return [*_metrics(view, groups, chosen, kept, width, 1), _more(others, "↑ ↓")]
    begin = min(max(place - room // 2, 0), max(len(rows) - room, 0))
    if begin == place and rows[place - 1][1] is None and room > 1:
        begin = max(place - 1, 0)
    label_width = min(max(len(label) for label, name in rows if name) + 1, max(width // 3, 8))
    curve = width - label_width - _VALUE_WIDTH - 4
    lines = []
    above, rest = rows[:begin], rows[begin + max(room, 0) :]
    for label, name in rows[begin : begin + max(room, 0)]:
        if name is None:
            lines.append(text_line(label, "dim"))
            continue
        series, line = view.series(name), Text()
        is_chosen = name == chosen
        line.append(f"{'•' if name in kept else ' '}{'▸' if is_chosen else ' '}", "bold cyan")
        line.append(fitted(label, label_width), "bold" if is_chosen else "")
        value = series.last
        odd = value is not None and value - value != 0
        line.append(f"{number(value):>{_VALUE_WIDTH}}  ", "bold red" if odd else "bold" if is_chosen else "")
        if curve >= _LEAST_SPARKLINE:
            line.append_text(sparkline(series.points(width=curve), curve))
        lines.append(line)
    if room >= _LEAST_WITH_MORE:
        # The line in whose place it stands counts too.
        if above:
            lines[0] = _more(rows[: begin + 1], "above: ↑")
        if rest:
            lines[-1] = _more(rows[begin + room - 1 :], "below: ↓")
    return lines


def _more(rows: "Sequence[tuple[str, str | None]]", where: str) -> "Text":
    count = sum(name is not None for _, name in rows)
    return text_line(f"… {count} more {where}, / finds", "dim")


def _phases(view: RunView, shown: Shown, width: int) -> "list[Text]":
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
    parts = [(name, shares[name], style) for name, style in zip(PHASES, _PHASE_STYLES, strict=True)]
    # Without colours the letters tell them apart.
    bar = stacked_bar([("█" if shown.colors else _LETTERS[name], share, style) for name, share, style in parts], width)
    legend = text_line()
    for name, share, style in sorted(parts, key=lambda part: -part[1]):
        if share >= 0.001 and len(legend) + len(name) + 7 <= width:
            legend.append("■ " if shown.colors else f"{_LETTERS[name]} ", style)
            legend.append(f"{name} {share:.0%}  ")
    return [rule(f"step  {seconds_text(seconds)}{device}", width, cost), bar, legend]


def _ranks(view: RunView, shown: Shown, width: int, room: int) -> "list[Text]":
    return rank_lines(view.rank_map(), shown.quantity, width, room) if view.rank_count > 1 else []


def _all_ranks(view: RunView, shown: Shown, width: int, room: int) -> "list[Text]":
    """The ranks alone, with as many by name as there is room for."""
    if view.rank_count < 2:
        return [rule("ranks", width), text_line("there is one rank, with nothing to compare it with", "dim")]
    return rank_lines(view.rank_map(), shown.quantity, width, room, with_map=True)


def _log(entries: Sequence[LogEntry], width: int, room: int) -> "list[Text]":
    """The last entries, a line for each."""
    lines = [_log_line(entry, one_line(entry.text), True) for entry in entries[-room:]] if room > 0 else []
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def _whole_log(entries: Sequence[LogEntry], scroll: int, width: int, room: int) -> "list[Text]":
    """Lines of the log that are so far above its end; what is too long for one goes on in the next."""
    rows: list[tuple[LogEntry, str, bool]] = []
    for entry in reversed(entries):
        if len(rows) >= scroll + room:
            break
        parts = _parts(entry, width)
        rows += [(entry, part, place == 0) for place, part in reversed(list(enumerate(parts)))]
    rows.reverse()
    end = max(len(rows) - scroll, min(room, len(rows)))
    return [_log_line(*row) for row in rows[max(end - max(room, 0), 0) : end]]


def _parts(entry: LogEntry, width: int) -> list[str]:
    """The text of an entry in parts that fit behind the time."""
    from rich.cells import chop_cells

    return chop_cells(one_line(entry.text), max(width - _TIME_WIDTH, _LEAST_LOG_WIDTH)) or [""]


def _log_line(entry: LogEntry, text: str, is_first: bool) -> "Text":
    line = text_line()
    line.append(time.strftime("%H:%M:%S ", time.localtime(entry.time)) if is_first else " " * _TIME_WIDTH, "dim")
    line.append(text, _KIND_STYLES.get(entry.kind, ""))
    return line


def _help(width: int, scroll: int, room: int) -> "list[Text]":
    lines = []
    for keys, meaning in HELP:
        line = text_line()
        line.append(f" {keys:<11}", "bold")
        line.append(meaning)
        lines.append(line)
    lines += [text_line(), text_line("! in a curve: a value there is NaN or infinite", "dim")]
    lines += [text_line("in a map of ranks: x silent, ? behind the others, · no value; red: waited for", "dim")]
    most = max(len(lines) - max(room - 1, 0), 0)
    first = min(scroll, most)
    more = f"{most - first} more lines below: ↓" if most > first else "" if not most else "↑"
    return [rule("keys", width, more), *lines[first:]]


def _footer(view: RunView, shown: Shown, width: int) -> "Text":
    if shown.is_typing or shown.message is not None:
        asked = f"find: {shown.find}▏ Enter keeps it, Escape shows all" if shown.is_typing else shown.message
        message = text_line(asked or "", "reverse")
        message.truncate(width, overflow="ellipsis")
        return message
    keys = [*shown.leaving, "? help", "↑↓ metric", "/ find", "e log", *(["r ranks"] if view.rank_count > 1 else [])]
    if shown.commands and view.status in ("waiting", "live", "paused"):
        keys += ["S stop", "p pause", "c checkpoint"]
    return key_line(keys, width)


def _beside(left: "list[Text]", right: "list[Text]", column: int) -> "list[Text]":
    lines = []
    for place in range(max(len(left), len(right))):
        line = left[place] if place < len(left) else text_line()
        line.truncate(column - _GAP, overflow="crop")
        line.append(" " * (column - line.cell_len))
        lines.append(line.append_text(right[place]) if place < len(right) else line)
    return lines
