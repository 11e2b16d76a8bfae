"""Alerts when a training hangs."""

import asyncio
import contextlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from offloop.bus.errors import ConfigurationError, check_at_least
from offloop.bus.printing import one_line, say
from offloop.bus.protocol.host_windows import HostWindow
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.runs.alerts import FIRING, RESOLVED, AlertStatus, RunAlert, note_alert, read_alerts
from offloop.bus.types.commands import Outcome
from offloop.bus.types.demand import BASE_EVENTS
from offloop.bus.types.event import Event
from offloop.bus.types.health import HEALTH, Health, find_cause, recent_health
from offloop.consumers.api.callback import Callback
from offloop.consumers.api.logger import Logger, RunContext

_WINDOW = 51
_MOST_CAUSES = 3
_EVALUATION_BATCHES = {Event.EVAL_BATCH_END, Event.PREDICT_BATCH_END}
_STARTS = {Event.EVAL_START, Event.PREDICT_START}
_ENDS = {Event.EVAL_END, Event.PREDICT_END}
_IN_EVALUATION = _STARTS | _EVALUATION_BATCHES
# The user's program continues after these, and may take its time.
_IDLE = {Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD, Event.FIT_END, Event.EVAL_STANDALONE_END, Event.PREDICT_END}


class StallMonitor(Callback):
    """Alerts when no event has come for ``factor`` times the usual duration of a batch, with the last known place.

    The usual duration is the median of the last 51 batches, separately for training and evaluations. No alert comes
    before ``min_seconds``, and none before ``factor`` x ``min_seconds`` while no batch is known. Between two calls of
    ``fit()``, ``eval()`` or ``predict()`` no event is expected.

    While it waits, it measures with a clock and reports on standard error, once for each stall, and again when events
    come. Its metrics follow the times of the events alone, and are the same in a replay: with the first event after a
    stall ``stall/seconds``, its duration, and ``stall/count``, the number of stalls.

    While the training is paused by a command, no event is expected either, and that time does not count. A replay
    only logs: its speed says nothing about the training.

    Evaluations and predictions are followed batch by batch, a training from the end of a batch to the next; the flight
    recorder shows where within a batch it hangs. An alert also names what the health of the hosts shows, such as an XID
    error of a GPU. A training that hangs keeps back the events of its last 50 ms unless it was started with
    ``max_delay=0``, see :class:`offloop.bus.Publisher`.

    Args:
        factor, min_seconds: see above.
        stacks: end an alert with the places where the ranks are, as ``offloop send RUN stacks`` finds them."""

    events: frozenset[Event] = BASE_EVENTS | _EVALUATION_BATCHES | {HEALTH}
    resumes = False
    keeps: tuple[str, ...] = ("_seen",)

    def __init__(self, factor: float = 10.0, min_seconds: float = 30.0, stacks: bool = True) -> None:
        check_at_least("factor", factor, 1)
        if not min_seconds > 0:
            raise ConfigurationError(f"min_seconds is {min_seconds}: use a number of seconds above 0")
        self._factor = factor
        self._min_seconds = min_seconds
        self._asks_stacks = stacks
        self._seen = _Seen()
        self._watch: asyncio.Task[None] | None = None
        self._arrived = 0.0
        self._alerted = False
        self._context = RunContext("run", 1, None)
        self._health = recent_health()

    def host_windows(self, windows: Sequence[HostWindow], logger: Logger) -> None:
        for window in windows:
            if window.health is not None:
                self._health[window.host].append(window.health)

    def run_event(self, event: Event, state: Snapshot, logger: Logger) -> None:
        if event is HEALTH:
            if (health := Health.of(state.fields)) is not None:
                self._health[""].append(health)
            return
        self._context, seen = logger.context, self._seen
        waited = (state.time_ns - seen.last_ns - self._paused(seen.last_ns, state.time_ns)) / 1e9
        # A recording has the batches of evaluations only on request.
        is_whole_evaluation = seen.last_event in _STARTS and event in _ENDS
        if seen.limit is not None and waited > seen.limit and not is_whole_evaluation:
            seen.count += 1
            logger.log_metrics({"stall/seconds": waited, "stall/count": seen.count})
        seen.add(event, state.time_ns, waited)
        seen.limit = self._limit_after(event)
        seen.phase, seen.seq, seen.batch = _phase(event, state), state.seq, state.timestamp.values.batch
        self._note_arrival()

    def resumed(self, logger: Logger) -> None:
        self._context = logger.context
        self._note_arrival()
        known = [] if self._context.run_dir is None else read_alerts(self._context.run_dir)
        for alert in known:
            if alert.id == self._identity(FIRING):
                # The stall that was reported before still lasts.
                self._alerted = True
                self.act(alert, self._context)

    async def close(self, state: Snapshot, logger: Logger) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch

    def _paused(self, since_ns: int, until_ns: int) -> int:
        paused, began = 0, None
        for outcome in self._answered():
            at = min(max(outcome.time_ns or 0, since_ns), until_ns)
            if outcome.command.name == "pause":
                began = at if began is None else began
            elif began is not None:
                paused, began = paused + at - began, None
        return paused + (until_ns - began if began is not None else 0)

    def _answered(self) -> list[Outcome]:
        return [
            outcome
            for outcome in self._context.answered()
            if outcome.error is None and outcome.command.name in ("pause", "resume", "stop")
        ]

    def _limit_after(self, event: Event) -> float | None:
        """Return the seconds that the next event may take; ``None`` when none is expected."""
        if event in _IDLE or (event is Event.EVAL_AFTER_ALL and not self._seen.fitting):
            return None
        steps = self._seen.evaluation_steps if event in _IN_EVALUATION else self._seen.steps
        usual = statistics.median(steps) if steps else self._min_seconds
        return max(self._factor * usual, self._min_seconds)

    def _note_arrival(self) -> None:
        if self._alerted:
            self._alerted = False
            self._alert(
                RESOLVED, f"the training continues, after {time.monotonic() - self._arrived:.0f} s without an event"
            )
        self._arrived = time.monotonic()
        is_replay = self._context.run_dir is not None and self._context.command is None
        if (self._watch is None or self._watch.done()) and not is_replay:
            # Outside an event loop, as in a test of the numbers, nothing waits.
            with contextlib.suppress(RuntimeError):
                self._watch = asyncio.get_running_loop().create_task(self._wait())

    async def _wait(self) -> None:
        while True:
            await asyncio.sleep(self._left())
            if self._seen.limit is None or self._alerted or self._left() > 0:
                continue
            if [outcome.command.name for outcome in self._answered()][-1:] == ["pause"]:
                self._arrived = time.monotonic()  # the next event is due from the end of the pause on
                continue
            arrived = self._arrived
            # Events delayed by another slow callback arrive during this pause.
            await asyncio.sleep(min(1.0, self._min_seconds / 10))
            if arrived != self._arrived:
                continue
            text = (
                f"no event for {time.monotonic() - arrived:.0f} s, where it should not take more than "
                f"{self._seen.limit:.0f} s: the training hangs {self._seen.phase}"
            )
            text += self._causes() + await self._places()
            if arrived == self._arrived:
                self._alerted = True
                self._alert(FIRING, text)

    def _causes(self) -> str:
        # In a run on several hosts the first one's come twice.
        causes = dict.fromkeys(find_cause(known, None) for known in self._health.values())
        return "".join(f"; {one_line(cause)}" for cause in [*filter(None, causes)][:_MOST_CAUSES])

    async def _places(self) -> str:
        """Return where the ranks are, and the file with their stacks, as the end of an alert."""
        if not self._asks_stacks or self._context.command is None:
            return ""
        try:
            outcome = await asyncio.to_thread(self._context.command, "stacks", reason="stall")
        except Exception as error:  # noqa: BLE001  such as too many open files, in any library
            return f"; no stacks: {error}"
        return f"; {outcome.done}" if outcome.done else f"; no stacks: {outcome.error}" if outcome.error else ""

    def _alert(self, status: AlertStatus, text: str) -> None:
        attempt, batch = self._context.attempt, self._seen.batch
        self.act(RunAlert(self._identity(status), status, "stall", text, time.time(), attempt, batch), self._context)

    def _identity(self, status: AlertStatus) -> str:
        return f"{self._context.run_name}-{self._context.attempt}-{self._seen.seq}-stall-{status}"

    def act(self, alert: RunAlert, run: RunContext) -> None:
        """Report an alert."""
        say(alert.text, err=True)
        note_alert(run.run_dir, alert)

    def _left(self) -> float:
        """Return the seconds to the next check; 0 when an event is overdue."""
        if self._seen.limit is None or self._alerted:
            return self._min_seconds / 2
        # The next event may bring a shorter limit.
        return min(max(self._arrived + self._seen.limit - time.monotonic(), 0), self._min_seconds / 2)


@dataclass
class _Seen:
    steps: list[float] = field(default_factory=list)
    evaluation_steps: list[float] = field(default_factory=list)  # seconds of the last batches
    count: int = 0
    last_ns: int = 0
    last_event: str | None = None
    limit: float | None = None
    fitting: bool = False
    phase: str = ""
    seq: int = 0
    batch: int = 0

    def add(self, event: Event, now_ns: int, waited: float) -> None:
        if event in (Event.FIT_START, Event.FIT_END):
            self.fitting = event is Event.FIT_START
        elif event is Event.BATCH_END and self.last_ns:
            self.steps = [*self.steps[1 - _WINDOW :], waited]
        elif event in _EVALUATION_BATCHES and self.last_ns:
            self.evaluation_steps = [*self.evaluation_steps[1 - _WINDOW :], waited]
        self.last_ns, self.last_event = now_ns, event.value


def _phase(event: Event, state: Snapshot) -> str:
    batch, epoch = state.timestamp.values.batch, state.timestamp.values.epoch
    if event is Event.BATCH_END:
        return f"after batch {batch}: in the dataloader, or in batch {batch + 1}"
    if event is Event.EPOCH_START:
        return f"before the first batch of epoch {epoch + 1} ends"
    if event.is_predict:
        return f"in the prediction, after its batch {state.predict_timestamp.values.batch}"
    if event in _IN_EVALUATION:
        return f"in the evaluation of {state.dataloader_label}, after its batch {state.eval_timestamp.values.batch}"
    return f"after {event.value}, which came after batch {batch}"
