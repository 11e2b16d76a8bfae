"""Alerts people when a rule about a run's values holds."""

import json
import math
import operator
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

from offloop.bus.errors import ConfigurationError, OffloopError
from offloop.bus.printing import say
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.runs.alerts import FIRING, RESOLVED, AlertStatus, RunAlert, note_alert
from offloop.bus.strict_json import plain
from offloop.bus.types.actor import FIRST_ACTOR
from offloop.bus.types.demand import BASE_EVENTS, Demand, EventDemand
from offloop.bus.types.event import Event
from offloop.bus.types.metrics import MetricNames
from offloop.bus.types.time import Time, TimeUnit
from offloop.bus.types.timestamp import Timestamp
from offloop.consumers.api.callback import Callback
from offloop.consumers.api.logger import Logger, RunContext
from offloop.consumers.callbacks.lr_monitor import LRMonitor
from offloop.consumers.callbacks.monitored_metric import LoggedNumbers
from offloop.consumers.callbacks.shards import WholeNorms, of_rank
from offloop.consumers.callbacks.speed_monitor import SpeedMonitor
from offloop.consumers.callbacks.trainer_metrics import TrainerMetrics

_say = partial(say, err=True)
_ALWAYS_THERE = {*dir(Snapshot), "flops_per_batch"}  # fields that are present without a request
_LOSSES, _METRICS = "loss/", "metrics/"


_RULE = re.compile(
    r"""\s*(?P<name>[^\s<>=!\[\]]+) (?:\s*\[(?P<key>[^\[\]]+)\])?
    (?:
        \s*(?P<is>is\b) (?:\s*(?P<kind>(?:nan|inf|finite|not[ ]finite)\b))?
      | \s*(?P<test><=|>=|==|!=|<|>) (?:\s*(?P<number>[-+]?(?:inf\b|(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)))?
    )?
    (?:\s*(?P<for>for\b) (?:\s*(?P<duration>\S+))?)?""",
    re.VERBOSE,
)
"""Matches a rule as far as it is valid."""

_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_IS: dict[str, Callable[[float], bool]] = {
    "nan": math.isnan,
    "inf": math.isinf,
    "finite": math.isfinite,
    "not finite": lambda value: not math.isfinite(value),
}


@dataclass(frozen=True)
class Rule:
    text: str
    name: str | None  # its metric or field; None for every number of the training
    key: str | None  # the entry of a field that is a map
    test: str  # <, >=, ... or nan, inf, finite
    limit: float  # the number to compare with, where the test takes one
    duration: Time | None  # how long it has to hold

    @classmethod
    def parse(cls, text: str) -> "Rule":
        """Parse ``METRIC OPERATOR NUMBER``, ``METRIC is KIND`` or ``nan``, each optionally with ``for DURATION``.

        Raises ConfigurationError with the number of the first wrong character, from 1."""
        if (found := _RULE.match(text)) is None:
            raise _unreadable(text, 0, "the name of a metric, or nan")
        name, key, test, kind, number = found.group("name", "key", "test", "kind", "number")
        before = found.end("key") + 1 if key else found.end("name")
        rest, duration = text[found.end() :].strip(), None
        if found["is"] and not kind:
            raise _unreadable(text, found.end("is"), "nan, inf, finite or not finite")
        if test and not number:
            raise _unreadable(text, found.end("test"), "a number")
        if not (test or kind) and (name != "nan" or key or (rest and not found["for"])):
            raise _unreadable(text, before, "one of <, <=, >, >=, ==, != or 'is'")
        if found["for"]:
            duration = _duration(text, found["duration"] or "", found.end("for"))
        if rest:
            raise _unreadable(
                text, found.end(), "the end of the rule" if duration else "'for' and a duration, or the end of the rule"
            )
        if not (test or kind):
            return cls(text, None, None, "not finite", 0.0, duration)
        return cls(text, name, key, test or kind, float(number or 0.0), duration)

    @property
    def field(self) -> str | None:
        return self.name if self.name is not None and self.name.isidentifier() else None

    def holds(self, value: float) -> bool:
        return _COMPARE[self.test](value, self.limit) if self.test in _COMPARE else _IS[self.test](value)

    def lasted(self, since_ns: int, since: Timestamp, state: Snapshot) -> bool:
        if self.duration is None:
            return True
        unit = self.duration.unit
        if unit is TimeUnit.SECOND:
            return state.time_ns - since_ns >= self.duration.value * 1e9
        return bool(state.timestamp.get(unit) - since.get(unit) >= self.duration)


@dataclass
class RuleState:
    since: tuple[int, Timestamp] | None = None
    """Start of the time in which it has held without a break, in nanoseconds and in training time."""
    firing: bool = False

    def take_in(self, rule: Rule, value: float, began: Timestamp, state: Snapshot) -> AlertStatus | None:
        """Judge a value of an event, and the time at which that began; return a changed status."""
        if not rule.holds(value):
            self.since = None
            was_firing, self.firing = self.firing, False
            return RESOLVED if was_firing else None
        self.since = self.since or (state.time_ns, began)
        if self.firing or not rule.lasted(*self.since, state):
            return None
        self.firing = True
        return FIRING


def _duration(text: str, duration: str, at: int) -> Time:
    try:
        read = Time.from_timestring(re.sub(r"(?<=\d)min\b", "m", duration))
    except OffloopError:
        read = None
    if read is None or read.unit is TimeUnit.DURATION or read.value < 0:
        raise _unreadable(text, at, "a duration such as 5ba, 2ep or 10min")
    return read


def _unreadable(text: str, at: int, expected: str) -> ConfigurationError:
    rest = text[at:].lstrip()
    return ConfigurationError(
        f"alert rule {text!r}: at character {len(text) - len(rest) + 1} there is {repr(rest) if rest else 'its end'} "
        f"instead of {expected}; examples of rules are 'loss > 10 for 5ba' and 'nan'"
    )


class Notice(NamedTuple):
    id: str  # the same whenever the same events are handled, so that a receiver can detect repetitions
    status: AlertStatus
    rule: str
    metric: str
    value: float
    run: str
    attempt: int
    epoch: int
    batch: int
    time: float  # time of the event: seconds since 1970, UTC

    def to_json(self) -> bytes:
        return json.dumps(plain(self._asdict())).encode()

    def __str__(self) -> str:
        what = "ALERT" if self.status == "firing" else "resolved"
        where = f"run {self.run}, epoch {self.epoch}, batch {self.batch}"
        return f"{what}: {self.rule} ({self.metric} is {self.value:g}; {where})"


class Alert(Callback):
    """Alerts when a rule holds, and again when it no longer does.

    On standard error, to a command, and on the page of the run, by ``alerts.json`` in its directory. A rule is one
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

    METRIC is the full or short name of a metric that ``TrainerMetrics``, ``SpeedMonitor`` or ``LRMonitor`` (attached or
    not) or an algorithm logs; or a field of the state, or ``FIELD[KEY]`` of a field that is a map, requested at
    ``BATCH_END``, in every ``every``-th batch. A name of one word other than ``loss`` and ``lr`` is always requested as
    a field: write ``eval/accuracy`` rather than ``accuracy``. A rule is judged whenever its metric has a value, and
    fires once until it is resolved, ``nan`` for each metric. NaN is neither less nor more than a number.

    At the end of the consumer, standard error names the rules whose metric never had a value.

    ``command`` is a program and its arguments, run without a shell for at most ``timeout`` seconds. Its standard input
    is a JSON object with ``status`` (``firing`` or ``resolved``), ``rule``, ``metric``, ``value``, ``run``,
    ``attempt``, ``epoch``, ``batch``, ``time`` and ``id``, its environment has ``ALERT_STATUS``, ``ALERT_RULE`` and so
    on. ``curl,-fsS,--json,@-,ADDRESS`` posts it to a web address. Failures are reported on standard error. A consumer
    that is killed and resumes may repeat a notice, with the same ``id``. ``dump`` writes the flight recorder of a live
    run, see ``docs/flight.md``.

    Raises :class:`offloop.bus.errors.ConfigurationError` for no rule, an invalid rule (with the place), and a missing
    ``command``."""

    background: ClassVar[bool] = True
    sees_actors: ClassVar[bool] = True

    def __init__(
        self,
        rules: Sequence[str],
        console: bool = True,
        command: Sequence[str] | None = None,
        timeout: float = 10.0,
        every: int = 1,
        dump: bool = False,
    ) -> None:
        self._rules = [Rule.parse(text) for text in _listed(rules)]
        if not self._rules:
            raise ConfigurationError("an alert needs rules: '-o alert.rules=nan' suits every training")
        if not timeout > 0:
            raise ConfigurationError(f"timeout is {timeout}: use a number of seconds above 0")
        self._is_shown = console
        self._command = None if command is None else _checked(_listed(command))
        self._timeout = timeout
        asked = (rule.field for rule in self._rules)
        self.fields = tuple(dict.fromkeys(name for name in asked if name and name not in _ALWAYS_THERE))  # type: ignore[misc]
        self.every = every  # type: ignore[misc]
        self._norms = {name: WholeNorms(name) for name in self.fields}
        self.all_ranks = bool(self.fields)  # type: ignore[misc]
        self._dumps = dump
        self._sources: list[Callback] = [TrainerMetrics(), SpeedMonitor(), LRMonitor()]
        # For each rule, the metrics for which it holds.
        self._holding: list[dict[str, RuleState]] = [{} for _ in self._rules]
        self.unjudged = {rule.text for rule in self._rules}  # rules whose metric has not had a value

    def demand(self) -> Demand:
        fields = EventDemand(fields=dict.fromkeys(self.fields, self.every))
        return Demand({**dict.fromkeys(BASE_EVENTS, EventDemand()), Event.BATCH_END: fields})

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
        self.unjudged = {rule.text for rule in self._rules} - judged

    def run_event(self, event: Event, state: Snapshot, logger: Logger) -> None:
        values = LoggedNumbers()
        values.begin(state)
        # Norms of sharded weights are known with the event of any rank; all else is the first one's.
        is_other = 0 < state.rank < FIRST_ACTOR
        fields = {} if is_other else dict(state.fields)
        fields |= {name: norms.whole(state) for name, norms in self._norms.items()}
        for source in () if is_other else self._sources:
            if event in source.demand().events:
                source.run_event(event, state, values)
        began = (state.previous_timestamp if event is Event.BATCH_END else None) or state.timestamp
        for number, (rule, holding) in enumerate(zip(self._rules, self._holding, strict=True)):
            for name, value in _values_for(rule, values.numbers, fields):
                self.unjudged.discard(rule.text)
                rule_state = holding.pop(name, None) or RuleState()
                status = rule_state.take_in(rule, value, began, state)
                if rule_state.since is not None:
                    holding[name] = rule_state
                if status is not None:
                    identity = f"{state.run_name}-{state.attempt}-{state.seq}{of_rank(state)}-{number}-{name}"
                    at = state.timestamp.values.epoch, state.timestamp.values.batch, state.time
                    notice = Notice(identity, status, rule.text, name, value, state.run_name, state.attempt, *at)
                    self.act(notice, logger.context)

    def close(self, state: Snapshot, logger: Logger) -> None:
        for text in sorted(self.unjudged):
            _say(f"rule {text!r} was never judged: 'offloop show {state.run_name}' lists the metrics of the run")

    def act(self, notice: Notice, run: RunContext) -> None:
        """Report a notice."""
        about, text = f"{notice.rule} {notice.metric}", f"{notice.rule} ({notice.metric} is {notice.value:g})"
        note_alert(
            run.run_dir, RunAlert(notice.id, notice.status, about, text, notice.time, notice.attempt, notice.batch)
        )
        if self._dumps and notice.status == "firing":
            _dump(notice, run)
        if self._is_shown:
            _say(str(notice))
        if self._command and (problem := _give(notice, self._command, self._timeout)):
            _say(f"command {self._command[0]} failed for the notice of {notice.rule!r} ({notice.status}): {problem}")


def _dump(notice: Notice, run: RunContext) -> None:
    if run.command is None:
        return  # a recording, which is over
    try:
        outcome = run.command("dump", "alert", reason=str(notice))
    except OffloopError as error:
        _say(f"the flight recorder was not written: {error}")
    else:
        _say(str(outcome))


def _checked(command: list[str]) -> list[str]:
    if not command:
        raise ConfigurationError("command is empty: give a program and its arguments, such as notify-send,Training")
    if shutil.which(command[0]) is None:
        raise ConfigurationError(f"command {command[0]!r} is not found: give its whole path, or install it")
    return command


def _give(notice: Notice, command: list[str], timeout: float) -> str | None:
    environment = os.environ | {f"ALERT_{field.upper()}": str(value) for field, value in notice._asdict().items()}
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2, env=environment, start_new_session=True)
    except (OSError, ValueError) as error:
        return str(error)
    with process:
        try:
            process.communicate(notice.to_json(), timeout=timeout)
        except subprocess.TimeoutExpired:
            # With all its child processes.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"it took more than {timeout:g} s and was killed"
    return f"exit code {process.returncode}" if process.returncode else None


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
