"""The pages of one server, whichever command it is that serves them."""

import contextlib
import functools
from collections.abc import Callable, Sequence

from offloop.bus.errors import OffloopError
from offloop.bus.index.annotations import read_annotations
from offloop.bus.printing import one_line
from offloop.consumers.dashboard.view.tap import MonitoredRun
from offloop.consumers.dashboard.web.access import Listening
from offloop.consumers.dashboard.web.all_runs import AllRuns
from offloop.consumers.dashboard.web.comparison import Comparison
from offloop.consumers.dashboard.web.follow import ChosenRuns
from offloop.consumers.dashboard.web.home import MOST_COMPARED, HomePage
from offloop.consumers.dashboard.web.page import Page
from offloop.consumers.dashboard.web.places import Places
from offloop.consumers.dashboard.web.server import DashboardServer, Opening, PageBuilder
from offloop.consumers.runner.places import Place

ALL_RUNS = "/all"
"""The path of the table of all runs."""

CHOSEN_RUNS = "/runs"
"""The path of the page of the runs that its address names: ``?run=A&run=B``."""

_LONGEST = 200


class Site(DashboardServer):
    """Serves the table of all runs of some places, the page of those that somebody chooses there, and what begins at
    ``/``: the page of ``runs``, or else the table. What nobody looks at costs nothing.

    Raises:
        ConfigurationError: it cannot listen like that, or the packages of the dashboard are not installed.
    """

    def __init__(
        self,
        listening: Listening,
        places: Sequence[Place] = (),
        runs: Sequence[MonitoredRun] | None = None,
        every: int = 10,
    ) -> None:
        pages: dict[str, PageBuilder] = {}
        super().__init__(pages, listening)
        self._home = ""
        self._stops: list[Callable[[], None]] = []
        if places:
            known = Places(places)
            all_runs, chosen = AllRuns(known), ChosenRuns(known, every)
            self._home, self._stops = ALL_RUNS, [chosen.stop, all_runs.stop]
            pages["/"] = pages[ALL_RUNS] = lambda opening: HomePage(all_runs, opening).build()
            pages[CHOSEN_RUNS] = lambda opening: self._build_chosen(chosen, known, opening)
        if runs is not None:
            pages["/"] = lambda opening: self._build_runs(runs, opening)

    def stop(self) -> None:
        """Ends it; browsers that are there see that it is gone."""
        super().stop()
        for stop in self._stops:
            stop()

    def _build_chosen(self, chosen: ChosenRuns, places: Places, opening: Opening) -> None:
        from nicegui import ui

        asked = list(dict.fromkeys(value for name, value in opening.asked if name == "run"))
        comparison = Comparison.from_query(opening.asked)
        names = asked[:MOST_COMPARED]
        if comparison.baseline is not None and comparison.baseline not in names:
            names = [*names[: MOST_COMPARED - 1], comparison.baseline]
        known = [name for name in names if places.has(name)]
        runs, leave = chosen.open(known)
        ui.context.client.on_delete(leave)
        problems = [f"There is no run {one_line(name[:_LONGEST])!r} any more." for name in names if name not in known]
        if len(asked) > MOST_COMPARED:
            problems = [f"The first {MOST_COMPARED} of {len(asked):,} runs are shown."]
        # NATS has none to give, and may be slow.
        tags = {places.split(key)[1]: key for key in known if not places.is_elsewhere(key)}

        @functools.cache
        def tags_of(run: str) -> Sequence[str]:
            with contextlib.suppress(OffloopError, KeyError):
                info = places.find(tags[run]).info
                return () if info is None else read_annotations(info.path).tags
            return ()

        self._build_runs(runs, opening, problems, comparison, tags_of)

    def _build_runs(
        self,
        runs: Sequence[MonitoredRun],
        opening: Opening,
        problems: Sequence[str] = (),
        comparison: Comparison | None = None,
        tags_of: Callable[[str], Sequence[str]] = lambda run: (),
    ) -> None:
        comparison = comparison or Comparison.from_query(opening.asked)
        Page(runs, opening, self._home, problems, comparison, tags_of).build()
