"""The stream of a training run: events, training time, snapshots, and the publisher, broker, subscriber and recording
that carry them.

Needs no torch. The other packages build on this one: ``trainer`` publishes, ``consumers`` subscribe.
"""

from typing import TYPE_CHECKING

from bus.lazy import lazy_exports

if TYPE_CHECKING:
    from bus.broker.broker import Broker
    from bus.broker.runs import BrokerStatistics
    from bus.errors import (
        BrokerError,
        CheckpointError,
        ClosedError,
        ConfigurationError,
        FieldNotAvailableError,
        FrozenSnapshotError,
        InvalidRunNameError,
        InvalidTimeError,
        OffloopError,
        ProtocolError,
        RankError,
        RecordingError,
        RunDirectoryError,
        RunError,
        RunIsLiveError,
        RunNotFoundError,
        TimeUnitError,
    )
    from bus.protocol.order import Ending, Gap
    from bus.protocol.snapshot import Snapshot
    from bus.publisher.publisher import Publisher, PublisherStatistics
    from bus.recording.recording import Recording
    from bus.runs.directory import Attempt, RunInfo, find_run, list_runs, new_run_name, runs_dir
    from bus.subscriber.subscriber import Subscriber
    from bus.types.deferred import Deferred
    from bus.types.demand import BASE_EVENTS
    from bus.types.event import Event
    from bus.types.time import Time, TimeUnit
    from bus.types.timeouts import Timeouts
    from bus.types.timestamp import Timestamp, wall_clock

__all__ = [
    "BASE_EVENTS",
    "Attempt",
    "Broker",
    "BrokerError",
    "BrokerStatistics",
    "CheckpointError",
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
    "RankError",
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
    "Timeouts",
    "Timestamp",
    "find_run",
    "list_runs",
    "new_run_name",
    "runs_dir",
    "wall_clock",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "bus.broker.broker": ["Broker"],
        "bus.broker.runs": ["BrokerStatistics"],
        "bus.types.deferred": ["Deferred"],
        "bus.types.timeouts": ["Timeouts"],
        "bus.types.demand": ["BASE_EVENTS"],
        "bus.errors": [
            "BrokerError",
            "CheckpointError",
            "ClosedError",
            "ConfigurationError",
            "FieldNotAvailableError",
            "FrozenSnapshotError",
            "InvalidRunNameError",
            "InvalidTimeError",
            "OffloopError",
            "ProtocolError",
            "RankError",
            "RecordingError",
            "RunDirectoryError",
            "RunError",
            "RunIsLiveError",
            "RunNotFoundError",
            "TimeUnitError",
        ],
        "bus.types.event": ["Event"],
        "bus.publisher.publisher": ["Publisher", "PublisherStatistics"],
        "bus.recording.recording": ["Recording"],
        "bus.runs.directory": ["Attempt", "RunInfo", "find_run", "list_runs", "new_run_name", "runs_dir"],
        "bus.protocol.snapshot": ["Snapshot"],
        "bus.protocol.order": ["Ending", "Gap"],
        "bus.subscriber.subscriber": ["Subscriber"],
        "bus.types.timestamp": ["Time", "Timestamp", "TimeUnit", "wall_clock"],
    },
)
