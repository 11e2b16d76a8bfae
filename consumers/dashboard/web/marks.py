"""What one browser is sent of the marks in charts: each once, and then what is new."""

from collections.abc import Sequence
from typing import Any

from offloop.consumers.dashboard.view.tap import MonitoredRun

_DECIMALS = 4


class MarkNews:
    """The marks that one browser has, and what it lacks."""

    def __init__(self) -> None:
        self._sent: dict[int, tuple[object, int]] = {}

    def forget(self) -> None:
        """Says that the browser has nothing, or that nobody knows what it has."""
        self._sent.clear()

    def news(self, runs: Sequence[MonitoredRun]) -> list[dict[str, Any]]:
        """What is new of each run, and counts as sent by that: its kind, where it stands on each axis, when it
        happened, and its text."""
        news = []
        for number, run in enumerate(runs):
            generation, last = self._sent.get(number, (None, 0))
            placed = run.view.marks(last)
            is_whole = placed.generation != generation
            if is_whole and last:
                placed = run.view.marks()
            if placed.marks:
                last = placed.marks[-1].mark.number
            elif not is_whole or generation is None:
                continue
            self._sent[number] = placed.generation, last
            told = [
                [
                    *(one.mark.kind, one.mark.batch, round(one.sample, _DECIMALS), round(one.epoch, _DECIMALS)),
                    *(round(one.seconds, _DECIMALS), round(one.mark.time, 3), one.mark.text),
                ]
                for one in placed.marks
            ]
            news.append({"r": number, "a": 0 if is_whole else 1, "m": told})
        return news
