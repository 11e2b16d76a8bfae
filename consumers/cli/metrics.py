"""What the command ``consumer --list-metrics`` shows: what a run has logged."""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from offloop.bus.printing import escape, say, table
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.recording.recording import Recording
from offloop.bus.types.event import Event
from offloop.bus.types.metric_names import MetricNames
from offloop.bus.types.source import Source
from offloop.consumers.api.callback import Callback
from offloop.consumers.api.logger import Logger, LoggerDestination, LogValue, Row
from offloop.consumers.callbacks.lr_monitor import LRMonitor
from offloop.consumers.callbacks.trainer_metrics import TrainerMetrics
from offloop.consumers.cli.selector import Found
from offloop.consumers.loggers.console import format_value
from offloop.consumers.runner.runner import Runner

_COLUMNS = ("name", "label", "event", "last value", "full name")
_KNOWN = {"batch_size", "dataloader_len", "loss", "microbatch", "world_size"}


class LoggedValue(NamedTuple):
    """What a run logged last under a name."""

    label: str
    """The evaluator that it belongs to, or ``train``; empty for what belongs to none."""
    event: Event
    value: LogValue


class _OwnFields(Callback):
    """Logs what a loop of somebody's own says of itself, in numbers."""

    def batch_end(self, state: Snapshot, logger: Logger) -> None:
        """Logs the numbers among the fields."""
        logger.log_metrics(
            {name: value for name, value in state.fields.items() if type(value) in (int, float) and name not in _KNOWN}
        )


class _LastValues(LoggerDestination):
    """Keeps the last value of each name."""

    def __init__(self) -> None:
        self.values: dict[str, LoggedValue] = {}

    def log_rows(self, rows: Sequence[Row], state: Snapshot) -> None:
        """Takes everything that was logged during an event."""
        labels = dict.fromkeys(("train", *state.eval_metrics))
        for row in rows:
            for name, value in row.metrics.items():
                label = next((one for one in labels if name.startswith((f"metrics/{one}/", f"loss/{one}/"))), "")
                self.values[name] = LoggedValue(label, state.event, value)


def read_logged(snapshots: Iterable[Snapshot]) -> tuple[dict[str, LoggedValue], Source]:
    """What a stream's events bring, by the name under which the callbacks ``metrics`` and ``lr`` log it; and what they
    come from."""
    last = _LastValues()
    statistics = Runner(snapshots, [TrainerMetrics(), LRMonitor(), _OwnFields()], [last]).run()
    return last.values, statistics.source


def list_metrics(found: Found) -> list[str]:
    """Prints what a run has logged so far, a name a line; returns what else is to be said of it.

    Raises:
        RecordingError: the recording cannot be read.
        BrokerError: the NATS servers do not answer.
    """
    with contextlib.ExitStack() as opened:
        snapshots: Iterable[Snapshot]
        if isinstance(found, Recording):
            name, goes_on, snapshots = found.run_name, False, found
        else:
            name, goes_on = found.name, found.is_live
            snapshots = opened.enter_context(found.place.recorded(found))
        logged, source = read_logged(snapshots)
    damage = [snapshots.damage] if isinstance(snapshots, Recording) and snapshots.damage and not goes_on else []
    if not logged:
        nothing = f"run {name} has logged nothing{' so far: ask again after its first batch' if goes_on else ''}"
        return [nothing, *damage]
    for line in _table(logged):
        say(line)
    hint = "early-stop and threshold-stop take metrics/LABEL/NAME as dataloader_label=LABEL and monitor=NAME"
    later = [f"run {name} is live: what it logs later is not in this list"] if goes_on else []
    never = [event.value for event in Event if event in source.events] + list(source.fields)
    without = [f"{source.name} never gives {', '.join(never)}; 'offloop show --details' says why"] if never else []
    return [*later, *without, hint, *damage]


def _table(logged: Mapping[str, LoggedValue]) -> list[str]:
    short = MetricNames(logged).short
    rows = [_COLUMNS] + [
        (short(name), one.label or "-", one.event.value, format_value(one.value), name)
        for name, one in sorted(logged.items())
    ]
    return table([tuple(map(escape, row)) for row in rows])
