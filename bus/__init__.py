"""The stream of a training run: events, training time, snapshots, and the publisher, broker, subscriber and recording
that carry them.

Needs no torch. The other packages build on this one: ``trainer`` publishes, ``consumers`` subscribe.
"""

from typing import TYPE_CHECKING

from offloop.bus.lazy import lazy_exports

if TYPE_CHECKING:
    from offloop.bus.errors import (
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
    from offloop.bus.protocol.order import Ending, Gap
    from offloop.bus.protocol.snapshot import Snapshot
    from offloop.bus.publisher.publisher import Publisher, PublisherStatistics
    from offloop.bus.recording.recording import Recording
    from offloop.bus.runs.directory import Attempt, RunInfo, find_run, list_runs, new_run_name, runs_dir
    from offloop.bus.subscriber.subscriber import Subscriber
    from offloop.bus.types.deferred import Deferred
    from offloop.bus.types.demand import BASE_EVENTS
    from offloop.bus.types.event import Event
    from offloop.bus.types.time import Time, TimeUnit
    from offloop.bus.types.timeouts import Timeouts
    from offloop.bus.types.timestamp import Timestamp, wall_clock

__all__ = [
    "BASE_EVENTS",
    "Attempt",
    "BrokerError",
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
        "offloop.bus.types.deferred": ["Deferred"],
        "offloop.bus.types.timeouts": ["Timeouts"],
        "offloop.bus.types.demand": ["BASE_EVENTS"],
        "offloop.bus.errors": [
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
        "offloop.bus.types.event": ["Event"],
        "offloop.bus.publisher.publisher": ["Publisher", "PublisherStatistics"],
        "offloop.bus.recording.recording": ["Recording"],
        "offloop.bus.runs.directory": ["Attempt", "RunInfo", "find_run", "list_runs", "new_run_name", "runs_dir"],
        "offloop.bus.protocol.snapshot": ["Snapshot"],
        "offloop.bus.protocol.order": ["Ending", "Gap"],
        "offloop.bus.subscriber.subscriber": ["Subscriber"],
        "offloop.bus.types.timestamp": ["Time", "Timestamp", "TimeUnit", "wall_clock"],
    },
)
