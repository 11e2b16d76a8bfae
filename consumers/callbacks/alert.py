"""Alerts people when a rule about a run's values holds."""

import contextlib
import os
import shlex
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import msgspec

from offloop.bus.errors import ConfigurationError, OffloopError, RunDirectoryError
from offloop.bus.printing import one_line, say
from offloop.bus.protocol.order import Ending
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.runs.alerts import FIRING, RESOLVED, AlertStatus, RunAlert, note_alert
from offloop.bus.runs.directory import is_over, read_run
from offloop.bus.runs.run_file import Attempt
from offloop.bus.types.actor import FIRST_ACTOR
from offloop.bus.types.demand import BASE_EVENTS, Demand, EventDemand
from offloop.bus.types.event import Event
from offloop.bus.types.health import HEALTH
from offloop.bus.types.metrics import MetricNames
from offloop.bus.types.timestamp import Timestamp
from offloop.consumers.api.callback import Callback, CannotWorkError
from offloop.consumers.api.logger import Logger, RunContext
from offloop.consumers.callbacks.alert_rules import DISK, DISK_FREE, ENDS, STALLED, Rule, RuleState
from offloop.consumers.callbacks.channels import Channel, deliver, open_channels
from offloop.consumers.callbacks.loss_curve import LossCurve
from offloop.consumers.callbacks.lr_monitor import LRMonitor
from offloop.consumers.callbacks.monitored_metric import LoggedNumbers
from offloop.consumers.callbacks.shards import WholeNorms, of_rank
from offloop.consumers.callbacks.speed_monitor import SpeedMonitor
from offloop.consumers.callbacks.stall_monitor import StallMonitor
from offloop.consumers.callbacks.trainer_metrics import TrainerMetrics

_say = partial(say, err=True)
_ALWAYS_THERE = {*dir(Snapshot), "flops_per_batch"}  # fields that are present without a request
_LOSSES, _METRICS = "loss/", "metrics/"
_DISK_SECONDS = 10.0  # between two measurements
_DAY = 86400  # an older notice is not sent
_KINDS = {"finished": "success", "failed": "failure", "lost": "failure"}  # of messages, by Apprise


class Notice(NamedTuple):
    id: str  # the same whenever the same events are handled, so that a receiver can detect repetitions
    status: AlertStatus
    rule: str
    metric: str | None  # None for a word
    value: float | None
    run: str
    attempt: int
    epoch: int
    batch: int
    time: float  # time of the event: seconds since 1970, UTC
    text: str

    @property
    def about(self) -> str:
        """Its subject; the same when it is resolved."""
        if self.metric is not None:
            return f"{self.rule} {self.metric}"
        return "end" if self.rule in ENDS else "stall"

    @property
    def title(self) -> str:
        """The first line of a message."""
        return f"{'resolved: ' if self.status == RESOLVED and self.about != 'end' else ''}{self.rule}: {self.run}"

    def __str__(self) -> str:
        what = "ALERT" if self.status == FIRING else "finished" if self.about == "end" else "resolved"
        return f"{what}: run {self.run}, epoch {self.epoch}, batch {self.batch}: {self.text}"


class Alert(Callback):
    """Alerts when a rule holds, and again when it no longer does.

    On standard error, and on the page of the run, by ``alerts.json`` in its directory. A rule is one
    of ::

        METRIC < NUMBER           also <=, >, >=, ==, !=
        METRIC is nan             also inf, finite, not finite
        nan                       short for any of loss/... and metrics/... that is not finite

    with ``for DURATION`` at the end if it has to hold without a break for this time: ``5ba``, ``2ep``, ``100sp``
    (batches, epochs, samples, ...) or ``90s``, ``10min``, ``2h`` of the events' time. ::

        loss > 10 for 5ba
        throughput/samples_per_sec < 100 for 10min
        eval/MulticlassAccuracy < 0.5
        gradient_norm > 100
        memory_stats[allocated_mem] > 70

    or a word: ``finished`` (also stopped on request), ``failed``, ``lost`` (killed), ``stalled``, as
    :class:`StallMonitor` decides (``stalled for 5min`` sets its ``min_seconds``), or ``disk``, short for
    ``disk/free_percent < 5``, of the file system of the run's folder.

    METRIC is the full or short name of a metric that ``TrainerMetrics``, ``SpeedMonitor`` or ``LRMonitor`` (attached or
    not) or an algorithm logs; or a field of the state, or ``FIELD[KEY]`` of a field that is a map, requested at
    ``BATCH_END``, in every ``every``-th batch. A name of one word other than ``loss`` and ``lr`` is always requested as
    a field: write ``eval/accuracy`` rather than ``accuracy``. ``disk/free_gb`` and ``disk/free_percent`` are measured
    every ten seconds, while the run is live. A rule is judged whenever its metric has a value, and fires once until it
    is resolved, ``nan`` for each metric; each attempt is judged anew. NaN is neither less nor more than a number.

    ``to`` sends notices by Apprise (``pip install 'offloop[alerts]'``), with a picture of the loss: to an address
    without secrets, to those in a variable of the environment, ``env:NAME``, or in a file, ``file:PATH``, one a line.
    Each is tried three times, then the failure is reported on standard error. ``alerts.json`` notes what was sent, and
    it is not sent again; neither is what is older than a day.

    At the end of the consumer, standard error names the rules whose metric never had a value.

    ``dump`` writes the flight recorder of a live run, see ``docs/flight.md``.

    Raises :class:`offloop.bus.errors.ConfigurationError` for no rule, and an invalid rule (with the place)."""

    background: bool = True
    sees_actors = True

    def __init__(
        self,
        rules: Sequence[str],
        console: bool = True,
        every: int = 1,
        dump: bool = False,
        to: Sequence[str] = (),
    ) -> None:
        self._rules = [Rule.parse(text) for text in _listed(rules)]
        if not self._rules:
            raise ConfigurationError("an alert needs rules: '-o alert.rules=nan' suits every training")
        self._is_shown = console
        asked = (rule.field for rule in self._rules)
        self.fields: tuple[str, ...] = tuple(
            dict.fromkeys(name for name in asked if name and name not in _ALWAYS_THERE)
        )
        self.every: int = every
        self._norms = {name: WholeNorms(name) for name in self.fields}
        self.all_ranks: bool = bool(self.fields)
        self._dumps = dump
        self._sources: list[Callback] = [TrainerMetrics(), SpeedMonitor(), LRMonitor()]
        # For each rule, the metrics for which it holds.
        self._holding: list[dict[str, RuleState]] = [{} for _ in self._rules]
        self.unjudged: set[str] = {rule.text for rule in self._rules if rule.test and not rule.is_of_disk}
        self._words = {rule.name: rule.text for rule in self._rules if not rule.test}
        waits = [rule.duration.value for rule in self._rules if rule.name == STALLED and rule.duration]
        self._stall = StallMonitor(min_seconds=waits[0]) if waits else StallMonitor()
        self._stall.act = self._report_stall  # type: ignore[method-assign]
        if STALLED in self._words:
            vars(self)["host_windows"] = self._stall.host_windows
        self._measures_disk = any(rule.is_of_disk for rule in self._rules)
        self._next_measurement = 0.0
        self._to = _listed(to)
        self._curve = LossCurve()
        self._attempt = 0
        self._at = (0, 0, 0, 0.0)  # seq, epoch, batch and time of the last event
        self._ending: Ending | None = None
        self._unsent = 0
        self._context = RunContext("run", 1, None)

    @cached_property
    def _channels(self) -> list[Channel]:
        return open_channels(self._to)

    def check(self) -> None:
        _ = self._channels  # not in the constructor, which may run in the trainer's process

    def demand(self) -> Demand:
        fields = EventDemand(fields=dict.fromkeys(self.fields, self.every))
        stall = self._stall.demand() if STALLED in self._words else Demand()
        return Demand.merge([stall, Demand({**dict.fromkeys(BASE_EVENTS, EventDemand()), Event.BATCH_END: fields})])

    def state_dict(self) -> dict[str, Any]:
        return {
            "rules": {
                rule.text: {
                    name: [one.since and [one.since[0], list(one.since[1].values)], one.firing]
                    for name, one in holding.items()
                }
                for rule, holding in zip(self._rules, self._holding, strict=True)
            },
            "sources": [source.state_dict() for source in self._sources],
            "unjudged": sorted(self.unjudged),
            "norms": {name: norms.state_dict() for name, norms in self._norms.items()},
            "stall": self._stall.state_dict(),
            "curve": msgspec.to_builtins(self._curve) if self._to else {},
            "at": list(self._at),
            "attempt": self._attempt,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._holding = [
            {
                name: RuleState(since and (since[0], Timestamp.from_values(since[1])), firing)
                for name, (since, firing) in state["rules"].get(rule.text, {}).items()
            }
            for rule in self._rules
        ]
        for source, one in zip(self._sources, state["sources"], strict=True):
            source.load_state_dict(one)
        for name in self._norms.keys() & state["norms"].keys():
            self._norms[name].load_state_dict(state["norms"][name])
        judged = state["rules"].keys() - set(state["unjudged"])
        self.unjudged -= judged
        self._stall.load_state_dict(state["stall"])
        self._curve = msgspec.convert(state["curve"], LossCurve)
        self._at = tuple(state["at"])
        self._attempt = state["attempt"]

    def resumed(self, logger: Logger) -> None:
        self._context = logger.context
        if STALLED in self._words:
            self._stall.resumed(logger)

    def run_event(self, event: Event, state: Snapshot, logger: Logger) -> None:
        self._context = logger.context
        if state.attempt != self._attempt:
            # What held when an earlier attempt saved its checkpoint is reported again, and begins now.
            self._attempt, self._holding = state.attempt, [{} for _ in self._rules]
        values = LoggedNumbers(logger.context)
        values.begin(state)
        # Norms of sharded weights are known with the event of any rank; all else is the first one's.
        is_other = 0 < state.rank < FIRST_ACTOR
        if state.rank == 0 and event is not HEALTH:
            self._at = state.seq, state.timestamp.values.epoch, state.timestamp.values.batch, state.time
            if event is Event.BATCH_END and self._to and state.loss is not None:
                self._curve.add(self._at[2], state.loss)
        if STALLED in self._words and (state.rank == 0 or event is HEALTH):
            self._stall.run_event(event, state, values)
        # Not at events of the past, whose times would count for a duration.
        if self._measures_disk and time.time() - state.time < _DISK_SECONDS:
            self._measure_disk(values)
        fields = {} if is_other else state.fields
        if self._norms:
            fields = {**fields, **{name: norms.whole(state) for name, norms in self._norms.items()}}
        for source in () if is_other else self._sources:
            if event in source.demand().events:
                source.run_event(event, state, values)
        began = (state.previous_timestamp if event is Event.BATCH_END else None) or state.timestamp
        for rule, holding in zip(self._rules, self._holding, strict=True):
            for name, value in _values_for(rule, values.numbers, fields):
                self.unjudged.discard(rule.text)
                rule_state = holding.pop(name, None) or RuleState()
                status = rule_state.take_in(rule, value, began, state)
                if rule_state.since is not None:
                    holding[name] = rule_state
                if status is not None:
                    # A killed consumer does not measure again at the same event.
                    moment = state.time_ns // (_DAY * 10**9) if rule.is_of_disk else f"{state.seq}{of_rank(state)}"
                    identity = f"{state.run_name}-{state.attempt}-{moment}-{rule.text}-{name}-{status}"
                    at = state.timestamp.values.epoch, state.timestamp.values.batch, state.time
                    text = f"{rule.text} ({name} is {value:g})"
                    notice = Notice(identity, status, rule.text, name, value, state.run_name, state.attempt, *at, text)
                    self.act(notice, logger.context)

    def _measure_disk(self, values: LoggedNumbers) -> None:
        run, now = self._context, time.monotonic()
        if run.command is None or run.run_dir is None or now < self._next_measurement:
            return
        self._next_measurement = now + _DISK_SECONDS
        with contextlib.suppress(OSError):
            used = shutil.disk_usage(run.run_dir)
            values.log_metrics({DISK: used.free / used.total * 100, DISK_FREE: used.free / 1e9})

    def run_ended(self, ending: Ending | None) -> None:
        self._ending = ending

    async def close(self, state: Snapshot, logger: Logger) -> None:
        await self._stall.close(state, logger)
        for text in sorted(self.unjudged):
            _say(f"rule {text!r} was never judged: 'offloop show {state.run_name}' lists the metrics of the run")
        run, ending = logger.context, self._ending
        word = "" if ending is None else "finished" if ending.status == "stopped" else ending.status
        is_recorded = run.command is None
        # The recording of a live run has no end yet.
        goes_on = word == "lost" and is_recorded and run.run_dir and not is_over(run.run_dir)
        if word in self._words and not goes_on:
            at = self._at[3] if is_recorded else time.time()
            identity = f"{run.run_name}-{run.attempt}-{self._at[0]}-{word}"
            self._act(identity, RESOLVED if word == "finished" else FIRING, word, str(ending), at, run)
        if self._unsent:
            raise CannotWorkError(f"{self._unsent} message{'s were' if self._unsent > 1 else ' was'} not sent")

    def _report_stall(self, alert: RunAlert, run: RunContext) -> None:
        self._act(alert.id, alert.status, STALLED, alert.text, alert.time, run)

    def _act(self, identity: str, status: AlertStatus, word: str, text: str, at: float, run: RunContext) -> None:
        _, epoch, batch, _ = self._at
        rule = self._words[word]
        self.act(Notice(identity, status, rule, None, None, run.run_name, run.attempt, epoch, batch, at, text), run)

    def act(self, notice: Notice, run: RunContext) -> None:
        """Report a notice."""
        alert = RunAlert(notice.id, notice.status, notice.about, notice.text, notice.time, notice.attempt, notice.batch)
        sent = note_alert(run.run_dir, alert)
        if self._dumps and notice.status == "firing":
            _dump(notice, run)
        if self._is_shown:
            _say(str(notice))
        if {channel.name for channel in self._channels} - {*sent} and time.time() - notice.time < _DAY:
            self._send(notice, run, replace(alert, sent=sent))

    def _send(self, notice: Notice, run: RunContext, alert: RunAlert) -> None:
        lines = [
            notice.text,
            f"{'' if self._curve.last is None else f'loss {self._curve.last:g}, '}epoch {notice.epoch}, "
            f"batch {notice.batch}, attempt {notice.attempt}",
            "" if notice.rule == "finished" else _how_to_resume(run),
            f"id {notice.id}",
        ]
        message = {
            "title": one_line(notice.title),
            "body": "\n".join(one_line(line) for line in lines if line),
            "notify_type": _KINDS.get(notice.rule, "warning" if notice.status == FIRING else "info"),
        }
        channels = [channel for channel in self._channels if channel.name not in alert.sent]
        problems = deliver(
            channels,
            message,
            self._curve.as_png(),
            lambda name: note_alert(run.run_dir, replace(alert, sent=(name,))),
        )
        self._unsent += len(problems)
        for name, problem in problems.items():
            _say(f"the notice {notice.title!r} was not sent to {name}: {problem}")


def _how_to_resume(run: RunContext) -> str:
    attempts: Iterable[Attempt] = ()
    if run.run_dir is not None:
        with contextlib.suppress(RunDirectoryError):
            attempts = read_run(run.run_dir).attempts
    info = next((one.info for one in attempts if one.number == run.attempt), {})
    if not (words := [str(word) for word in info.get("command") or ()]):
        return ""
    saves = any(word.startswith("--save-folder") for word in words)
    if resumes := saves and os.path.basename(words[0]) in ("trainer", "offloop"):
        # Of options given twice the last one counts.
        words += ["--run-name", run.run_name, "--seed", str(info.get("seed")), "--autoresume"]
    return f"{'to resume' if resumes else 'started'} in {info.get('cwd', '?')}: {shlex.join(words)}"


def _dump(notice: Notice, run: RunContext) -> None:
    if run.command is None:
        return  # a recording, which is over
    try:
        outcome = run.command("dump", "alert", reason=str(notice))
    except OffloopError as error:
        _say(f"the flight recorder was not written: {error}")
    else:
        _say(str(outcome))


def _values_for(rule: Rule, logged: Mapping[str, float], fields: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    if rule.name is None:
        return [(name, value) for name, value in logged.items() if name.startswith((_LOSSES, _METRICS))]
    if rule.key is None and rule.name in logged:
        return [(rule.name, logged[rule.name])]
    # An evaluation has no training loss, and `loss` would match the loss of the evaluation.
    if rule.key is None and rule.name != "loss" and (found := MetricNames(logged).matches(rule.name)):
        return [(name, logged[name]) for name in found]
    name, value = rule.name, fields.get(rule.name)
    if rule.key is not None:
        name, value = f"{name}[{rule.key}]", value.get(rule.key) if isinstance(value, Mapping) else None
    return [(name, value)] if isinstance(value, float | int) else []


def _listed(given: Iterable[str]) -> list[str]:
    parts = given.split(",") if isinstance(given, str) else given
    return [part.strip() for part in parts if part.strip()]
