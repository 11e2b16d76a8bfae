"""A metric of the training, by its full or short name, with the batch that its value belongs to."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.event import Event
from offloop.bus.types.metrics import (
    MetricNames,
    direction_of,
    flatten,
    is_named,
    is_of_evaluation,
    logged_in,
    with_logged_names,
)
from offloop.consumers.api.callback import CannotWorkError
from offloop.consumers.api.logger import Logger, RunContext
from offloop.consumers.callbacks.trainer_metrics import TrainerMetrics


class MonitoredValue(NamedTuple):
    metric: str
    batch: int
    value: float


class MonitoredMetric:
    """The newest value of a metric, by its full name (``metrics/eval/MulticlassAccuracy``) or short name (``loss``).

    Without a name it is the metric by which evaluations compare: the first by name of those whose greatest value is the
    best, or else of those whose least value is. See :class:`offloop.bus.types.metrics.MetricNames`."""

    def __init__(self, name: str | None) -> None:
        self.name = name
        self._source = TrainerMetrics()
        self._found: dict[str, MonitoredValue] = {}

    def take_in(self, event: Event, state: Snapshot) -> None:
        for batch, metrics in logged_in(state.fields):
            self._note(batch, with_logged_names(flatten(metrics)))
        logger = LoggedNumbers()
        self._source.log_own(event, state, logger)
        # Not the step for which they are logged: a batch is logged for the step at which it began.
        self._note(state.timestamp.values.batch, logger.numbers)

    @property
    def newest(self) -> MonitoredValue | None:
        """The newest value; ``None`` before the first. Raises CannotWorkError when several metrics have that name."""
        if self.name is None:
            known = sorted(self._found.values(), key=lambda one: (direction_of(one.metric) == "min", one.metric))
            return known[0] if known else None
        names = MetricNames(self._found)
        found = names.matches(self.name)
        if len(found) > 1:
            raise CannotWorkError(f"monitor {names.ambiguous(self.name, found)}")
        return self._found[found[0]] if found else None

    def state_dict(self) -> dict[str, Any]:
        return {"found": [list(one) for one in self._found.values()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        values: Iterable[Any] = state["found"]
        self._found = {one[0]: MonitoredValue(*one) for one in values if self._is_meant(one[0])}

    def _note(self, batch: int, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            if isinstance(value, float | int) and self._is_meant(name):
                self._found[name] = MonitoredValue(name, batch, float(value))

    def _is_meant(self, name: str) -> bool:
        if self.name is None:
            return is_of_evaluation(name) and direction_of(name) is not None
        return is_named(name, self.name)


class LoggedNumbers(Logger):
    def __init__(self, context: RunContext | None = None) -> None:
        super().__init__(context)
        self.numbers: dict[str, float] = {}

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self.numbers.update({name: value for name, value in metrics.items() if isinstance(value, float | int)})
