"""The base class: one method for each event, and what a subclass is sent."""

import math
from typing import Any

import pytest
from consumers_stream import Collector, batch_end, snapshots_of_training

from offloop.bus.errors import ConfigurationError
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.event import Event
from offloop.consumers import Callback, Logger, Runner
from offloop.consumers.api.logger import Table, Text


def test_a_callback_requests_the_events_whose_methods_it_overrides() -> None:
    class Base(Callback):
        def batch_end(self, state: Snapshot, logger: Logger) -> None: ...

    class Derived(Base):
        async def eval_end(self, state: Snapshot, logger: Logger) -> None: ...

        def close(self, state: Snapshot, logger: Logger) -> None: ...

    assert Callback().demand().events == set()
    assert Derived().demand().events == {Event.BATCH_END, Event.EVAL_END}


def test_overriding_run_event_requests_every_event() -> None:
    class Everything(Callback):
        def __init__(self) -> None:
            self.seen: list[Event] = []

        def run_event(self, event: Event, state: Snapshot, logger: Logger) -> None:
            self.seen.append(event)

        def batch_end(self, state: Snapshot, logger: Logger) -> None:
            raise AssertionError("run_event stands in its place")

    callback = Everything()
    assert callback.demand().events == set(Event)
    stream = snapshots_of_training()
    Runner(stream, [callback]).run()
    assert callback.seen == [snapshot.event for snapshot in stream]


def test_run_event_requests_only_the_events_that_the_class_names() -> None:
    class Some(Callback):
        events = ("epoch_end", Event.FIT_END)

        def run_event(self, event: Event, state: Snapshot, logger: Logger) -> None: ...

    class Wrong(Some):
        events = ("epoch_ends",)

    assert Some().demand().events == {Event.EPOCH_END, Event.FIT_END}
    with pytest.raises(ConfigurationError, match="epoch_end"):
        Runner([], [Wrong()])


def test_metrics_of_one_event_and_step_become_one_row_in_the_order_of_the_calls() -> None:
    class First(Callback):
        def batch_end(self, state: Snapshot, logger: Logger) -> None:
            logger.log_metrics({"b": 1})
            logger.log_metrics({"old": 0.5}, step=4)

    class Second(Callback):
        async def batch_end(self, state: Snapshot, logger: Logger) -> None:
            logger.log_metrics({"a": True, "b": 2})
            logger.log_hyperparameters({"seed": 17})

    collector = Collector()
    Runner([batch_end(5)], [First(), Second()], [collector]).run()
    assert [(row.step, list(row.metrics.items())) for row in collector.rows] == [
        (5, [("b", 2), ("a", True)]),
        (4, [("old", 0.5)]),
    ]
    assert collector.hyperparameters == {"seed": 17}


class Scalar:
    """What a tensor of one element, or of several, looks like."""

    def __init__(self, *values: float) -> None:
        self.values = values

    def item(self) -> float:
        if len(self.values) != 1:
            raise RuntimeError("cannot be converted to a scalar")
        return self.values[0]


def test_single_element_values_are_logged_as_numbers() -> None:
    logger = Logger()
    logger.log_metrics({"x": Scalar(0.5), "y": "text"}, step=1)
    assert logger.take_rows(batch_end(1))[0].metrics == {"x": 0.5, "y": "text"}


def test_rows_are_in_the_order_in_which_their_steps_were_first_logged() -> None:
    logger = Logger()
    logger.log_metrics({"a": 1}, step=7)
    logger.begin(batch_end(3))
    logger.log_metrics({"b": 2})
    assert [row[0::2] for row in logger.take_rows(batch_end(3))] == [(7, {"a": 1}), (3, {"b": 2})]
    logger.log_metrics({"a": 1})
    logger.log_metrics({"b": 2}, step=7)
    logger.log_metrics({"c": 3})
    logger.log_metrics({"d": 4}, step=3)
    assert [row[0::2] for row in logger.take_rows(batch_end(3))] == [(3, {"a": 1, "c": 3, "d": 4}), (7, {"b": 2})]
    logger.log_metrics({"a": 1})
    logger.begin(batch_end(4))
    logger.log_metrics({"a": 2})
    assert [row[0::2] for row in logger.take_rows(batch_end(4))] == [(3, {"a": 1}), (4, {"a": 2})]
    assert not logger.pending


@pytest.mark.parametrize("metrics", [{"x": Scalar(1, 2)}, {"x": None}, {"time": 1}, {7: 1.0}, {None: 1.0}])
def test_invalid_metrics_are_refused(metrics: dict[str, object]) -> None:
    logger = Logger()
    with pytest.raises(ConfigurationError, match=f"{next(iter(metrics))!r}"):
        logger.log_metrics({"fine": 1} | metrics, step=1)
    assert not logger.pending


@pytest.mark.parametrize("step", ["x", math.nan, math.inf, 2**60, [1]])
def test_an_invalid_step_is_refused(step: Any) -> None:
    logger = Logger()
    with pytest.raises(ConfigurationError, match=r"^step is .*: use a whole number"):
        logger.log_metrics({"x": 1}, step=step)
    assert not logger.pending


def test_what_utf_8_cannot_represent_is_escaped() -> None:
    logger = Logger()
    logger.log_metrics({"caf\udce9": 1, "name": "caf\udce9", "é": 2}, step=1)
    assert logger.take_rows(batch_end(1))[0].metrics == {r"caf\udce9": 1, "name": r"caf\udce9", "é": 2}
    logger.log_table(["\udce9"], [["\udce9"]], name="\udce9", step=1)
    logger.log_text("\udce9", name="\udce9", step=1)
    logged = logger.take_non_metrics(batch_end(1))
    assert logged is not None
    escaped, time = r"\udce9", batch_end(1).time
    assert logged.entries == [Table(1, time, escaped, [escaped], [[escaped]]), Text(1, time, escaped, escaped)]
