"""Waits for consumers that may stop the training, so that they stop it exactly where they decide."""

import logging
import time
from collections.abc import Collection, Iterable
from typing import Any

from offloop.bus.errors import ConfigurationError
from offloop.bus.publisher.publisher import Publisher
from offloop.bus.types.demand import barrier_events_of
from offloop.bus.types.event import Event
from offloop.trainer.control.remote_control import RemoteControl
from offloop.trainer.distributed.ranks import Ranks
from offloop.trainer.stream.publishing import StatePublisher

_log = logging.getLogger("offloop")

ALL = "all"  # stands for every consumer with barrier events
OWN_CALLBACKS = "callbacks"  # name of the consumer that runs a trainer's own callbacks
_EVENTS = frozenset({Event.BATCH_END, Event.EPOCH_END, Event.EVAL_END})


class ConsumerBarrier:
    """Publishes events, and waits for consumers after the events at which they may stop the training.

    A stop takes effect at that very event, as in a callback within the loop. It waits for consumers of these ``names``,
    no longer than ``seconds`` at a time. It waits again for a slower one once that has caught up. With several ranks
    the first one waits, and informs the others at each such event."""

    def __init__(
        self,
        published: StatePublisher,
        publisher: Publisher,
        control: RemoteControl,
        names: Collection[str],
        seconds: float,
        ranks: Ranks | None = None,
    ) -> None:
        self._published = published
        self._publisher = publisher
        self._control = control
        self._names = None if ALL in names else frozenset(names)
        publisher.expected_consumers.update(frozenset(names) - {ALL})
        self._seconds = seconds
        self._ranks = ranks
        self._overdue: dict[Event, set[str]] = {event: set() for event in _EVENTS}
        self._is_first = ranks is None or ranks.rank == 0
        if ranks is not None:
            publisher.kept_events = _EVENTS

    def publish(self, event: Event) -> None:
        """Publish an event, and wait if a consumer may decide at it."""
        self._published.publish(event)
        if event is Event.FIT_START and self._is_first:
            self._await_presence()
            # Their demand is met from the first batch on.
            self._published.take_up_demand()
        elif event in _EVENTS:
            if self._is_first:
                self._await_consumers(event)
            self._control.apply_stops(event)

    def _await_presence(self) -> None:
        deadline = time.monotonic() + self._seconds
        while missing := sorted(self._publisher.expected_consumers):
            if self._publisher.closed or self._control.is_asked_to_stop:
                return
            if time.monotonic() >= deadline:
                _log.warning(
                    "run %s: no consumer %s with barrier events has come within %g s: the training continues without",
                    *(self._publisher.run_name, ", ".join(map(repr, missing)), self._seconds),
                )
                return
            self._publisher.wait()

    def _await_consumers(self, event: Event) -> None:
        overdue, known = self._publisher.wait_until_handled(event, self._names, 0), self._overdue[event]
        known &= overdue
        if overdue - known:
            overdue = self._publisher.wait_until_handled(
                event, overdue - known, self._seconds, lambda: self._control.is_asked_to_stop
            )
            if self._control.is_asked_to_stop:
                # After a stop no consumer is overdue.
                return
            for name in sorted(overdue):
                _log.warning(
                    "run %s: consumer %s has not decided at %s within %g s: the training continues, and waits for it "
                    "again when it has caught up",
                    *(self._publisher.run_name, name, event.value, self._seconds),
                )
            known |= overdue


def check_wait_for(names: Any, callbacks: Iterable[Any] = ()) -> frozenset[str]:
    """Return the names of the consumers to wait for; ``callbacks`` are the trainer's own."""
    given = [names] if isinstance(names, str) else [] if names is None else names
    if not isinstance(given, list | tuple | set | frozenset) or not all(isinstance(one, str) and one for one in given):
        raise ConfigurationError(
            f"wait_for is {names!r}: give the names of consumers, 'callbacks' for the trainer's own, or 'all'"
        )
    if not barrier_events_of(callbacks) & _EVENTS and OWN_CALLBACKS in given:
        raise ConfigurationError(
            f"wait_for names {OWN_CALLBACKS!r}, and none of the trainer's callbacks has barrier_events: give one "
            f"with {', '.join(sorted(event.value for event in _EVENTS))}, or leave {OWN_CALLBACKS!r} out"
        )
    return frozenset(given)
