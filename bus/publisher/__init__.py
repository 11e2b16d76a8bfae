"""Publishes one rank's events: buffer, session with the broker, connection, launch of a broker of one's own.

May import: net, protocol, runs. Begin with ``publisher``, then ``session_state`` and ``outbox``.
"""

from typing import TYPE_CHECKING

from offloop.bus.lazy import lazy_exports

if TYPE_CHECKING:
    from offloop.bus.publisher.publisher import Publisher, PublisherStatistics

__all__ = ["Publisher", "PublisherStatistics"]

__getattr__, __dir__ = lazy_exports(__name__, {"offloop.bus.publisher.publisher": __all__})
