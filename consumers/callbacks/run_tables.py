"""The run's own tables and spans."""

from offloop.bus.errors import ProtocolError
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.protocol.tables import RowsAdded
from offloop.bus.strict_json import json_text
from offloop.bus.types.demand import Demand, EventDemand
from offloop.bus.types.event import ANY_CUSTOM, Event
from offloop.consumers.api.callback import Callback
from offloop.consumers.api.logger import Logger


class Tables(Callback):
    """Passes the rows of the training's tables, such as prompts and completions, to the loggers.

    Requests all tables, so those that are logged on demand too. Lists in cells become JSON, an image its hash. A
    logger that keeps tables gets one for each time that rows were added.

    Args:
        tables: names of tables; by default all."""

    def __init__(self, tables: tuple[str, ...] = ()) -> None:
        self._events = [Event(f"#{name}") for name in tables] or [Event("#*")]

    def demand(self) -> Demand:
        return Demand.of(self._events)

    def run_event(self, event: Event, state: Snapshot, logger: Logger) -> None:
        try:
            added = RowsAdded.of(state)
        except ProtocolError:
            return
        rows = [[json_text(cell) if isinstance(cell, list | dict) else cell for cell in row] for row in added.rows]
        if rows:
            logger.log_table(added.columns, rows, added.table, added.step)


class Trace(Callback):
    """Requests what a timeline shows: spans and events of the training's own, and the phases of batches.

    They are in the recording from then on: ``offloop export RUN --to trace`` draws them for Perfetto.

    Args:
        every: batches from one with phases to the next."""

    def __init__(self, every: int = 1) -> None:
        self._every = every

    def demand(self) -> Demand:
        return Demand({ANY_CUSTOM: EventDemand(), Event.BATCH_END: EventDemand(1, {"phases": self._every})})

    def run_event(self, event: Event, state: Snapshot, logger: Logger) -> None:
        pass
