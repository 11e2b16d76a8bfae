"""The page of the web dashboard for one browser: its elements and frames."""

import asyncio
import contextlib
import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offloop.bus.errors import OffloopError
from offloop.bus.index.annotations import read_annotations
from offloop.bus.types.time import Time, TimeUnit
from offloop.bus.types.units import duration
from offloop.consumers.api.optional import ui, ui_events
from offloop.consumers.dashboard.view.phases import PublishingView
from offloop.consumers.dashboard.view.progress import ProgressView
from offloop.consumers.dashboard.view.run_view import RunView, labels_of
from offloop.consumers.dashboard.web.access import Opening, Role
from offloop.consumers.dashboard.web.charts import Chart, Lines, Look, MarkNews, all_names, charts_of, listed_metrics
from offloop.consumers.dashboard.web.comparison import Compared, Comparison, short_name
from offloop.consumers.dashboard.web.console import escape_lines
from offloop.consumers.dashboard.web.frames import Frames, element_of, look_in
from offloop.consumers.dashboard.web.panels import Panels, alerts_text
from offloop.consumers.dashboard.web.top import NEGATIVE, PRIMARY, PageTop, is_sure

FRAME_SECONDS = 0.5  # shortest interval between two updates of a page, however many events come

_DRAWING_SHARE = 0.15
"""Limit of the browser's time for charts: it may run on the training's machine, or draw without a GPU."""
_SLOWEST_SECONDS = 4.0
_HERE = Path(__file__).parent
_STYLES = (_HERE / "vendor" / "uPlot.css", _HERE / "page.css", _HERE / "page_panels.css", _HERE / "tables.css")
_KEYS = (
    ("x", "next x axis: batch, sample, epoch, time"),
    ("l", "log scale on and off"),
    ("s / a", "more / less smoothing"),
    ("0", "reset the zoom (also: double click)"),
    ("/", "find charts by name"),
    ("d", "dark, light, or as the system has it"),
    ("?", "this list"),
    ("+ / -", "on a chart: zoom in / out (also: draw over it, or Ctrl and the wheel)"),
    ("← / →", "on a chart that is zoomed: move"),
    ("Tab", "next button, chart or table"),
)
COMMANDS = ("pause", "resume", "checkpoint", "stop")


async def send_for(role: Role, run: RunView, command: str, *arguments: str | float) -> str:
    if role is not Role.COMMAND:
        return f"'{command}' was not sent: this link is for viewing only"
    try:
        return str(await asyncio.to_thread(run.send, command, *arguments))
    except OffloopError as error:
        return f"'{command}' was not sent: {error}"


def facts(progress: ProgressView, publishing: PublishingView, status: str) -> str:
    if status == "waiting":
        return "no event has come yet"
    if progress.batch == 0 and progress.max_duration is None and progress.elapsed == 0:
        return "no event has been read yet"
    planned = None if progress.max_duration is None else Time.from_timestring(progress.max_duration)
    unit = None if planned is None else planned.unit
    counts = {
        TimeUnit.EPOCH: progress.epoch,
        TimeUnit.BATCH: progress.batch,
        TimeUnit.SAMPLE: progress.sample,
        TimeUnit.TOKEN: progress.token,
    }
    always = (TimeUnit.EPOCH, TimeUnit.BATCH)
    parts = [
        f"{one.name.lower()} {count:,}{f' of {planned.value:,}' if planned is not None and one is unit else ''}"
        for one, count in counts.items()
        if one is unit or one in always
    ]
    parts.append(f"{duration(progress.elapsed)} elapsed")
    if progress.seconds_left is not None and status in ("live", "paused"):
        parts.append(f"about {duration(progress.seconds_left)} left")
    if planned is not None and unit not in counts:
        parts.append(f"of {planned}")
    if publishing.microseconds is not None:
        share = "" if publishing.share is None else f" ({publishing.share:.2%} of a step)"
        parts.append(f"publishing costs {publishing.microseconds:,.0f} µs a batch{share}")
    return " · ".join(parts)


def rest_after(drawing_seconds: object) -> float:
    """Return the seconds from one frame to the next, for a browser's reported drawing time.

    Invalid values count as 0: a browser may send anything."""
    if isinstance(drawing_seconds, bool) or not isinstance(drawing_seconds, int | float) or not drawing_seconds > 0:
        return FRAME_SECONDS
    # Bounded first: a number too large for a float cannot be divided.
    wanted = min(drawing_seconds, _SLOWEST_SECONDS) / _DRAWING_SHARE
    return min(max(wanted, FRAME_SECONDS), _SLOWEST_SECONDS)


class Page:
    """The page of one browser. It gets a frame when it has drawn the one before, and fewer charts if it is slow.

    A hidden browser gets no charts. The user's actions are answered at once."""

    def __init__(self, runs: Sequence[RunView], opening: Opening, home: str = "", problems: Sequence[str] = ()) -> None:
        self._runs = runs
        self._home = home  # the address of the page of all runs, if any
        self._problems = problems
        self._opening = opening
        self._comparison = Comparison.from_query(opening.asked)
        self._tags_in = functools.cache(lambda run_dir: read_annotations(run_dir).tags)  # read once for a page
        self._lines = Lines()
        self._marks = MarkNews()
        self._look = Look()
        self._answers: dict[int, str] = {}  # number of a run to the outcome of its last command
        self._seen: object = None
        self._frames = Frames(self._send_frame)
        self._rests_until = 0.0

    def build(self) -> None:
        opening = self._opening
        for style in _STYLES:
            ui.add_css(style)
        ui.html('<a class="skip" href="#charts">Skip to the charts</a>', sanitize=False)
        ui.colors(primary=PRIMARY, negative=NEGATIVE)
        self._top = top = PageTop(opening.role, opening.view_link, _KEYS)
        for problem in self._problems:
            ui.label(problem).classes("notice").props('role="alert"')
        self._board = element_of("board").props('empty="Waiting for the first values"')
        self._board.props["allRuns"] = self._home
        self._board.on("look", self._on_look)
        self._board.on("help", top.show_keys)
        self._board.on("compare", self._on_compare)
        self._board.on("command", self._on_command)
        self._dialogs = ui.element("div")
        self._panels = Panels(self._runs, compares=bool(self._home) and len(self._runs) > 1)
        ui.timer(FRAME_SECONDS, self._frames.refresh)

    def _tags_of(self, run: RunView) -> Sequence[str]:
        return () if run.run_dir is None else self._tags_in(run.run_dir)

    async def _send_frame(self) -> None:
        runs = list(self._runs)
        rests = time.monotonic() < self._rests_until  # texts do not wait for charts
        seen = (
            rests,
            # A hidden page needs only the changes of its title.
            *((self._look.hidden or run.version, run.status, run.trouble) for run in runs),
            *(self._look, self._panels.opened, self._comparison),
            tuple(self._answers.values()),
        )
        if seen == self._seen:
            return
        labels = labels_of(runs)
        groups = charts_of(runs, labels, self._look)
        charts = {chart.id: chart for _, members in groups for chart in members}
        compared = Compared(self._comparison, runs, labels, self._look.left_out, self._tags_of)
        frame = self._frames.news(
            {
                "runs": compared.lines(),
                "compare": self._compare(compared, runs, labels),
                "groups": [
                    {"title": title, "charts": [chart._asdict() for chart in members]} for title, members in groups
                ],
                "metrics": listed_metrics(all_names(runs), self._look),
                "cards": self._cards(runs, labels, compared.looks()),
            }
        )
        lines = [] if rests else self._lines.news(charts, runs, self._look, compared)
        marks = self._marks.news(runs) if self._look.marks and not self._look.hidden and not rests else []
        # Pairs: an object of a script cannot have a key __proto__, which a metric may.
        values = list(self._frames.news(self._values(charts, runs, compared), "values").items())
        self._panels.update(runs, labels, compared.baseline)
        if not (frame or lines or values or marks):
            self._seen = seen
            return
        frame |= {"lines": lines, "values": values, "marks": marks}
        began = time.monotonic()
        is_drawn, seconds = await self._frames.draw(self._board, frame)
        if lines or marks:
            # A little less, because the timer's ticks are not exact.
            self._rests_until = began + rest_after(seconds) - FRAME_SECONDS / 2
        if is_drawn:
            self._seen = seen
        else:
            self._lines.forget()
            self._marks.forget()
            self._seen = None

    def _cards(self, runs: list[RunView], labels: list[str], looks: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
        cards = []
        for number, (run, label, (color, dash)) in enumerate(zip(runs, labels, looks, strict=True)):
            status, progress = run.status, run.progress()
            alerts, is_firing = alerts_text(run, self._panels.shown.folders)
            may_command = self._opening.role is Role.COMMAND and run.can_command
            unfit = "resume" if status == "live" else "pause"
            cards.append(
                {
                    "id": number,
                    "color": color,
                    "dash": dash,
                    "label": label,
                    "status": status,
                    "alerts": alerts,
                    "isFiring": is_firing,
                    "percent": None if progress.fraction is None else round(100 * progress.fraction, 1),
                    "facts": facts(progress, run.publishing(), status),
                    "problem": run.trouble or run.error or "",
                    "traceback": escape_lines(run.traceback) if len(runs) == 1 else "",
                    "commands": [name for name in COMMANDS if name != unfit] if may_command else [],
                    "answer": self._answers.get(number, ""),
                }
            )
        return cards

    def _compare(self, compared: Compared, runs: list[RunView], labels: list[str]) -> dict[str, Any]:
        newest = {run.run_name: label for run, label in zip(runs, labels, strict=True)}
        baseline = None if compared.baseline is None else runs[compared.baseline].run_name
        return {
            "columns": [[name, short_name(name)] for name in compared.columns()],
            "baselines": list(newest.items()),
            "group": compared.column,
            "singles": compared.singles,
            "baseline": baseline,
        }

    def _values(self, charts: dict[str, Chart], runs: list[RunView], compared: Compared) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for name in self._look.visible:
            if name not in charts or charts[name].kind != "metric":
                continue
            values = {}
            for number, run in enumerate(runs):
                with contextlib.suppress(KeyError):
                    last = run.series(name).last
                    if last is not None:
                        values[number] = last
            found[name] = compared.latest(name, values, charts[name].scale)
        return found

    async def _on_compare(self, event: "ui_events.GenericEventArguments") -> None:
        self._comparison = look_in(event.args, Comparison)
        self._top.view_link = self._comparison.link(self._top.view_link)
        await self._frames.refresh()

    async def _on_command(self, event: "ui_events.GenericEventArguments") -> None:
        match event.args:
            case {"run": int(number), "name": str(name)} if 0 <= number < len(self._runs) and name in (
                *COMMANDS,
                "set",
            ):
                await self._command(number, name, event.args.get("rate"))
                await self._frames.refresh()

    async def _command(self, number: int, name: str, rate: Any) -> None:
        run = self._runs[number]
        if name == "stop":
            with self._dialogs:
                question = [f"Stop the training {run.run_name} after the batch at hand?"]
                if not await is_sure(question, "Stop", "Keep training"):
                    return
        try:
            arguments = ("lr", float(rate)) if name == "set" else ()
        except (TypeError, ValueError):
            self._answers[number] = f"invalid learning rate {rate!r}: use a number"
            return
        self._answers[number] = f"'{name}' is on its way"
        self._answers[number] = await send_for(self._opening.role, run, name, *arguments)

    async def _on_look(self, event: "ui_events.GenericEventArguments") -> None:
        self._look, self._rests_until = Look.from_browser(event.args), 0.0
        await self._frames.refresh()
