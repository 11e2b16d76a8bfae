"""Runs of frameworks of which only the logging is seen."""

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from offloop.attached.options import as_run_name
from offloop.attached.training import Framework
from offloop.bus.publisher.publisher import Publisher
from offloop.bus.types.commands import Command
from offloop.bus.types.demand import BASE_EVENTS
from offloop.bus.types.event import Event
from offloop.bus.types.timestamp import Timestamp
from offloop.trainer.stream.description import plain_value


class LoggedRun(Publisher):
    """A run whose batches are the steps that a framework's logging mentions. Commands are refused."""

    def __init__(
        self, name: object, framework: str, events: Iterable[Event], config: Mapping[str, Any] | None = None
    ) -> None:
        self.batches: int | None = None
        """Batches done; ``None`` before the first step."""
        seen = (Event.INIT, Event.FIT_START, Event.BATCH_END)
        info = {
            "framework": {"name": framework, "version": Framework(framework, framework).version},
            "unavailable": {"events": [one.value for one in Event if one not in seen], "fields": {}},
        }
        if config is not None:
            info["config"] = plain_value(config)
        me = weakref.ref(self)

        def refuse(command: Command) -> None:
            if (run := me()) is not None:
                reached = Timestamp(batch=run.batches or 0).values
                run.answer(command, Event.BATCH_END, reached, f"{framework}'s logging cannot change the training")

        super().__init__(as_run_name(name), info=info, events=BASE_EVENTS.union(events), on_command=refuse)

    def reach(self, batches: int) -> None:
        """Publish the end of a batch, unless this number of batches was reached before."""
        if self.batches is not None and batches > self.batches:
            self.publish(Event.BATCH_END, batch=batches)
        self.batches = max(batches, self.batches or 0)
