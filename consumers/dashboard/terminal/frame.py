"""The terminal dashboard as lines of text: drawn from a view, for any size of a terminal."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offloop.bus.printing import one_line
from offloop.consumers.dashboard.terminal.draw import chart, has_logarithm, number, sparkline, stacked_bar
from offloop.consumers.dashboard.terminal.lines import fitted, key_help, key_line, rule, spread, text_line
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
"""The sign and the style of each status of a run."""

_PHASE_STYLES = ("yellow", "blue", "cyan", "magenta", "green", "red", "white", "bright_black")
_LETTERS = {name: name[0] if name != "other" else "." for name in PHASES}
_KIND_STYLES = {"command": "bold yellow", "end": "bold", "text": "cyan", "output": "dim"}

_HELP = (
    ("↑ ↓  k j", "choose a metric, which the chart shows; in the log and here: scroll"),
    ("PgUp PgDn", "a page up or down"),
    ("Home End", "the first or the last"),
    ("/", "find metrics by name; Escape shows all again"),
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
    ("", "! in a curve: a value there is NaN or infinite"),
    ("", "in a map of ranks: x silent, ? behind the others, · no value; red: waited for"),
)


@dataclass
class Shown:
    """The part of a view that is shown."""

    page: str = "run"
    """``run``, ``ranks``, ``log`` or ``help``."""
    quantity: str | None = None
    """Quantity of the map of ranks; ``None`` for the one that tells stragglers apart."""
    metric: str | None = None
    """The metric of the chart; ``None`` for the first one."""
    names: list[str] = field(default_factory=list)
    """The found metrics in their order, as they were drawn last."""
    find: str = ""
    """Part of the names of the shown metrics, in any case."""
    is_typing: bool = False
    """:attr:`find` is being typed."""
    axis: Axis = "batch"
    logarithmic: bool = False
    scroll: int = 0
    """Lines below the shown part of the log, or above that of the help."""
    commands: bool = True
    """The training can be commanded."""
    leaving: tuple[str, ...] = ("q quit",)
    """The keys that lead away, with what they do."""
    message: str | None = None
    """A question, or the result of a command, in the place of the keys."""

    @property
    def chosen(self) -> str:
        """The metric of the chart. There has to be one."""
        return self.metric if self.metric in self.names else self.names[0]


def frame(view: RunView, shown: Shown, width: int, height: int) -> "list[Text]":
    """The lines of the whole terminal, none of them wider than it."""
    lines = [_header(view, shown, width), _progress(view, width)]
    room = max(height - len(lines) - 1, 0)
    if shown.page == "help":
        body = _help(shown, width, room)
    elif shown.page == "ranks":
        body = _all_ranks(view, shown, width, room)
    elif shown.page == "log":
        body = [rule("log", width), *_whole_log(view, shown, width, room - 1)]
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
        rest = "no end is known" if progress.max_duration is None else f"of {progress.max_duration}"
        return text_line(f"{progress.sample} samples, {rest}", "dim")
    goes_on = view.status in ("live", "paused") and progress.seconds_left
    left = f"  {duration(progress.seconds_left)} left" if goes_on else ""
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


def _stacked(view: RunView, shown: Shown, width: int, room: int) -> "list[Text]":
    """Everything in one column: the most important parts stay when there is little room."""
    below = _phases(view, width) + _ranks(view, shown, width, 5)
    if room < len(below) + _LEAST_ABOVE:
        below = below[:_PHASE_LINES] if room >= _PHASE_LINES + _LEAST_ABOVE else []
    entries = folded(view.log())
    # A chart need not become any higher than it is in a usual terminal; a log is the better the more it shows.
    log_room = min(max((room - len(below)) // 4, room - len(below) - _ENOUGH_ABOVE), len(entries))
    log = [rule("log", width), *_log(entries, width, log_room)] if log_room > 0 else []
    return [*_left(view, shown, width, room - len(below) - len(log)), *below, *log]


def _left(view: RunView, shown: Shown, width: int, room: int) -> "list[Text]":
    """The chart, and below it the metrics, with at most half of the room."""
    text = shown.find.lower()
    groups = {group: [name for name in names if text in name.lower()] for group, names in view.groups().items()}
    groups = {group: names for group, names in groups.items() if names}
    shown.names = [name for names in groups.values() for name in names]
    if not shown.names:
        empty = f"no metric is called '{shown.find}'" if shown.find else "nothing has been logged yet"
        return [rule("metrics", width), text_line(empty, "dim"), *(text_line() for _ in range(room - 2))]
    rows = len(shown.names) + len(groups) + bool(shown.find)
    lines = _chart(view, shown, width, max(room - rows, room // 2)) if room >= _LEAST_WITH_CHART else []
    if shown.find and room - len(lines) > 1:
        found = f"{len(shown.names)} of {len(view.names())} metrics with '{shown.find}': Escape shows all"
        lines.append(text_line(found, "yellow"))
    lines += _metrics(view, shown, groups, width, room - len(lines))
    return lines + [text_line()] * (room - len(lines))


def _right(view: RunView, shown: Shown, width: int, room: int) -> "list[Text]":
    above = _phases(view, width) + _ranks(view, shown, width, max(room // 3, 3) + 1)
    return [*above, rule("log", width), *_log(folded(view.log()), width, room - len(above) - 1)]


def _chart(view: RunView, shown: Shown, width: int, height: int) -> "list[Text]":
    series = view.series(shown.chosen)
    points = series.points(shown.axis, width=2 * width)
    title = f"{view.metric_names().short(shown.chosen)}  {number(series.last)}"
    if points.not_finite:
        x, value = points.not_finite[0]
        # A batch's own values stand at the number of batches that were trained before it.
        place = "step" if shown.axis == "batch" else shown.axis
        title += f"  {number(value)} at {place} {number(x)}"
    scale = f"over {shown.axis}"
    logarithmic = shown.logarithmic and has_logarithm(points)
    if shown.logarithmic:
        scale = f"log scale {scale}" if logarithmic else f"no logarithm of 0 and less, {scale}"
    return [rule(title, width, scale), *chart(points, width, height - 1, logarithmic)]


def _metrics(view: RunView, shown: Shown, groups: dict[str, list[str]], width: int, room: int) -> "list[Text]":
    """A line for each metric below one for its group: those around the chosen one, and how many there are."""
    short = view.metric_names().short
    rows: list[tuple[str, str | None]] = []
    for group, names in groups.items():
        rows += [(group or "metrics", None), *((short(name), name) for name in names)]
    more = []
    if len(rows) > room > 1:
        room -= 1
        more = [text_line(f"… {len(shown.names)} metrics: ↑ ↓, / finds", "dim")]
    place = next(place for place, (_, name) in enumerate(rows) if name == shown.chosen)
    begin = min(max(place - room // 2, 0), max(len(rows) - room, 0))
    label_width = min(max(len(label) for label, name in rows if name) + 1, max(width // 3, 8))
    curve = width - label_width - _VALUE_WIDTH - 4
    lines = []
    for label, name in rows[begin : begin + max(room, 0)]:
        if name is None:
            lines.append(text_line(label, "dim"))
            continue
        series, is_chosen = view.series(name), name == shown.chosen
        value, style = series.last, "bold" if is_chosen else ""
        is_finite = value is None or value - value == 0
        line = text_line()
        line.append(" ▸" if is_chosen else "  ", "bold cyan")
        line.append(fitted(label, label_width), style)
        line.append(f"{number(value):>{_VALUE_WIDTH}}  ", style if is_finite else "bold red")
        if curve >= _LEAST_SPARKLINE:
            line.append_text(sparkline(series.points(width=curve), curve))
        lines.append(line)
    return lines + more


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
    return [rule(f"step  {seconds_text(seconds)}{device}", width, cost), bar, legend]


def _ranks(view: RunView, shown: Shown, width: int, room: int) -> "list[Text]":
    return rank_lines(view.rank_map(), shown.quantity, width, room) if view.rank_count > 1 else []


def _all_ranks(view: RunView, shown: Shown, width: int, room: int) -> "list[Text]":
    if view.rank_count < 2:
        return [rule("ranks", width), text_line("there is one rank, with nothing to compare it with", "dim")]
    return rank_lines(view.rank_map(), shown.quantity, width, room, with_map=True)


def _log(entries: Sequence[LogEntry], width: int, room: int) -> "list[Text]":
    """The last entries, a line for each."""
    lines = [_log_line(entry, one_line(entry.text), True) for entry in entries[-room:]] if room > 0 else []
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def _whole_log(view: RunView, shown: Shown, width: int, room: int) -> "list[Text]":
    """The entries in as many lines as they need, up to ``shown.scroll`` lines above the end of the log."""
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


def _help(shown: Shown, width: int, room: int) -> "list[Text]":
    lines = key_help(_HELP)
    most = max(len(lines) - max(room - 1, 0), 0)
    shown.scroll = min(shown.scroll, most)
    more = f"{most - shown.scroll} more lines below: ↓" if most > shown.scroll else ""
    return [rule("keys", width, more), *lines[shown.scroll :]]


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
