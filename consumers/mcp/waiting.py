"""Follows runs for agents that wait: rules about metrics, stalls, and the end."""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from offloop.bus.errors import ConfigurationError, OffloopError
from offloop.bus.protocol.order import Ending
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.runs.alerts import RunAlert
from offloop.bus.subscriber.subscriber import Subscriber
from offloop.bus.types.event import Event
from offloop.consumers.api.logger import Logger, RunContext
from offloop.consumers.callbacks.alert import Alert, Notice
from offloop.consumers.callbacks.alert_rules import STALLED, Rule
from offloop.consumers.callbacks.stall_monitor import StallMonitor
from offloop.consumers.runner.entries import Subscription
from offloop.consumers.runner.places import FoundRun
from offloop.consumers.runner.runner import Runner

KEEP_SECONDS = 300.0  # a run is followed so long after the last look, so that the next one continues
_MOST_FINDINGS = 1000  # of a run; the newest are kept
AT_ONCE = 30  # findings of a run in an answer, at most


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
    """Follows one attempt of a run from its start, and keeps what the rules find.

    Raises ConfigurationError: a rule is invalid."""

    def __init__(self, run: FoundRun, rules: Sequence[str], stall_seconds: float) -> None:
        super().__init__(name="offloop-watched", daemon=True)
        if any(Rule.parse(text).name == STALLED for text in rules):
            raise ConfigurationError(f"leave out the rule {STALLED!r}: each wait reports stalls, see stall_seconds")
        self.place: float = 0.0  # number of the first rank's newest event
        self.batch = 0
        self.looked: float = time.monotonic()
        self.is_newest = True  # no other attempt has begun
        self._followed = run
        self._findings: deque[tuple[float, dict[str, Any]]] = deque(maxlen=_MOST_FINDINGS)
        self._last = 0.0  # place of the newest finding
        self._left_out = 0.0  # place of the newest one that is not kept any more
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
        if len(self._findings) == _MOST_FINDINGS:
            self._left_out = self._findings[0][0]
        self._findings.append((self._last, finding))

    def _note(self, notice: Notice, run: RunContext) -> None:
        names = ("status", "rule", "metric", "value", "epoch", "batch", "time")
        # After a stall before the event, so that a restarted server gives it the same place.
        self.add(0.75, {name: getattr(notice, name) for name in names})

    def look(self, cursor: str, most: int = AT_ONCE) -> dict[str, Any]:
        """Return findings after a cursor, how the run is, and the next cursor: the place of the last finding."""
        # The end first: then no finding is missing.
        self.looked, ending, problem = time.monotonic(), self.ending, self._problem
        number = self._followed.attempt
        attempt, _, after = cursor.partition(":")
        last = float(after) if attempt == str(number) else 0.0
        new = [one for one in tuple(self._findings) if last < one[0]]
        found = [finding for _, finding in new[:most]]
        next_cursor = f"{number}:{new[:most][-1][0] if found else last}"
        # Not before the last findings: a run that has ended is left out of the next wait.
        over = {"ended": ending and str(ending), "problem": problem} if len(new) <= most else {}
        if not self.is_newest and any(over.values()):
            text = f"attempt {number} has ended ({ending or problem}), and another one has begun"
            found.append({"status": "firing", "rule": "attempt", "text": text})
            next_cursor, over = f"{number + 1}:0.0", {}
        known = {
            "findings": found,
            "older findings left out": last < self._left_out,
            **over,
            "rules without a value": sorted(text for rules in self._rules for text in tuple(rules.unjudged)),
        }
        always = {"batch": self.batch, "cursor": next_cursor}
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
        except Exception as error:  # such as too many open files, in any library
            self._problem = f"{type(error).__name__}: {error}"
            raise


def earlier_attempt(run: FoundRun, cursor: str) -> FoundRun | None:
    """Return the earlier attempt of a run to which a cursor belongs; ``None`` if it is of the newest one."""
    attempt, info = cursor.partition(":")[0], run.info
    earlier = [one for one in info.attempts[:-1] if str(one.number) == attempt] if info is not None else []
    if info is None or not earlier:
        return None
    ended = replace(info, attempts=tuple(earlier))
    return replace(run, attempt=earlier[0].number, is_live=False, info=ended)
