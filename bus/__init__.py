"""The stream of a training run: publisher, broker, subscriber and recording. Needs no torch.

The other packages build on this one: ``trainer`` publishes, ``consumers`` subscribe."""

from typing import TYPE_CHECKING

from offloop.bus.lazy import lazy_exports

if TYPE_CHECKING:
    from offloop.bus.errors import *  # noqa: F403  # all errors
    from offloop.bus.protocol.order import Ending as Ending
    from offloop.bus.protocol.order import Gap as Gap
    from offloop.bus.protocol.snapshot import Snapshot as Snapshot
    from offloop.bus.publisher.publisher import Publisher as Publisher
    from offloop.bus.publisher.publisher import PublisherStatistics as PublisherStatistics
    from offloop.bus.recording.recording import Recording as Recording
    from offloop.bus.runs.directory import Attempt as Attempt
    from offloop.bus.runs.directory import RunInfo as RunInfo
    from offloop.bus.runs.directory import find_run as find_run
    from offloop.bus.runs.directory import list_runs as list_runs
    from offloop.bus.runs.directory import new_run_name as new_run_name
    from offloop.bus.runs.directory import runs_dir as runs_dir
    from offloop.bus.subscriber.subscriber import Subscriber as Subscriber
    from offloop.bus.types.deferred import Deferred as Deferred
    from offloop.bus.types.demand import BASE_EVENTS as BASE_EVENTS
    from offloop.bus.types.event import Event as Event
    from offloop.bus.types.image import Image as Image
    from offloop.bus.types.time import Time as Time
    from offloop.bus.types.time import TimeUnit as TimeUnit
    from offloop.bus.types.timeouts import Timeouts as Timeouts
    from offloop.bus.types.timestamp import Timestamp as Timestamp
    from offloop.bus.types.timestamp import wall_clock as wall_clock
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
