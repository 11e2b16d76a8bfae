"""Time-outs of publishers and subscribers."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Timeouts:
    """Time-outs in seconds. ``Publisher`` and ``Subscriber`` each take one as ``timeouts``."""

    default: ClassVar["Timeouts"]
    """The default of both."""

    answer: float = 5.0
    """For the broker's answer to a request."""
    silence: float = 5.0
    """For any message of a broker, before it counts as silent."""
    broker_start: float = 20.0
    """For the publisher's own broker to be ready."""
    welcome: float = 10.0
    """For the broker's welcome to a new publisher."""
    flush: float = 5.0
    """For the next acknowledgement, when a publisher is closed."""
    broker_exit: float = 3.0
    """For the publisher's own broker to finish the recording, when the publisher is closed."""
    copy: float = 2.0
    """For the copy of the run in NATS servers to be complete, when a publisher is closed."""
    gap: float = 5.0
    """For missing events, before a subscriber counts them as lost."""


Timeouts.default = Timeouts()
