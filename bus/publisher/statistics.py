"""Counts of a publisher."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PublisherStatistics:
    """Counts of a publisher since it began."""

    published: int
    """Events passed to the publisher."""
    sent: int
    """Events handed to the broker's connection, each counted once."""
    acknowledged: int
    """Events that the broker has recorded."""
    lag: int
    """Events published and not acknowledged yet."""
    resent: int
    """Events sent once more, to a broker that was started again or that had lost something."""
    dropped: int
    """Events given up unsent because the send buffer reached its bound."""
    held: int
    """Events that wait now for a value that is not computed yet."""
    backlog: int
    """Events in the send buffer that are not sent yet: they are gathered to be sent together, or the broker does not
    read fast enough."""
    backlog_bytes: int
    """Size of the send buffer: all events that are not acknowledged, sent or not."""
    backlog_bytes_high: int
    """The largest size that the send buffer has had."""
    broker_restarts: int
    """Number of times that the broker was lost and found or started again."""
    values_left_out: int
    """Values and fields that could not be sent, such as a text that is not UTF-8: all else of their event was."""
    nanoseconds_per_event: float
    """Processor time that publishing costs the thread that trains: the mean of encoding (measured at one event in 64)
    and of sending and listening (measured always). Without what the caller does before it publishes."""
