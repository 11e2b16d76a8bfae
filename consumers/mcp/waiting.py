"""Follows runs for agents that wait: rules about metrics, stalls, and the end."""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from offloop.bus.errors import OffloopError
from offloop.bus.protocol.order import Ending
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.runs.alerts import RunAlert
from offloop.bus.subscriber.subscriber import Subscriber
from offloop.bus.types.event import Event
from offloop.consumers.api.logger import Logger, RunContext
from offloop.consumers.callbacks.alert import Alert, Notice
from offloop.consumers.callbacks.stall_monitor import StallMonitor
from offloop.consumers.runner.entries import Subscription
from offloop.consumers.runner.places import FoundRun
from offloop.consumers.runner.runner import Runner

KEEP_SECONDS = 300.0  # a run is followed so long after the last look, so that the next one continues
_MOST_FINDINGS = 1000  # of a run; the newest are kept
_AT_ONCE = 30  # findings of an answer


class _Stalls(StallMonitor):
    def __init__(self, run: "WatchedRun", seconds: float) -> None:
        super().__init__(min_seconds=seconds, stacks=False)  # read-only
        self._run = run

    def run_event(self, event: Event, state: Snapshot, logger: Logger) -> None:
        super().run_event(event, state, logger)
        # The health of a host comes from an actor, which numbers its own events.
        if state.rank == 0:
            # The rules have seen it.
            self._run.place, self._run.batch = float(state.seq), state.timestamp.values.batch
        if self._run.runner is not None and time.monotonic() > self._run.looked + KEEP_SECONDS:
            self._run.runner.stop()

    def act(self, alert: RunAlert, run: RunContext) -> None:
        self._run.add(0.5, {"status": alert.status, "rule": "stall", "text": alert.text, "time": alert.time})


class WatchedRun(threading.Thread):
    """Follows one attempt of a run from its start, and keeps what the rules find."""

    def __init__(self, run: FoundRun, rules: Sequence[str], stall_seconds: float) -> None:
        super().__init__(name="offloop-watched", daemon=True)
        self.place: float = 0.0  # number of the first rank's newest event
        self.batch = 0
        self.looked: float = time.monotonic()
        self._followed = run
        self._findings: deque[tuple[float, dict[str, Any]]] = deque(maxlen=_MOST_FINDINGS)
        self._last = 0.0  # place of the newest finding
        # The stalls last: they set the place.
        self._rules = [Alert(rules)] if rules else []
        for one in self._rules:
            one.act = self._note  # type: ignore[method-assign]
        self._stalls = _Stalls(self, stall_seconds)
        self.runner: Runner | None = None
        self.ending: Ending | None = None
        self._problem: str | None = None

    def add(self, after: float, finding: dict[str, Any]) -> None:
        """Add a finding between the newest event and the next one."""
        # Each has its own place, so that a cursor can be between those of one event.
        self._last = max(self.place + after, round(self._last + 1e-4, 4))
        self._findings.append((self._last, finding))

    def _note(self, notice: Notice, run: RunContext) -> None:
        names = ("status", "rule", "metric", "value", "epoch", "batch", "time")
        # After a stall before the event, so that a restarted server gives it the same place.
        self.add(0.75, {name: getattr(notice, name) for name in names})

    def look(self, cursor: str) -> dict[str, Any]:
        """Return findings after a cursor, how the run is, and the next cursor: the place of the last finding."""
        # The end first: then no finding is missing.
        self.looked, ending = time.monotonic(), self.ending
        attempt, _, after = cursor.partition(":")
        last = float(after) if attempt == str(self._followed.attempt) else 0.0
        found = [one for one in tuple(self._findings) if last < one[0]][:_AT_ONCE]
        if found:
            last = found[-1][0]
        known = {
            "findings": [finding for _, finding in found],
            "ended": ending and str(ending),
            "problem": self._problem,
            "rules without a value": sorted(text for rules in self._rules for text in rules.unjudged),
        }
        always = {"batch": self.batch, "cursor": f"{self._followed.attempt}:{last}"}
        return always | {name: one for name, one in known.items() if one}

    def run(self) -> None:
        callbacks = [*self._rules, self._stalls]
        try:
            stream = self._followed.attach(Subscription.of(callbacks))
            with contextlib.closing(stream) if isinstance(stream, Subscriber) else contextlib.nullcontext():
                self.runner = Runner(stream, callbacks)
                self.ending = self.runner.run().ending
        except OffloopError as error:
            self._problem = str(error)
