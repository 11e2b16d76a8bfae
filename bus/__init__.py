"""The stream of a training run: events, training time, snapshots, and the publisher, broker, subscriber and recording
that carry them.

Needs no torch. The other packages build on this one: ``trainer`` publishes, ``consumers`` subscribe.
"""

from bus.broker import Broker, BrokerStatistics
from bus.clock import wall_clock
from bus.deferred import Deferred
from bus.demand import BASE_EVENTS
from bus.errors import (
    BrokerError,
    ClosedError,
    ConfigurationError,
    FieldNotAvailableError,
    FrozenSnapshotError,
    InvalidRunNameError,
    InvalidTimeError,
    OffloopError,
    ProtocolError,
    RecordingError,
    RunDirectoryError,
    RunError,
    RunIsLiveError,
    RunNotFoundError,
    TimeUnitError,
)
from bus.event import Event
from bus.publisher import Publisher, PublisherStatistics
from bus.recording import Recording
from bus.runs import Attempt, RunInfo, find_run, list_runs, new_run_name, runs_dir
from bus.snapshot import Snapshot
from bus.stream import Ending, Gap
from bus.subscriber import Subscriber
from bus.time import Time, Timestamp, TimeUnit

__all__ = [
    "BASE_EVENTS",
    "Attempt",
    "Broker",
    "BrokerError",
    "BrokerStatistics",
    "ClosedError",
    "ConfigurationError",
    "Deferred",
    "Ending",
    "Event",
    "FieldNotAvailableError",
    "FrozenSnapshotError",
    "Gap",
    "InvalidRunNameError",
    "InvalidTimeError",
    "OffloopError",
    "ProtocolError",
    "Publisher",
    "PublisherStatistics",
    "Recording",
    "RecordingError",
    "RunDirectoryError",
    "RunError",
    "RunInfo",
    "RunIsLiveError",
    "RunNotFoundError",
    "Snapshot",
    "Subscriber",
    "Time",
    "TimeUnit",
    "TimeUnitError",
    "Timestamp",
    "find_run",
    "list_runs",
    "new_run_name",
    "runs_dir",
    "wall_clock",
]
