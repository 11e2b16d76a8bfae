"""The cards at the top of the page: how each run stands, and the buttons that command it."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from offloop.bus.errors import OffloopError
from offloop.bus.types.time import Time, TimeUnit
from offloop.consumers.dashboard.view.phases import PublishingView
from offloop.consumers.dashboard.view.progress import ProgressView, duration
from offloop.consumers.dashboard.view.tap import MonitoredRun
from offloop.consumers.dashboard.web.access import Role
from offloop.consumers.dashboard.web.dialogs import is_sure
from offloop.consumers.dashboard.web.run_alerts import alerts_text
from offloop.consumers.dashboard.web.run_folder import RunFolder

if TYPE_CHECKING:
    from nicegui.elements.button import Button
    from nicegui.elements.html import Html
    from nicegui.elements.label import Label


COMMANDS = ("pause", "resume", "checkpoint", "stop")

_MOST_LARGE = 6
"""More runs are a list, of a line each."""

_ICONS = {"pause": "pause", "resume": "play_arrow", "checkpoint": "save", "stop": "stop"}


async def send_for(role: Role, run: MonitoredRun, command: str) -> str:
    """Sends a command for somebody with that role; returns what became of it, for people."""
    if role is not Role.COMMAND:
        return f"'{command}' was not sent: this link is for viewing only"
    try:
        return str(await asyncio.to_thread(run.send, command))
    except OffloopError as error:
        return f"'{command}' was not sent: {error}"


def facts(progress: ProgressView, publishing: PublishingView, status: str) -> str:
    """How far a run is and what watching it costs, in one line for people."""
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


class RunCards:
    """A card for each run. ``hidden`` are the numbers of those whose lines are not shown."""

    def __init__(self, runs: Sequence[MonitoredRun], role: Role, changed: Callable[[], Awaitable[None]]) -> None:
        from nicegui import ui

        self._runs = runs
        self._role = role
        self._changed = changed
        self.hidden: set[int] = set()
        self.hidden_version = 0
        self._cards: list[_Card] = []
        self._box = ui.element("section").classes("runs").props('aria-label="Runs"')
        self._outcome = ui.label("").classes("sr-only").props('role="status" aria-live="polite"')
        self._title = ""
        self._is_list = False

    def update(
        self,
        runs: list[MonitoredRun],
        labels: list[str],
        looks: Sequence[tuple[str, int]],
        folders: Mapping[Path, RunFolder] = MappingProxyType({}),
    ) -> None:
        """Brings every card up to date, and makes those that are new. ``looks`` are the colour and the kind of line of
        each run, ``folders`` is what was found in directories."""
        from nicegui import ui

        with self._box:
            for number in range(len(self._cards), len(runs)):
                self._cards.append(_Card(number, runs[number], self._role, self._toggle, self._send))
        if len(runs) > _MOST_LARGE and not self._is_list:
            self._is_list = True
            self._box.classes("many")
        for card, label, look in zip(self._cards, labels, looks, strict=True):
            card.update(label, look, len(runs) > 1, folders)
        # What happens to a run is told to whoever cannot see the card.
        title = f"{runs[0].view.status}: {labels[0]}" if len(runs) == 1 else f"{len(runs)} runs"
        if title != self._title:
            self._title = title
            self._outcome.set_text(title)
            ui.page_title(f"{title} · offloop")

    async def _toggle(self, number: int) -> None:
        self.hidden ^= {number}
        self.hidden_version += 1
        self._cards[number].show_hidden(number in self.hidden)
        await self._changed()

    async def _send(self, number: int, command: str) -> str:
        run = self._runs[number]
        if command == "stop":
            with self._box:
                question = [f"Stop the training {run.view.run_name} after the batch at hand?"]
                if not await is_sure(question, "Stop", "Keep training"):
                    return ""
        answer = await send_for(self._role, run, command)
        self._outcome.set_text(answer)
        return answer


class _Card:
    def __init__(
        self,
        number: int,
        run: MonitoredRun,
        role: Role,
        toggle: Callable[[int], Awaitable[None]],
        send: Callable[[int, str], Awaitable[str]],
    ) -> None:
        from nicegui import ui

        self._number, self._run, self._send, self._toggle = number, run, send, toggle
        self._status = ""
        self._buttons: dict[str, Button] = {}
        self._label = ""
        self._look: tuple[str, int] | None = None
        with ui.element("article").classes("run").props(f'data-run="{number}"') as self._card:
            with ui.element("div").classes("run-head"):
                self._dot = ui.element("button").classes("run-dot")
                self._dot.on("click", self._on_dot)
                self._name: Label = ui.label().classes("run-name").props('role="heading" aria-level="2"')
                self._chip: Label = ui.label().classes("status")
                self._alerts: Label = ui.label().classes("pill mark")
                self._alerts.set_visibility(False)
            self._bar: Html = ui.html("<div></div>", sanitize=False).classes("bar")
            self._bar.props('role="progressbar" aria-valuemin="0" aria-valuemax="100"')
            self._facts: Label = ui.label().classes("run-facts")
            self._problem: Label = ui.label().classes("run-problem")
            if role is Role.COMMAND:
                with ui.element("div").classes("run-buttons").props('role="group"') as self._row:
                    for command in COMMANDS:
                        self._buttons[command] = self._button(command)
            self._answer: Label = ui.label().classes("run-answer")
            self._answer.set_visibility(False)

    def update(self, label: str, look: tuple[str, int], many: bool, folders: Mapping[Path, RunFolder]) -> None:
        """Shows how the run stands, and the colour and kind of its line."""
        view = self._run.view
        alerts, is_firing = alerts_text(self._run, folders)
        self._alerts.set_text(alerts)
        self._alerts.set_visibility(bool(alerts))
        self._alerts.classes(**{"add" if is_firing else "remove": "firing"})
        status, progress = view.status, view.progress()
        if label != self._label:
            self._label = label
            self._name.set_text(label)
            self._card.props["aria-label"] = f"Run {label}"
            self._dot.props["aria-label"] = f"Lines of {label}"
            self._dot.props["aria-pressed"] = "true"
        self._dot.set_visibility(many)
        if look != self._look:
            self._look = look
            self._dot.style(f"--swatch: {look[0]}").classes(replace=f"run-dot dash-{look[1]}")
        if status != self._status:
            self._chip.set_text(status)
            self._chip.classes(remove=f"status-{self._status}", add=f"status-{status}")
            self._status = status
        self._facts.set_text(facts(progress, view.publishing(), status))
        self._problem.set_text(self._run.problem or view.error or "")
        self._problem.set_visibility(bool(self._run.problem or view.error))
        percent = None if progress.fraction is None else round(100 * progress.fraction, 1)
        self._bar.set_visibility(percent is not None)
        if percent is not None and self._bar.props.get("aria-valuenow") != percent:
            self._bar.props["aria-valuenow"] = percent
            self._bar.props["aria-label"] = f"Progress of {label}"
            self._bar.set_content(f'<div style="width: {percent}%"></div>')
        can_command = self._run.can_command
        for command, button in self._buttons.items():
            button.set_visibility(can_command and command != ("resume" if status == "live" else "pause"))

    def show_hidden(self, is_hidden: bool) -> None:
        """Shows whether the run's lines are drawn."""
        self._dot.props["aria-pressed"] = str(not is_hidden).lower()
        self._dot.style(f"opacity: {0.25 if is_hidden else 1}")

    def _button(self, command: str) -> "Button":
        from nicegui import ui

        async def on_click() -> None:
            await self._command(command)

        button = ui.button(command, icon=_ICONS[command], on_click=on_click)
        color: dict[str, Any] = {"stop": "negative"}
        return button.props(f'outline dense no-caps padding="2px 12px" color="{color.get(command, "primary")}"')

    async def _on_dot(self) -> None:
        await self._toggle(self._number)

    async def _command(self, command: str) -> None:
        self._buttons[command].disable()
        try:
            answer = await self._send(self._number, command)
            if answer:
                self._answer.set_text(answer)
                self._answer.set_visibility(True)
        finally:
            self._buttons[command].enable()
