"""How each run of a page stands, and the commands that are sent from there."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offloop.bus.errors import OffloopError
from offloop.bus.types.time import Time, TimeUnit
from offloop.consumers.dashboard.view.phases import PublishingView
from offloop.consumers.dashboard.view.progress import ProgressView, duration
from offloop.consumers.dashboard.view.tap import MonitoredRun
from offloop.consumers.dashboard.web.access import Role
from offloop.consumers.dashboard.web.dialogs import is_sure
from offloop.consumers.dashboard.web.run_alerts import alerts_text
from offloop.consumers.dashboard.web.run_folder import RunFolder

COMMANDS = ("pause", "resume", "checkpoint", "stop")


class RunCommands:
    """The commands of one browser, and the outcome of the last one of each run.

    Args:
        role: refuses all commands where it is not :attr:`Role.COMMAND`.
    """

    def __init__(self, role: Role) -> None:
        self._role = role
        self.answers: dict[int, str] = {}
        """For people, by the run's number."""

    async def send(self, number: int, run: MonitoredRun, name: str, rate: Any = None) -> None:
        """Sends a command, ``stop`` after a question, ``set`` with a learning rate; waits for its outcome."""
        if name == "stop":
            question = [f"Stop the training {run.view.run_name} after the batch at hand?"]
            if not await is_sure(question, "Stop", "Keep training"):
                return
        try:
            arguments = ("lr", float(rate)) if name == "set" else ()
        except (TypeError, ValueError):
            self.answers[number] = f"invalid learning rate {rate!r}: use a number"
            return
        self.answers[number] = f"'{name}' is on its way"
        self.answers[number] = await send_for(self._role, run, name, *arguments)

    def card(self, number: int, run: MonitoredRun, label: str, folders: Mapping[Path, RunFolder]) -> dict[str, Any]:
        """How a run stands, as the browser shows it. ``folders`` is what was found in directories."""
        view = run.view
        status, progress = view.status, view.progress()
        alerts, is_firing = alerts_text(run, folders)
        may_command = self._role is Role.COMMAND and run.can_command
        unfit = "resume" if status == "live" else "pause"
        return {
            "label": label,
            "status": status,
            "alerts": alerts,
            "isFiring": is_firing,
            "percent": None if progress.fraction is None else round(100 * progress.fraction, 1),
            "facts": facts(progress, view.publishing(), status),
            "problem": run.problem or view.error or "",
            "commands": [name for name in COMMANDS if name != unfit] if may_command else [],
            "answer": self.answers.get(number, ""),
        }


async def send_for(role: Role, run: MonitoredRun, command: str, *arguments: str | float) -> str:
    """Sends a command for somebody with that role; returns the outcome, for people."""
    if role is not Role.COMMAND:
        return f"'{command}' was not sent: this link is for viewing only"
    try:
        return str(await asyncio.to_thread(run.send, command, *arguments))
    except OffloopError as error:
        return f"'{command}' was not sent: {error}"


def facts(progress: ProgressView, publishing: PublishingView, status: str) -> str:
    """The progress of a run and the cost of watching it, in one line for people."""
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
