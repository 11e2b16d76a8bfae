"""Tells people when something that a run says is not as it should be."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from offloop.bus.errors import ConfigurationError, OffloopError, close_matches
from offloop.bus.printing import say
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.runs.alerts import RunAlert, note_alert
from offloop.bus.types.demand import BASE_EVENTS, Demand, EventDemand
from offloop.bus.types.event import Event
from offloop.bus.types.metrics import MetricNames
from offloop.consumers.api.callback import Callback
from offloop.consumers.api.logger import Logger, RunContext
from offloop.consumers.callbacks.alert.actions import Action, Notice, NoticeProgram, Webhook, show
from offloop.consumers.callbacks.alert.rules import Observation, Rule, RuleState
from offloop.consumers.callbacks.lr_monitor import LRMonitor
from offloop.consumers.callbacks.monitored_metric import LoggedNumbers
from offloop.consumers.callbacks.speed_monitor import SpeedMonitor
from offloop.consumers.callbacks.trainer_metrics import TrainerMetrics

# Fields that are there without being asked for.
_ALWAYS_THERE = {*dir(Snapshot), "flops_per_batch"}
_LOSSES, _METRICS = "loss/", "metrics/"
_MOST_NAMES = 1000
_SHOWN_NAMES = 10


class Alert(Callback):
    """Alerts when a rule holds, and again when it no longer does: on standard error, to a web address, to a command,
    and on the page of the run, by ``alerts.json`` in the run's directory.

    A rule is written as one of ::

        METRIC < NUMBER           also <=, >, >=, ==, !=
        METRIC is nan             also inf, finite, not finite
        nan                       short for any of loss/... and metrics/... that is not finite

    with ``for DURATION`` behind it if it has to hold without a break for so long: ``5ba``, ``2ep``, ``100sp``
    (batches, epochs, samples, ...) or ``90s``, ``10min``, ``2h`` of the events' time. ::

        loss > 10 for 5ba
        throughput/samples_per_sec < 100 for 10min
        eval/MulticlassAccuracy < 0.5
        gradient_norm > 100
        memory_stats[allocated_mem] > 70

    METRIC is the full or short name of what ``TrainerMetrics``, ``SpeedMonitor`` or ``LRMonitor`` logs, with their
    defaults, or of what an algorithm logs; whether they are attached does not matter. Or it is a field of the state, or
    ``FIELD[KEY]`` of a field that is a map; such a field is asked for at ``BATCH_END``, ``every`` so many batches. A
    name of one word other than ``loss`` and ``lr`` is asked for as a field in any case, and a training that lacks it
    says so: write ``eval/accuracy`` rather than ``accuracy``. A rule is judged whenever its metric has a value, and
    fires once until it is resolved; ``nan`` does so for each metric by itself. NaN is neither less nor more than a
    number.

    A rule whose metric never had a value is named on standard error when the consumer ends, with the names that there
    were.

    ``webhook`` is POSTed a JSON object with ``status`` (``firing`` or ``resolved``), ``rule``, ``metric``, ``value``,
    ``run``, ``attempt``, ``epoch``, ``batch``, ``time`` and ``id``, up to three times. ``command`` is a program and its
    arguments; it is run without a shell, with that object on its standard input and ``ALERT_STATUS``, ``ALERT_RULE``
    and so on in its environment. With ``dump`` the flight recorder of a live run is written, see ``docs/flight.md``.
    Each has ``timeout`` seconds. One that fails is said on standard error. A consumer
    that is killed and goes on may send a notice twice, with the same ``id``.

    Raises :class:`offloop.bus.errors.ConfigurationError` for a rule that cannot be read, with the place, for no rule,
    and for a ``command`` that is not there.
    """

    background: ClassVar[bool] = True

    def __init__(
        self,
        rules: Sequence[str],
        console: bool = True,
        webhook: str | None = None,
        command: Sequence[str] | None = None,
        timeout: float = 10.0,
        every: int = 1,
        dump: bool = False,
    ) -> None:
        self._rules = [Rule.parse(text) for text in _listed(rules)]
        if not self._rules:
            raise ConfigurationError("an alert needs rules: '-o alert.rules=nan' for one that suits every training")
        if not timeout > 0:
            raise ConfigurationError(f"timeout is {timeout}: use a number of seconds above 0")
        self._actions: list[Action] = [show] if console else []
        if webhook is not None:
            self._actions.append(Webhook(webhook, timeout))
        if command is not None:
            self._actions.append(NoticeProgram(_listed(command), timeout))
        asked = (rule.field for rule in self._rules)
        self.fields = tuple(dict.fromkeys(name for name in asked if name and name not in _ALWAYS_THERE))  # type: ignore[misc]
        self.every = every  # type: ignore[misc]
        self._dumps = dump
        self._sources: list[Callback] = [TrainerMetrics(), SpeedMonitor(), LRMonitor()]
        # For each rule, the metrics for which it holds.
        self._holding: list[dict[str, RuleState]] = [{} for _ in self._rules]
        # The rules that were never judged, but for those of which that was said, and what they could have been about.
        self._unjudged = {rule.text: rule for rule in self._rules}
        self._names: dict[str, None] = {}

    def demand(self) -> Demand:
        fields = EventDemand(fields=dict.fromkeys(self.fields, self.every))
        return Demand({**dict.fromkeys(BASE_EVENTS, EventDemand()), Event.BATCH_END: fields})

    def state_dict(self) -> dict[str, Any]:
        return {
            "rules": {
                rule.text: {name: state.to_state() for name, state in holding.items()}
                for rule, holding in zip(self._rules, self._holding, strict=True)
            },
            "sources": [source.state_dict() for source in self._sources],
            "unjudged": list(self._unjudged),
            "names": list(self._names),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._holding = [
            {name: RuleState.from_state(one) for name, one in state["rules"].get(rule.text, {}).items()}
            for rule in self._rules
        ]
        for source, one in zip(self._sources, state["sources"], strict=True):
            source.load_state_dict(one)
        judged = state["rules"].keys() - set(state["unjudged"])
        self._unjudged = {rule.text: rule for rule in self._rules if rule.text not in judged}
        self._names = dict.fromkeys(state["names"])

    def run_event(self, event: Event, state: Snapshot, logger: Logger) -> None:
        values = LoggedNumbers()
        values.begin(state)
        for source in self._sources:
            if event in source.demand().events:
                source.run_event(event, state, values)
        began = state.previous_timestamp if event is Event.BATCH_END else None
        now = Observation(state.time_ns, began or state.timestamp, state.timestamp)
        for number, (rule, holding) in enumerate(zip(self._rules, self._holding, strict=True)):
            for name, value in _values_for(rule, values.numbers, state):
                self._unjudged.pop(rule.text, None)
                rule_state = holding.pop(name, None) or RuleState()
                status = rule_state.take_in(rule, value, now)
                if rule_state.since is not None:
                    holding[name] = rule_state
                if status is not None:
                    self._act(_notice(status, f"{state.seq}-{number}", rule, name, value, state), logger.context)

        if self._unjudged:
            self._note_names(values.numbers, state.fields)

    def close(self, state: Snapshot, logger: Logger) -> None:
        # Where nothing came at all there is nothing to say about names.
        for rule in self._unjudged.values() if self._names else ():
            _say(f"rule {rule.text!r} was never judged: no number is called {_told_names(rule, list(self._names))}")

    def _note_names(self, logged: Iterable[str], fields: Mapping[str, Any]) -> None:
        for name in (*logged, *_names_of(fields)):
            if len(self._names) >= _MOST_NAMES:
                break
            self._names[name] = None

    def _act(self, notice: Notice, run: RunContext) -> None:
        if run.run_dir is not None:
            about, text = f"{notice.rule} {notice.metric}", f"{notice.rule} ({notice.metric} is {notice.value:g})"
            note_alert(
                run.run_dir,
                RunAlert(notice.id, notice.status, about, text, notice.time, notice.attempt, notice.batch),
            )
        if self._dumps and notice.status == "firing":
            _dump(notice, run)
        for action in self._actions:
            try:
                action(notice)
            except OSError as error:
                _say(f"the notice of {notice.rule!r} could not be given: {error}")


def _dump(notice: Notice, run: RunContext) -> None:
    if run.command is None:
        return  # a recording, which is over
    try:
        outcome = run.command("dump", "alert", reason=str(notice))
    except OffloopError as error:
        _say(f"the flight recorder was not written: {error}")
    else:
        _say(str(outcome))


def _values_for(rule: Rule, logged: Mapping[str, float], state: Snapshot) -> Iterable[tuple[str, float]]:
    """The metrics that a rule is about and that have a value at this event."""
    if rule.name is None:
        return [(name, value) for name, value in logged.items() if name.startswith((_LOSSES, _METRICS))]
    if rule.key is None and rule.name in logged:
        return [(rule.name, logged[rule.name])]
    # At an evaluation the training's loss is not logged, and `loss` would stand for the loss of the evaluation.
    if rule.key is None and rule.name != "loss" and (found := MetricNames(logged).matches(rule.name)):
        return [(name, logged[name]) for name in found]
    name, value = rule.name, state.fields.get(rule.name)
    if rule.key is not None:
        name, value = f"{name}[{rule.key}]", value.get(rule.key) if isinstance(value, Mapping) else None
    return [(name, value)] if isinstance(value, float | int) else []


def _names_of(fields: Mapping[str, Any]) -> Iterator[str]:
    for name, value in fields.items():
        if isinstance(value, float | int):
            yield name
        elif isinstance(value, Mapping):
            yield from (f"{name}[{key}]" for key, number in value.items() if isinstance(number, float | int))


def _told_names(rule: Rule, names: Sequence[str]) -> str:
    if rule.name is None:
        missing, meant = f"{_LOSSES}... or {_METRICS}...", ""
    else:
        missing = rule.name if rule.key is None else f"{rule.name}[{rule.key}]"
        meant = close_matches(missing, names)
    shown, more = ", ".join(names[:_SHOWN_NAMES]), len(names) - _SHOWN_NAMES
    return f"{missing}; {meant}there were {shown}{f' and {more} more' if more > 0 else ''}"


def _say(message: str) -> None:
    say(message, err=True)


def _notice(status: Any, identity: str, rule: Rule, name: str, value: float, state: Snapshot) -> Notice:
    return Notice(
        id=f"{state.run_name}-{state.attempt}-{identity}-{name}",
        status=status,
        rule=rule.text,
        metric=name,
        value=value,
        run=state.run_name,
        attempt=state.attempt,
        epoch=state.timestamp.values.epoch,
        batch=state.timestamp.values.batch,
        time=state.time,
    )


def _listed(given: Iterable[str]) -> list[str]:
    parts = given.split(",") if isinstance(given, str) else given
    return [part.strip() for part in parts if part.strip()]
