"""The panel of images: of each name a slider over the steps, with all runs side by side."""

from collections.abc import Sequence
from typing import Any

from offloop.bus.printing import one_line
from offloop.consumers.dashboard.view.images import OF_ONE_STEP
from offloop.consumers.dashboard.view.tap import MonitoredRun
from offloop.consumers.dashboard.web.colors import look_of
from offloop.consumers.dashboard.web.content import address_of
from offloop.consumers.dashboard.web.frames import element_of
from offloop.consumers.dashboard.web.panel import Panel


class ImagesPanel(Panel):
    """The images of runs."""

    def __init__(self) -> None:
        super().__init__("Images", "image", is_open=True)
        with self.box:
            self._element = element_of("images")
        self._shown: list[dict[str, Any]] = []

    def update(self, runs: Sequence[MonitoredRun], labels: Sequence[str]) -> None:
        """Shows what has come."""
        found = galleries_of(runs, labels)
        self.show(bool(found))
        if self.is_open and found != self._shown:
            self._shown = found
            self._element.props["galleries"] = found
            self._element.update()


def galleries_of(runs: Sequence[MonitoredRun], labels: Sequence[str]) -> list[dict[str, Any]]:
    """Of each name of images, the runs that have some, with their steps and how many images were logged there."""
    galleries: dict[str, dict[str, Any]] = {}
    for number, (run, label) in enumerate(zip(runs, labels, strict=True)):
        for name, steps in run.view.images.steps().items():
            gallery = galleries.setdefault(
                name, {"name": name, "title": one_line(name), "most": OF_ONE_STEP, "runs": []}
            )
            gallery["runs"].append(
                {
                    "label": one_line(label),
                    "color": look_of(number, len(runs))[0],
                    "address": address_of(run, "image"),
                    "steps": [step for step, _ in steps],
                    "counts": [count for _, count in steps],
                }
            )
    return list(galleries.values())
