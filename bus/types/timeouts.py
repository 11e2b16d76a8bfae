"""How long a publisher or subscriber waits for others."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Timeouts:
    """Time-outs in seconds. ``Publisher`` and ``Subscriber`` each take one as ``timeouts``."""

    default: ClassVar["Timeouts"]
    """The one that is used where none is given."""

    answer: float = 5.0
    """For the broker's answer to a request."""
    silence: float = 5.0
    """For any message of a broker, before it counts as silent."""
    broker_start: float = 20.0
    """For a broker of the publisher's own to be ready."""
    welcome: float = 10.0
    """For the broker's welcome to a new publisher."""
    flush: float = 5.0
    """For the next acknowledgement, when a publisher is closed."""
    broker_exit: float = 3.0
    """For the publisher's own broker to finish the recording, when it is closed."""
    copy: float = 2.0
    """Until all of the run is in the NATS servers to which it is copied, when a publisher is closed."""
    gap: float = 5.0
    """For missing events, before a subscriber counts them as lost."""


Timeouts.default = Timeouts()
